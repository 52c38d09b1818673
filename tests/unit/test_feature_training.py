"""Training from a store: the same weights as with the target in the loop, without a target forward, at the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdraft.cli.main import main
from specdraft.data.feature_capture import capture_rows
from specdraft.data.feature_store import FeatureStore, store_identity
from specdraft.data.feature_writer import FeatureWriter
from specdraft.data.features import StoredRows
from specdraft.heads.base import head_kinds
from specdraft.heads.storage import load_head
from specdraft.train.inputs import TrainInputs
from specdraft.train.loop import train
from tests.cli import experiment_words, make_workspace
from tests.training import count_captures, make_rows, make_run, reset_accelerator, target, weights


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every target forward over a training batch."""
    return count_captures(monkeypatch)


def stored(run: TrainInputs, folder: Path, hybrid: bool = False) -> TrainInputs:
    """The run with a store: filled in the batches of its first epoch, or filled while it trains."""
    rows = make_rows()
    identity = store_identity(target().spec, target().dtype, run.head.features(), "fp32", {"identity": "x"}, len(rows))
    writer = FeatureWriter(folder, identity)
    store = FeatureStore(folder, identity, target().dtype)
    if hybrid:
        return replace(run, store=StoredRows(store, writer))
    capture_rows(target(), run.rows, [batch for step in run.plan.epoch(0) for batch in step], writer, store, 0)
    writer.close()
    store.refresh()
    return replace(run, store=StoredRows(store))


@pytest.mark.parametrize("capacity", [None, 40])
@pytest.mark.parametrize("kind", head_kinds())
def test_offline_training_is_online_training(
    tmp_path: Path, kind: str, capacity: int | None, captures: list[int]
) -> None:
    """Bit by bit in the batches that were stored, padded or packed, though part of the states is left out."""
    settings: dict[str, Any] = {"kind": kind, "batch_size": 3, "capacity": capacity}
    online = make_run(tmp_path / "online", **settings)
    train(online)
    offline = stored(make_run(tmp_path / "offline", **settings, trainer={"prefetch": 2}), tmp_path / "store")
    captures.clear()
    train(offline)
    assert not captures
    for name, value in weights(online.head).items():
        assert torch.equal(value, weights(offline.head)[name]), name


def test_hybrid_training_captures_once(tmp_path: Path, captures: list[int]) -> None:
    """The first run stores what it captures, bit by bit as without a store; the second needs no target."""
    settings: dict[str, Any] = {"kind": "eagle3", "batch_size": 3}
    online = make_run(tmp_path / "online", **settings)
    train(online)
    first = stored(make_run(tmp_path / "first", **settings), tmp_path / "store", hybrid=True)
    train(first)
    captures.clear()
    second = stored(make_run(tmp_path / "second", **settings), tmp_path / "store", hybrid=True)
    train(second)
    assert not captures
    for name, value in weights(online.head).items():
        assert torch.equal(value, weights(first.head)[name]), name
        assert torch.equal(value, weights(second.head)[name]), name


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("features"))


def run_cli(workspace: Path, command: str, *words: str) -> int:
    reset_accelerator()
    name = [] if command == "prepare" else ["name=tiny"]
    return main([command, *name, *experiment_words(workspace), *words])


def test_prepare_writes_the_store_that_train_reads(
    workspace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    captures: list[int],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["features=offline", "features.precision=fp32"]
    assert run_cli(workspace, "prepare", *words) == 0
    assert "of 6 rows to capture" in capsys.readouterr().out
    (folder,) = Path("outputs/data").glob("features-*")
    assert run_cli(workspace, "prepare", *words) == 0
    assert "to capture" not in capsys.readouterr().out
    captures.clear()
    assert run_cli(workspace, "train", *words) == 0
    assert max(captures, default=1) == 1  # the check of the loaded target alone
    settings = json.loads(Path("outputs/tiny/best/config.json").read_text())
    assert "offline" in json.dumps(settings)
    assert run_cli(workspace, "train", "name=plain") == 0
    trained, plain = (load_head(f"outputs/{name}/best") for name in ("tiny", "plain"))
    for name, value in weights(plain).items():
        assert torch.equal(value, weights(trained)[name]), name
    capsys.readouterr()
    assert run_cli(workspace, "train", "name=other", "head=medusa", *words, f"features.dir={folder}") == 2
    assert "features.dir: the store is for another choice of layers" in capsys.readouterr().err


def test_train_writes_what_is_missing_and_refuses_what_cannot_fit(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["head=medusa", "features=offline"]
    assert run_cli(workspace, "train", *words, "features.budget_gib=1e-6") == 2
    assert "features.budget_gib: the store needs" in capsys.readouterr().err
    assert run_cli(workspace, "train", *words, "name=a") == 0
    assert "of 6 rows to capture" in capsys.readouterr().out
    assert run_cli(workspace, "train", "head=medusa", "name=b", "features=hybrid") == 0
    assert "6 of 6 rows stored" in capsys.readouterr().out
    assert run_cli(workspace, "train", "head=medusa", "adapter=lora", "name=c", "features=offline") == 2
    assert "features.mode: the features change with the adapter" in capsys.readouterr().err
