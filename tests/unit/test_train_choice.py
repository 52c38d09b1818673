"""When heads are measured in training, and which one is the best."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdraft.heads.base import DraftHead
from specdraft.heads.storage import load_head
from specdraft.train.checkpoint import list_checkpoints
from specdraft.train.loop import train
from specdraft.train.state import EvalPoint
from tests.training import make_head, make_rows, make_run, weights


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Scripted:
    """An ``evaluate`` that returns given lengths, draws random numbers and remembers what it saw."""

    def __init__(self, lengths: list[float]) -> None:
        self.lengths = iter(lengths)
        self.seen: list[dict[str, Tensor]] = []

    def __call__(self, head: DraftHead) -> EvalPoint:
        assert not head.training
        assert not torch.is_grad_enabled()
        torch.rand(3), np.random.rand(2), random.random()
        self.seen.append(weights(head))
        return EvalPoint(next(self.lengths), [0.5, 0.25], 10, 20)


def test_best_head_is_the_one_with_the_longest_acceptance(tmp_path: Path) -> None:
    script = Scripted([1.5, 2.5, 2.0, 2.5])
    run = make_run(tmp_path, trainer={"max_steps": 7, "eval_every": 2}, evaluate=script)
    state = train(run).state
    assert (state.best_value, state.best_step, state.evaluated_step) == (2.5, 4, 7)
    assert len(script.seen) == 4
    best, last = load_head(tmp_path / "best").state_dict(), load_head(tmp_path / "last").state_dict()
    assert all(torch.equal(best[name], value) for name, value in script.seen[1].items())
    assert all(torch.equal(last[name], value) for name, value in script.seen[3].items())
    config = json.loads((tmp_path / "best" / "config.json").read_text())
    assert config["training"]["step"] == 4
    assert config["training"]["acceptance_length"] == 2.5
    points = [line for line in metrics(tmp_path) if "eval/acceptance_length" in line]
    assert [(line["step"], line["eval/acceptance_length"]) for line in points] == [
        (2, 1.5),
        (4, 2.5),
        (6, 2.0),
        (7, 2.5),
    ]
    assert points[0]["eval/acceptance_rate/2"] == 0.25


def test_early_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two measurements without a new best end the run, and a resumed one does not go on."""
    script = Scripted([1.5, 2.0, 2.0, 1.9, 3.0])
    settings = {"eval_every": 2, "early_stop": 2, "log_every": 1}
    result = train(make_run(tmp_path, trainer=settings, evaluate=script))
    assert (result.state.step, result.state.best_step, result.state.stale, result.stopped) == (8, 4, 2, False)
    assert "stopped early after step 8: 2 measurements brought no new best" in capsys.readouterr().out
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-000008"]
    again = train(make_run(tmp_path, trainer=settings, evaluate=Scripted([]), resume="must"))
    assert again.state == result.state
    more = train(
        make_run(tmp_path, trainer={**settings, "early_stop": 3}, evaluate=Scripted([3.0, 1.0]), resume="must")
    )
    assert (more.state.step, more.state.best_step, more.state.stale) == (12, 10, 1)


def test_evaluation_is_due_at_the_end_of_every_epoch(tmp_path: Path) -> None:
    run = make_run(tmp_path, rows=make_rows(3), trainer={"epochs": 2}, evaluate=Scripted([2.0, 1.0]))
    assert train(run).state.best_step == 3


def test_evaluation_leaves_the_random_generators(tmp_path: Path) -> None:
    """Noise drawn after an evaluation is the noise of a run without one."""
    ends = []
    for name, evaluate in (("with", Scripted([1.0] * 3)), ("without", None)):
        head = make_head("eagle", input_noise=0.5)
        train(make_run(tmp_path / name, head=head, trainer={"max_steps": 3, "eval_every": 1}, evaluate=evaluate))
        ends.append(weights(head))
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
