"""Trackers: what they write, that a resumed run does not repeat lines, and wandb without a network."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from specdraft.core.errors import ConfigError
from specdraft.train._config import TRACKERS, TrackerConfig
from specdraft.train.loop import train
from specdraft.train.trackers import (
    JsonlTracker,
    NoTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandbTracker,
    build_tracker,
    check_tracker,
)
from tests.training import make_run


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_kinds(tmp_path: Path) -> None:
    kinds = {kind: type(build_tracker(TrackerConfig(kind=kind), tmp_path)) for kind in TRACKERS}
    assert kinds == {
        "none": NoTracker,
        "jsonl": JsonlTracker,
        "wandb": WandbTracker,
        "tensorboard": TensorBoardTracker,
        "trackio": TrackioTracker,
    }
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


class Recorder:
    """Stands for a package that is not installed: notes the calls of its documented interface."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Recorder:
            self.calls.append((name, args, kwargs))
            return self

        return call

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


def test_trackio_gets_settings_metrics_and_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trackio = Recorder()
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    train(make_run(tmp_path / "run", tracker="trackio", trainer={"max_steps": 2}))
    train(make_run(tmp_path / "run", tracker="trackio", trainer={"max_steps": 3}, resume="must"))
    common = {"project": "specdraft", "name": "run", "config": {"test": True}}
    assert trackio.of("init") == [((), {**common, "resume": "never"}), ((), {**common, "resume": "allow"})]
    logged = trackio.of("log")
    assert [kwargs["step"] for _, kwargs in logged] == [1, 2, 3]
    assert all(args[0]["loss"] > 0 for args, _ in logged)
    assert len(trackio.of("finish")) == 2


def test_tensorboard_gets_scalars_and_drops_what_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Recorder()
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = writer.SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    train(make_run(tmp_path, tracker="tensorboard", trainer={"max_steps": 2}))
    train(make_run(tmp_path, tracker="tensorboard", trainer={"max_steps": 3}, resume="must"))
    folder = str(tmp_path / "tensorboard")
    assert writer.of("SummaryWriter") == [((folder,), {"purge_step": None}), ((folder,), {"purge_step": 3})]
    assert [args[2] for args, _ in writer.of("add_scalar") if args[0] == "loss"] == [1, 2, 3]
    assert '"test": true' in writer.of("add_text")[0][0][1]
    assert len(writer.of("close")) == 2


@pytest.mark.parametrize("kind", ["wandb", "tensorboard", "trackio"])
def test_a_missing_package_is_one_line(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=rf"^tracker.kind: needs the package {kind}, got {kind}; pip install {kind}, or"
    ):
        check_tracker(TrackerConfig(kind=kind))
    check_tracker(TrackerConfig(kind="jsonl"))


def test_wandb_login_is_looked_for_first(monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    answers: list[Any] = [True, False, wandb.errors.UsageError("No API key configured.")]

    def login() -> bool:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    monkeypatch.setattr(wandb, "login", login)
    check_tracker(TrackerConfig(kind="wandb"))  # the tests run with WANDB_MODE=offline
    assert len(answers) == 3
    monkeypatch.setenv("WANDB_MODE", "online")
    check_tracker(TrackerConfig(kind="wandb"))
    for reason in ("no login", "No API key configured."):
        with pytest.raises(ConfigError, match=f"^tracker.kind: wandb could not start, got {reason}; run `wandb login`"):
            check_tracker(TrackerConfig(kind="wandb"))
    assert not answers
