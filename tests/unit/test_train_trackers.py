"""Trackers: what they write, that a resumed run does not repeat lines, and wandb without a network."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from specdraft.core.errors import ConfigError
from specdraft.train._config import TrackerConfig
from specdraft.train.loop import train
from specdraft.train.trackers import JsonlTracker, NoTracker, WandbTracker, build_tracker
from tests.training import make_run


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_kinds(tmp_path: Path) -> None:
    kinds = {kind: type(build_tracker(TrackerConfig(kind=kind), tmp_path)) for kind in ("none", "jsonl", "wandb")}
    assert kinds == {"none": NoTracker, "jsonl": JsonlTracker, "wandb": WandbTracker}
    assert isinstance(build_tracker(TrackerConfig(kind="wandb"), tmp_path, is_main_process=False), NoTracker)


def test_none_writes_nothing(tmp_path: Path) -> None:
    train(make_run(tmp_path, tracker="none", trainer={"max_steps": 1}))
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "last", "best"}


def test_jsonl_drops_what_a_resumed_run_does_again(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.start(0, {})
    for step in (1, 2, 3):
        tracker.log(step, {"loss": float(step)})
    with tracker.path.open("a") as file:
        file.write('{"step": 4, "lo')
    tracker = JsonlTracker(tmp_path)
    tracker.start(2, {})
    tracker.log(3, {"loss": math.nan})
    tracker.close()
    assert lines(tmp_path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": None}]
    JsonlTracker(tmp_path).start(0, {})
    assert lines(tmp_path) == []


def test_full_disk_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=r"^output_dir: the metrics cannot be written, got .*No space left"):
        train(make_run(tmp_path, trainer={"max_steps": 1}))


@pytest.mark.slow
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is written below the run's folder, with settings and metrics, and continued under one id."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    folder = tmp_path / "run"
    train(make_run(folder, tracker="wandb", trainer={"max_steps": 2}))
    first = (folder / "wandb_run_id").read_text()
    train(make_run(folder, tracker="wandb", trainer={"max_steps": 3}, resume="must"))
    assert (folder / "wandb_run_id").read_text() == first
    runs = sorted((folder / "wandb").glob("offline-run-*"))
    assert len(runs) == 2
    # Two starts within a second share a folder name, so wandb may add to it.
    assert all(f"-{first.strip()}" in path.name for path in runs)
    record = b"".join((next(path.glob("*.wandb"))).read_bytes() for path in runs)
    for text in (b"expected_acceptance_length", b"grad_norm", b"specdraft", b"test"):
        assert text in record


def test_wandb_without_a_login_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def refuse(**_: Any) -> None:
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ConfigError, match=r"^tracker.kind: wandb could not start, got No API key configured.; run "):
        train(make_run(tmp_path, tracker="wandb", trainer={"max_steps": 1}))
