"""`specdraft tune` from the command line, and what eval and generate make of its decode.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdraft.cli.main import main
from specdraft.core.tree import DraftTree
from specdraft.eval.shapes import SHAPE_KEYS, shape_json
from specdraft.heads.storage import save_head
from specdraft.targets._config import TargetConfig
from specdraft.targets.hf import load_target
from tests.cli import make_workspace
from tests.support import make_head

Captured = pytest.CaptureFixture[str]
TREE = DraftTree.from_paths([[0], [1], [0, 0]])


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_workspace(tmp_path_factory.mktemp("tune"))
    target = load_target(TargetConfig(name=str(folder / "target"), device="cpu", pack_weights=False))
    save_head(make_head("medusa", target.spec, num_draft_tokens=2), folder / "head")
    return folder


@pytest.fixture
def head(workspace: Path) -> Path:
    (workspace / "head/decode.json").unlink(missing_ok=True)
    return workspace / "head"


def words(workspace: Path, *more: str) -> list[str]:
    small = ["tune.limit=2", "tune.max_new_tokens=12", "tune.rounds=1", "tune.max_nodes=5", "tune.num_ranks=3"]
    return ["tune", f"head={workspace / 'head'}", f"prompts=[{workspace / 'asked.jsonl'}]", *small, *CPU, *more]


CPU = ["target.device=cpu", "target.pack_weights=false"]


def test_tune_writes_a_shape_that_eval_and_generate_use(workspace: Path, head: Path, capsys: Captured) -> None:
    assert main(words(workspace)) == 0
    out = capsys.readouterr().out
    path = head / "decode.json"
    assert out.splitlines()[-1] == f"shape: {path}"
    assert "predicted: " in out and "measured: plain decoding" in out
    tuned = json.loads(path.read_text())
    assert tuned["schema"] == 2
    (own,) = tuned["batches"].values()
    assert set(own["shape"]) == {"plain", *SHAPE_KEYS}
    assert tuned["machine"]["dtype"] == "float32" and tuned["machine"]["threads"] >= 1
    assert all(run["identical_outputs"] == own["num_prompts"] == 2 for run in own["verified"])
    # This machine may find either; the file is what decides.
    for shape in (TREE, DraftTree.chain(1)):
        path.write_text(json.dumps({**tuned, "batches": {"1": {**own, "shape": shape_json(shape)}}}))
        assert decode_settings(workspace, capsys)["tree"] == shape_json(shape)["tree"]
        assert decode_settings(workspace, capsys)["num_draft_tokens"] == shape.max_depth
    assert decode_settings(workspace, capsys, "decode.num_draft_tokens=2")["num_draft_tokens"] == 2
    assert main(generate_words(head)) == 0
    assert "decode.json: a chain of 1, tuned for this machine" in capsys.readouterr().err
    assert main(words(workspace, "batch_size=2")) == 0
    assert list(json.loads(path.read_text())["batches"]) == ["1", "2"]


def test_plain_decoding_is_said_and_used(workspace: Path, head: Path, capsys: Captured) -> None:
    assert main(generate_words(head)) == 0
    drafted = capsys.readouterr()
    assert drafted.err.startswith("acceptance length")
    assert main(words(workspace)) == 0
    path = head / "decode.json"
    tuned = json.loads(path.read_text())
    tuned["batches"]["1"]["shape"] = shape_json(DraftTree((), ()))
    path.write_text(json.dumps(tuned))
    capsys.readouterr()
    assert main(generate_words(head)) == 0
    plain = capsys.readouterr()
    assert plain.out == drafted.out
    first, last = plain.err.splitlines()
    assert first.startswith("decode.json: plain decoding is the fastest here")
    assert last.startswith("plain decoding, ")
    assert decode_settings(workspace, capsys)["num_draft_tokens"] == 2
    path.write_text(json.dumps({**tuned, "machine": {**tuned["machine"], "threads": 99}}))
    assert main(generate_words(head)) == 0
    assert "decode.json: not used, it was tuned for threads 99, not " in capsys.readouterr().err


def test_a_torn_shape_is_one_line(head: Path, capsys: Captured) -> None:
    (head / "decode.json").write_text("{")
    assert main(generate_words(head)) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("specdraft: error: head: decode.json cannot be read")


def test_tune_writes_where_it_is_told_and_nothing_for_a_mistake(
    workspace: Path, head: Path, tmp_path: Path, capsys: Captured
) -> None:
    for more, message in (
        (["batch_size=0"], "tune.batch_size: must be at least 1, got 0; use more"),
        ([f"output={tmp_path}"], "output: is a folder"),
        (["prompts=none.jsonl"], "tune.prompts: no such file"),
    ):
        given = [word for word in words(workspace) if not word.startswith(more[0].partition("=")[0] + "=")]
        assert main([*given, *more]) == 2
        err = capsys.readouterr().err.strip().splitlines()
        assert len(err) == 1 and message in err[0]
    assert not (head / "decode.json").exists()
    assert main(words(workspace, f"output={tmp_path / 'deep/shape.json'}")) == 0
    assert (tmp_path / "deep/shape.json").is_file()
    assert not (head / "decode.json").exists()


def generate_words(head: Path) -> list[str]:
    return ["generate", f"head={head}", "prompt=Do you like boats?", "decode.max_new_tokens=12", *CPU]


def decode_settings(workspace: Path, capsys: Captured, *more: str) -> dict[str, Any]:
    """What results.json says of the shape."""
    result = workspace / "results.json"
    given = ["eval.limit=1", "decode.max_new_tokens=6", "eval.bootstrap_samples=100", f"output={result}"]
    prompts = f"prompts=[{workspace / 'asked.jsonl'}]"
    assert main(["eval", f"head={workspace / 'head'}", prompts, *given, *CPU, *more]) == 0
    assert ("decode.json: " in capsys.readouterr().out) == (not more)
    settings: dict[str, Any] = json.loads(result.read_text())["decode"]
    return settings
