"""A real process killed at any moment: what it leaves is whole, and continuing gives the uninterrupted run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdraft.heads.storage import load_head
from specdraft.train.checkpoint import list_checkpoints, read_checkpoint
from tests.training import weights

ROOT = Path(__file__).parents[2]
SETTINGS = {"batch_size": 2, "trainer": {"epochs": 3, "save_every": 1, "keep_checkpoints": 3}}


def start(folder: Path, **settings: Any) -> subprocess.Popen[str]:
    text = json.dumps({**SETTINGS, **settings})
    return subprocess.Popen(
        [sys.executable, "-m", "tests.integration.train_job", str(folder), "eagle3", text],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def wait_for_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + 60
    while not any(int(path.name[5:]) >= step for path in list_checkpoints(folder / "checkpoints")):
        assert time.monotonic() < deadline, f"no step {step} within a minute"
        time.sleep(0.01)


def finish(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    return out


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without an interruption: 18 steps."""
    folder = tmp_path_factory.mktemp("straight")
    assert '"step": 18' in finish(start(folder))
    return folder


def assert_same_end(folder: Path, straight: Path) -> None:
    ends = [read_checkpoint(path / "checkpoints/step-000018") for path in (folder, straight)]
    assert all(torch.equal(value, ends[1].head[name]) for name, value in ends[0].head.items())
    assert all(torch.equal(value, ends[1].optimizer[name]) for name, value in ends[0].optimizer.items())
    assert ends[0].rng == ends[1].rng
    # How long the parts of a run took is their own.
    assert replace(ends[0].state, seconds=0.0) == replace(ends[1].state, seconds=0.0)
    heads = [weights(load_head(path / "last")) for path in (folder, straight)]
    assert all(torch.equal(value, heads[1][name]) for name, value in heads[0].items())
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 19))


def test_kill_and_resume(tmp_path: Path, straight: Path) -> None:
    """SIGKILL three times, each at a moment of its own; every time the newest checkpoint can be read."""
    moments = random.Random(5)
    for step in (2, 6, 11):
        process = start(tmp_path, delay_s=0.02, resume="auto")
        wait_for_step(tmp_path, step)
        time.sleep(moments.random() * 0.1)
        process.kill()
        process.communicate()
        newest = list_checkpoints(tmp_path / "checkpoints")[0]
        assert read_checkpoint(newest).state.step >= step
        load_head(tmp_path / "last")
    finish(start(tmp_path, resume="must"))
    assert_same_end(tmp_path, straight)


def test_terminate_and_resume(tmp_path: Path, straight: Path) -> None:
    """SIGTERM saves what was done since the last checkpoint and exits with 0."""
    settings = {"trainer": {**SETTINGS["trainer"], "save_every": 100}}  # type: ignore[dict-item]
    process = start(tmp_path, delay_s=0.2, **settings)
    deadline = time.monotonic() + 60
    while not (tmp_path / "metrics.jsonl").exists() or not (tmp_path / "metrics.jsonl").read_text().count("\n"):
        assert time.monotonic() < deadline, "no step within a minute"
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out = finish(process)
    assert '"stopped": true' in out
    assert "continue with resume=auto" in out
    assert len(list_checkpoints(tmp_path / "checkpoints")) == 1
    finish(start(tmp_path, resume="must"))
    assert_same_end(tmp_path, straight)
