"""Prepared data sets: made once, found again, never mixed, written whole, and counted."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from specdraft.core.errors import ConfigError, DataError
from specdraft.data import prepare as module
from specdraft.data._config import DataConfig
from specdraft.data.assemble import length_histogram
from specdraft.data.batching import BatchPlan, collate
from specdraft.data.chat import ChatRenderer
from specdraft.data.prepare import prepare
from specdraft.data.prepared import PreparedData, load_prepared, save_prepared, token_counts
from specdraft.targets.hf import HFTarget
from tests.tiny import tiny_target, tiny_tokenizer
from tests.unit import data_helpers as h


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target("llama")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rows: list[dict[str, Any]] = [
        {"messages": h.talk("hi", "yo", "so", "no"), "category": "short"},
        {"messages": h.talk("hello", "a longer answer, with words"), "category": "short"},
        {"prompt": "what is it?", "category": "open"},
        {"messages": []},
        {"prompt": "x" * 300},
    ]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(source: Path, **changes: Any) -> DataConfig:
    return DataConfig(
        **{"sources": [str(source)], "max_new_tokens": 8, "max_length": 200, "generate_batch_size": 2, **changes}
    )


def supervised(data: PreparedData) -> int:
    return sum(sum(row.loss_mask) for row in data)


def test_answers_of_the_data_set_need_the_tokenizer_only(source: Path, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    data = prepare(settings(source, regenerate=False), tokenizer, tmp_path / "data")
    assert len(data) == 2
    assert [h.runs(data.row(i), tokenizer) for i in range(2)] == [
        ["yo<|im_end|>", "no<|im_end|>"],
        ["a longer answer, with words<|im_end|>"],
    ]
    manifest = data.manifest
    assert manifest["responses"] == "dataset"
    assert manifest["dropped"] == {
        "empty": 1,
        "no answer (set data.regenerate=true)": 1,
        "prompt longer than data.max_length": 1,
    }
    assert manifest["mask_sources"] == {"prefix": 3}
    assert manifest["num_supervised_tokens"] == supervised(data) == 3 + 3 + 28
    assert manifest["num_tokens"] == sum(data.lengths)
    assert manifest["supervised_share"] == pytest.approx(34 / sum(data.lengths))
    assert manifest["length_histogram"] == length_histogram(data.lengths)
    assert manifest["sources"][0]["num_rows"] == 5
    assert len(manifest["sources"][0]["sha256"]) == 64
    assert manifest["categories"] == {"": 1, "open": 1, "short": 2}


def test_regenerated_rows_are_the_ids_the_target_wrote(source: Path, target: HFTarget, tmp_path: Path) -> None:
    data = prepare(settings(source), target, tmp_path / "data")
    assert data.manifest["responses"] == "target"
    assert data.manifest["identity"]["answers"]["target"] == target.spec.fingerprint
    assert data.manifest["mask_sources"] == {"written by the target": 4}
    (journal,) = (tmp_path / "data").glob("answers-*/rank-00000.jsonl")
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    rows = [row.input_ids for row in data.rows(range(len(data)))]
    for _, _, prompt, answer, *_ in lines:
        assert any(row[: len(prompt) + len(answer)] == [*prompt, *answer] for row in rows)
    assert supervised(data) == sum(len(answer) for _, _, _, answer, *_ in lines)


def test_a_second_run_finds_what_the_first_made(
    source: Path, target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(settings(source), target, tmp_path / "data")
    monkeypatch.setattr(module, "regenerate", None)  # calling it would fail
    again = prepare(settings(source, batch_size=2, bucket=False), target, tmp_path / "data")
    assert again.folder == first.folder
    assert list(again) == list(first)
    assert again.manifest == first.manifest


def test_other_settings_use_another_folder_but_the_same_answers(
    source: Path, target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    whole = prepare(settings(source), target, folder)
    monkeypatch.setattr(target.model, "generate", None, raising=False)  # no answer is written again
    cut = prepare(settings(source, max_length=50), target, folder)
    last = prepare(settings(source, loss_on="last"), target, folder)
    assert len({whole.folder, cut.folder, last.folder}) == 3
    assert max(cut.lengths) == 50 < max(whole.lengths)
    assert supervised(last) < supervised(whole)
    assert len(list(folder.glob("answers-*"))) == 1
    monkeypatch.undo()
    prepare(settings(source, max_new_tokens=4), target, folder)
    assert len(list(folder.glob("answers-*"))) == 2


@pytest.mark.parametrize("change", ["template", "tokenizer", "rows", "system"])
def test_what_decides_the_rows_decides_the_folder(change: str, source: Path, tmp_path: Path) -> None:
    config = settings(source, regenerate=False)
    tokenizer = h.chat_tokenizer(h.CHATML)
    first = prepare(config, tokenizer, tmp_path / "data")
    if change == "template":
        tokenizer.chat_template = h.LLAMA3
    elif change == "tokenizer":
        tokenizer = h.metaspace_tokenizer(h.CHATML)
    elif change == "rows":
        source.write_text(source.read_text().replace("yo", "yes"))
    else:
        config.system = "Be kind"
    other = prepare(config, tokenizer, tmp_path / "data")
    assert other.folder != first.folder
    assert load_prepared(first.folder).manifest == first.manifest


def test_rows_of_another_template_are_not_used_by_accident(source: Path, tmp_path: Path) -> None:
    tokenizer = h.chat_tokenizer(h.THINKING)
    data = prepare(settings(source, regenerate=False, enable_thinking=True), tokenizer, tmp_path / "data")
    load_prepared(data.folder, ChatRenderer(tokenizer, enable_thinking=True))
    with pytest.raises(DataError, match=r"^data\.cache_dir: the rows were made with another template"):
        load_prepared(data.folder, ChatRenderer(tokenizer, enable_thinking=False))
    with pytest.raises(DataError, match="another tokenizer"):
        load_prepared(data.folder, ChatRenderer(h.metaspace_tokenizer(h.THINKING), enable_thinking=True))


def test_nothing_supervised_is_refused_with_the_reasons(source: Path, tmp_path: Path) -> None:
    source.write_text('{"prompt": "what is it?"}\n')
    with pytest.raises(DataError, match=r"nothing would be supervised, got 0 rows \(no answer .*: 1\)"):
        prepare(settings(source, regenerate=False), tiny_tokenizer(), tmp_path / "data")
    assert not list((tmp_path / "data").glob("*/manifest.json"))


def test_conversations_the_template_refuses_are_counted(source: Path, tmp_path: Path) -> None:
    with source.open("a") as file:
        file.write(json.dumps({"messages": h.talk("hi", "yo", system="Be kind")}) + "\n")
    tokenizer = h.chat_tokenizer(h.GEMMA, "</s>")
    data = prepare(settings(source, regenerate=False), tokenizer, tmp_path / "data")
    assert data.manifest["dropped"]["refused by the chat template"] == 1
    assert len(data) == 2


def test_a_row_cut_within_its_answer_keeps_its_mask(source: Path, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    whole = prepare(settings(source, regenerate=False), tokenizer, tmp_path / "data")
    prompt = whole.row(1).loss_mask.index(True)
    cut = prepare(settings(source, regenerate=False, max_length=prompt + 5), tokenizer, tmp_path / "data")
    assert h.runs(cut.row(len(cut) - 1), tokenizer) == ["a lon"]


def test_regeneration_needs_a_target_with_a_tokenizer(source: Path, target: HFTarget, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data\.regenerate: the target must be loaded"):
        prepare(settings(source), tiny_tokenizer(), tmp_path)
    bare = HFTarget(target.model, target.layout, target.spec)
    with pytest.raises(DataError, match="has no tokenizer"):
        prepare(settings(source), bare, tmp_path)


def test_data_prepared_meanwhile_by_another_run_stays(source: Path, tmp_path: Path) -> None:
    data = prepare(settings(source, regenerate=False), tiny_tokenizer(), tmp_path / "data")
    again = save_prepared(data.folder, data.rows([0]), {"identity": {}})
    assert again.manifest == data.manifest
    assert [path.name for path in (tmp_path / "data").iterdir()] == [data.folder.name]


def test_two_processes_prepare_one_data_set(
    source: Path, target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = prepare(settings(source), target, tmp_path / "one")
    monkeypatch.setattr(module, "POLL_S", 0.01)
    made: dict[int, Any] = {}
    other = tiny_target("llama")

    def work(rank: int, own: HFTarget) -> None:
        made[rank] = prepare(settings(source, generate_batch_size=1), own, tmp_path / "two", rank=rank, world_size=2)

    threads = [threading.Thread(target=work, args=args) for args in ((1, other), (0, target))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert made[0].folder == made[1].folder
    assert list(made[0]) == list(made[1]) == list(alone)
    assert len(list((tmp_path / "two").glob("answers-*/rank-*.jsonl"))) == 2


def test_waiting_in_vain_is_an_error(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.001)
    monkeypatch.setattr(module, "IDLE_LIMIT_S", 0.01)
    with pytest.raises(DataError, match="all processes must share the folder"):
        prepare(settings(source, regenerate=False), tiny_tokenizer(), tmp_path, rank=1, world_size=2)


def test_token_counts_are_of_supervised_tokens(source: Path, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    data = prepare(settings(source, regenerate=False), tokenizer, tmp_path / "data")
    counts = token_counts(data, 97)
    assert counts.shape == (97,)
    assert int(counts.sum()) == supervised(data)
    assert counts[tokenizer.eos_token_id] == 3
    assert counts[tokenizer.bos_token_id] == 0
    with pytest.raises(DataError, match="the target has 50"):
        token_counts(data, 50)


def test_length_histogram() -> None:
    assert length_histogram([1, 64, 65, 128, 129]) == {"<=64": 2, "<=128": 2, "<=256": 1}


def test_prepared_rows_become_batches(source: Path, tmp_path: Path) -> None:
    data = prepare(settings(source, regenerate=False), tiny_tokenizer(), tmp_path / "data")
    ((rows,),) = BatchPlan(lengths=data.lengths, batch_size=2).epoch(0)
    ids = [place for row in rows for place in row]
    batch = collate(data.rows(ids), 0, ids)
    assert batch.attention_mask.sum(1).tolist() == [data.lengths[i] for i in ids]
    assert batch.row_ids.tolist() == ids
