"""`specdraft eval` and `specdraft export` from the command line, on a tiny target in a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdraft.cli.main import main
from specdraft.heads.storage import load_head, save_head
from specdraft.targets._config import TargetConfig
from specdraft.targets.hf import load_target
from tests.support import make_head
from tests.tiny import tiny_models, tiny_tokenizer


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a target, another target, a head of the first and a file of prompts; also the present folder."""
    monkeypatch.chdir(tmp_path)
    for name, seed in (("target", 0), ("other", 1)):
        tiny_models["llama"](seed=seed).save_pretrained(name)
        tiny_tokenizer().save_pretrained(name)
    target = load_target(TargetConfig(name="target"))
    save_head(make_head("medusa", target.spec, num_draft_tokens=2), "outputs/x/best")
    rows = [{"question_id": i, "category": "abc"[i % 3], "turns": [f"Say {i}.", "Again."]} for i in range(6)]
    Path("questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


EVAL = [
    "eval",
    "head=outputs/x/best",
    "prompts=questions.jsonl",
    "decode.max_new_tokens=6",
    "eval.bootstrap_samples=100",
]


def test_eval_then_export(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The target recorded in the head is found, the results lie beside it, and the export carries them."""
    assert main([*EVAL, "eval.limit=3", "eval.turns=all"]) == 0
    results = json.loads(Path("outputs/x/best/results.json").read_text())
    figures = results["sets"]["questions"]
    assert [figures["num_prompts"], figures["num_turns"], figures["identical_outputs"]] == [3, 6, 3]
    assert set(figures["by_category"]) == {"a", "b", "c"}
    assert "3/3" in capsys.readouterr().out
    assert main(["export", "head=outputs/x/best", "export.license=mit", "dry_run=true"]) == 0
    assert not Path("outputs/x/export-hf").exists()
    assert "would write" in capsys.readouterr().out
    assert main(["export", "head=outputs/x/best", "export.license=mit"]) == 0
    assert json.loads(Path("outputs/x/export-hf/results.json").read_text()) == results
    assert load_head("outputs/x/export-hf").spec.name == "target"


def test_eval_writes_where_it_is_told(workplace: Path) -> None:
    assert main([*EVAL, "eval.limit=1", "output=deep/r.json"]) == 0
    assert json.loads(Path("deep/r.json").read_text())["schema"] == 1
    assert not Path("outputs/x/best/results.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["target.name=other"], "the weights differ"),
        (["prompts=none.jsonl"], "eval.prompts: no such file"),
        (["decode.num_draft_tokens=5"], "deeper than the head drafts (2)"),
        (["output=outputs"], "output: is a folder"),
        (["head=outputs/x"], "no config.json there"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word for word in EVAL if word.partition("=")[0] not in {new.partition("=")[0] for new in words}]
    before = sorted(Path().rglob("*"))
    assert main([*given, *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.strip().splitlines()) == 1
    assert sorted(Path().rglob("*")) == before
