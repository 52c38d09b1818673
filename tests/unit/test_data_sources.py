"""Rows of every known format, files that are torn or missing, and what is dropped and counted."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specdraft.core.errors import ConfigError, DataError
from specdraft.core.files import file_sha256
from specdraft.data import files
from specdraft.data._config import DataConfig
from specdraft.data.formats import NotAConversationError, UnusableRowError, parse_row
from specdraft.data.sources import builtin_path, load_conversations, open_source

USER = {"role": "user", "content": "Q"}
ANSWER = {"role": "assistant", "content": "A"}
OPEN = {"role": "assistant", "content": None}
SYSTEM = {"role": "system", "content": "S"}

FORMATS: dict[str, tuple[dict[str, Any], list[dict[str, str | None]]]] = {
    "messages": ({"messages": [SYSTEM, USER, ANSWER, USER]}, [SYSTEM, USER, ANSWER, USER, OPEN]),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}, ANSWER]}, [USER, ANSWER]),
    "developer": ({"messages": [{"role": "developer", "content": "S"}, USER]}, [SYSTEM, USER, OPEN]),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}], "system": "S"},
        [SYSTEM, USER, ANSWER],
    ),
    "turns": ({"turns": ["Q", "Q"], "question_id": 81}, [USER, OPEN, USER, OPEN]),
    "alpaca": ({"instruction": "Q", "input": "", "output": "A"}, [USER, ANSWER]),
    "alpaca_input": (
        {"instruction": "Q", "input": "with this", "output": ""},
        [{"role": "user", "content": "Q\n\nwith this"}, OPEN],
    ),
    "prompt": ({"prompt": "Q"}, [USER, OPEN]),
    "prompt_completion": ({"prompt": [USER], "completion": [ANSWER]}, [USER, ANSWER]),
    "prompt_text_completion": ({"prompt": "Q", "completion": "A"}, [USER, ANSWER]),
    "thinking": (
        {
            "messages": [USER, {"role": "assistant", "content": "A", "reasoning_content": "hm\n"}],
            "images": [],
            "tools": None,
        },
        [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nA"}],
    ),
    "thinking_in_place": (
        {"messages": [USER, {"role": "assistant", "content": "<think>x</think>A", "reasoning": "x"}]},
        [USER, {"role": "assistant", "content": "<think>x</think>A"}],
    ),
    "right_to_left": (
        {"prompt": "שלום \u202eabc", "completion": "مرحبا 👩\u200d👧"},
        [{"role": "user", "content": "שלום \u202eabc"}, {"role": "assistant", "content": "مرحبا 👩\u200d👧"}],
    ),
    "other_columns_none": ({"messages": None, "prompt": "Q"}, [USER, OPEN]),
}

UNUSABLE = {
    "empty": {"messages": []},
    "starts with the assistant": {"messages": [ANSWER, USER, ANSWER]},
    "two user turns in a row": {"messages": [USER, USER, ANSWER]},
    "two assistant turns in a row": {"messages": [USER, ANSWER, ANSWER]},
    "no user turn": {"messages": [SYSTEM]},
    "a system message after the first": {"messages": [USER, SYSTEM, ANSWER]},
    "a message without text": {"prompt": "  "},
    "an empty answer": {"messages": [USER, {"role": "assistant", "content": ""}]},
    "content other than text": {"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]},
    "images": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    "audio": {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
    "video": {"messages": [USER, ANSWER], "videos": ["a.mp4"]},
    "text that is not Unicode": {"messages": [{"role": "user", "content": "half \ud83d"}, ANSWER]},
    "tool calls": {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]},
    "unknown role": {"messages": [{"role": "narrator", "content": "Once"}]},
}

NO_CONVERSATION = {
    "none of the columns": {"text": "Q"},
    "messages is a str": {"messages": "Q"},
    "messages holds a str": {"messages": ["Q"]},
    "lacks role and content": {"conversations": [{"speaker": "x"}]},
    "is a int, not text": {"messages": [{"role": "user", "content": 3}]},
    "turns is not a list of texts": {"turns": [["Q"]]},
    "not all texts": {"instruction": 3, "output": "A"},
}


def write_lines(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_one_normal_form(name: str) -> None:
    row, expected = FORMATS[name]
    assert parse_row(row) == expected


@pytest.mark.parametrize("reason", UNUSABLE)
def test_unusable_rows_are_dropped_with_their_reason(reason: str, tmp_path: Path) -> None:
    with pytest.raises(UnusableRowError) as caught:
        parse_row(UNUSABLE[reason])
    assert str(caught.value) == reason
    loaded = load_conversations([write_lines(tmp_path / "a.jsonl", UNUSABLE[reason], {"prompt": "Q"})])
    assert (len(loaded.conversations), loaded.dropped) == (1, Counter({reason: 1}))


def test_tool_turns_in_the_style_of_sharegpt_are_dropped() -> None:
    turns = [{"from": "human", "value": "Q"}, {"from": "function_call", "value": "{}"}]
    with pytest.raises(UnusableRowError, match="tool calls"):
        parse_row({"conversations": turns})
    with pytest.raises(UnusableRowError, match="tool calls"):
        parse_row({"messages": [USER, ANSWER], "tools": [{"name": "f"}]})


@pytest.mark.parametrize("reason", NO_CONVERSATION)
def test_a_row_that_is_no_conversation_names_its_line(reason: str, tmp_path: Path) -> None:
    with pytest.raises(NotAConversationError, match=reason):
        parse_row(NO_CONVERSATION[reason])
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "Q"}, NO_CONVERSATION[reason])
    with pytest.raises(DataError, match=rf"^data\.sources: line 2 of .*a\.jsonl is no conversation, got .*{reason}"):
        load_conversations([path])


def test_a_row_that_is_no_object_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 1 of .* the row is a list"):
        load_conversations([write_lines(tmp_path / "a.jsonl", ["Q"])])


def test_a_truncated_file_names_its_last_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "Q"}\n\n{"prompt": "cut o')
    with pytest.raises(DataError, match=r"^data\.sources: line 3 of .* is cut off, got '\{\"prompt\": \"cut o'"):
        load_conversations([str(path)])
    path.write_text('{"prompt": "Q"}\nnot json\n{"prompt": "Q"}\n')
    with pytest.raises(DataError, match=r"line 2 of .* is not JSON"):
        load_conversations([str(path)])
    path.write_bytes(b'{"prompt": "Q"}\n{"prompt": "\xff\xfe"}\n')
    with pytest.raises(DataError, match=r"line 2 of .* is not UTF-8, got invalid start byte in byte 13"):
        load_conversations([str(path)])
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "Q"}\n')
    assert len(load_conversations([str(path)]).conversations) == 1


def test_json_files_hold_an_array_or_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    rows = [{"prompt": "Q"}, {"prompt": "R"}]
    for text in (json.dumps(rows), json.dumps({"version": 1, "data": rows}), "\n".join(map(json.dumps, rows))):
        path.write_text(text)
        assert [c.user_turns for c in load_conversations([str(path)]).conversations] == [["Q"], ["R"]]
    path.write_text(json.dumps({"messages": [USER]}))
    assert len(load_conversations([str(path)]).conversations) == 1
    path.write_text('[{"prompt": "Q"},\n{"prompt": "cut')
    with pytest.raises(DataError, match=r"line 2 of .*a\.json is not JSON or is cut off"):
        load_conversations([str(path)])
    path.write_text("3")
    with pytest.raises(DataError, match="holds no rows, got a int"):
        load_conversations([str(path)])


def test_parquet_files(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    table = pyarrow.table({"messages": [[USER, ANSWER], [USER]], "category": ["x", None], "id": ["1", "2"]})
    pyarrow.parquet.write_table(table, path)
    loaded = load_conversations([str(path)])
    assert [(c.id, c.category, c.messages) for c in loaded.conversations] == [
        ("1", "x", [USER, ANSWER]),
        ("2", "", [USER, OPEN]),
    ]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="not a whole Parquet file"):
        load_conversations([str(path)])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.jsonl", "no such file, got missing.jsonl"),
        ("./missing", "no such file"),
        ("bultin", "neither builtin, a file nor a Hub id, got bultin"),
        ("builtin#test", "splits train, dev, heldout, got builtin#test"),
        ("specdraft/data/builtin/*.nothing", "no file matches"),
        ("pyproject.*", "unknown kind of file, got pyproject.toml for pyproject.*"),
        ("specdraft/core", "the folder has no .jsonl, .json, .parquet file"),
        ("pyproject.toml", "unknown kind of file"),
    ],
)
def test_sources_that_do_not_exist(source: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_conversations([source])


@pytest.mark.parametrize("streaming", [True, False])
def test_a_builder_of_datasets_itself(streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    path = write_lines(tmp_path / "a.jsonl", *({"prompt": f"Q{i}", "id": i} for i in range(5)))
    builder = datasets.load_dataset_builder("json", data_files={"test": path}, cache_dir=str(tmp_path / "cache"))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: builder)
    source = open_source("some/set#test", streaming=streaming)
    assert [c.id for c in source.conversations(source.report())] == ["0", "1", "2", "3", "4"]
    assert source.report().revision == source.fingerprint["revision"] == builder.hash
    with pytest.raises(DataError, match=r"^data\.sources: the Hub data set cannot be loaded, got some/set#train"):
        list(open_source("some/set#train", streaming=streaming).rows())


def test_folders_and_globs_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name in ("b.jsonl", "sub/a.json", "a.jsonl", ".hidden/c.jsonl"):
        write_lines(tmp_path / name, {"prompt": name})
    (tmp_path / "README.md").write_text("no rows")
    loaded = load_conversations([str(tmp_path), str(tmp_path / "*.jsonl"), str(tmp_path / "**" / "*.json")])
    assert [c.user_turns[0] for c in loaded.conversations] == [
        "a.jsonl",
        "b.jsonl",
        "sub/a.json",
        "a.jsonl",
        "b.jsonl",
        "sub/a.json",
    ]
    assert [report.num_files for report in loaded.reports] == [3, 2, 1]
    assert len({str(report.sha256) for report in loaded.reports}) == 3
    fingerprint = open_source(str(tmp_path)).fingerprint
    (tmp_path / "b.jsonl").rename(tmp_path / "bb.jsonl")
    assert open_source(str(tmp_path)).fingerprint == fingerprint
    write_lines(tmp_path / "bb.jsonl", {"prompt": "other"})
    assert open_source(str(tmp_path)).fingerprint != fingerprint


@pytest.mark.parametrize("block", [1, 2, 7, 1000])
def test_json_arrays_are_read_in_blocks(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK_CHARS", block)
    values = [{"prompt": 'a "quoted" ] text', "n": [1, 2.5e3, None, True]}, 12, "x", [], {}, "é👍\n", -7]
    path = tmp_path / "a.json"
    for indent in (None, 2):
        path.write_text("\n " + json.dumps(values, indent=indent, ensure_ascii=False) + " \n", encoding="utf-8")
        assert [row for _, row in files.read_rows(path)] == values
    path.write_text("[]")
    assert list(files.read_rows(path)) == []
    for text, line in (("[1,\n2,\n3 4]", 3), ('[1,\n{"a": yes}]', 2), ("[1]\n\n2", 3), ("[1,\n", 2), ('[1,\n"abc', 2)):
        path.write_text(text)
        with pytest.raises(DataError, match=rf"line {line} of .*a\.json is not JSON or is cut off"):
            list(files.read_rows(path))


def test_nothing_usable_lists_the_reasons(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"messages": []}, {"messages": [SYSTEM]}, {"messages": [SYSTEM]})
    with pytest.raises(DataError, match=r"no usable conversation, got .* \(no user turn: 2, empty: 1\)"):
        load_conversations([path])


def test_reports_and_limit(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", *({"prompt": f"Q{i}", "id": i} for i in range(20)), {"messages": []})
    loaded = load_conversations([path, "builtin"])
    report = loaded.reports[0]
    assert (report.num_rows, report.num_conversations, report.dropped["empty"]) == (21, 20, 1)
    assert (report.size_bytes, report.sha256) == (Path(path).stat().st_size, file_sha256(Path(path)))

    def drawn(limit: int, seed: int = 0) -> list[str]:
        return [c.id for c in load_conversations([path], limit, seed).conversations]

    assert drawn(20) == [str(i) for i in range(20)]
    assert len(drawn(8)) == 8
    assert drawn(8) != [str(i) for i in range(8)]
    assert drawn(8) == sorted(drawn(8), key=int)
    assert set(drawn(4)) < set(drawn(8))
    assert drawn(8) != drawn(8, seed=1)


def test_builtin_splits() -> None:
    train = load_conversations(["builtin"]).conversations
    heldout = load_conversations(["builtin#heldout"]).conversations
    assert len(train) >= 400
    assert len(heldout) >= 80
    assert len({c.category for c in train}) == 8
    assert builtin_path("heldout").is_file()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sources": []}, r"data\.sources"),
        ({"sources": ["builtin#heldout"]}, "must not train"),
        ({"sources": ["builtin#dev"]}, "must not train"),
        ({"max_new_tokens": 0}, r"data\.max_new_tokens: .* got 0"),
        ({"generate_batch_size": 0}, r"data\.generate_batch_size"),
        ({"batch_size": 0}, r"data\.batch_size"),
        ({"limit": 0}, r"data\.limit: .* got 0"),
        ({"weights": [1.0, 2.0]}, r"data\.weights: one for each of the 1 sources"),
        ({"weights": [0.0]}, r"data\.weights: must be positive"),
        ({"held_out": [""]}, r"data\.held_out: must name"),
        ({"held_out": ["a.jsonl"], "overlap_words": 0}, r"data\.held_out: has no effect"),
        ({"overlap_words": 3}, r"data\.overlap_words: .* got 3"),
        ({"near_duplicates": 1.5}, r"data\.near_duplicates: .* got 1\.5"),
        ({"max_characters": 0}, r"data\.max_characters: .* got 0"),
        ({"num_workers": 0}, r"data\.num_workers: .* got 0"),
        ({"max_length": 3}, r"data\.max_length: .* got 3"),
        ({"temperature": -0.1}, r"data\.temperature: .* got -0\.1"),
        ({"temperature": float("nan")}, r"data\.temperature: .* got nan"),
        ({"loss_on": "user"}, r"data\.loss_on: .* got 'user'"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataConfig(**settings)
