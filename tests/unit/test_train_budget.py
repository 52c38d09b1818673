"""Training that ends after so many tokens or minutes in the place of epochs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from specdraft.core.errors import ConfigError
from specdraft.data.batching import BatchPlan
from specdraft.train import progress
from specdraft.train._config import TrainerConfig
from specdraft.train.inputs import NO_LIMIT
from specdraft.train.loop import train
from specdraft.train.optim import lr_factor
from specdraft.train.state import EvalPoint, TrainState
from tests.training import make_run, weights


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Clock:
    """A clock that a call moves by one second, and a step of training so by a known number of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(progress.time, "perf_counter", self.read)

    def read(self) -> float:
        self.now += 1.0
        return self.now


def test_steps_for_a_number_of_tokens() -> None:
    plan = BatchPlan(lengths=[4, 6, 5, 5], batch_size=2, bucket=False)
    (first, _) = (sum(plan.lengths[i] for rows in step for (i,) in rows) for step in plan.epoch(0))
    assert plan.steps_for(1) == 1
    assert plan.steps_for(first) == 1
    assert plan.steps_for(first + 1) == 2
    assert plan.steps_for(20) == 2
    assert plan.steps_for(21) == 3
    assert plan.steps_for(200) == 20
    packed = BatchPlan(lengths=[4, 6, 5, 5], batch_size=1, capacity=10)
    assert [packed.steps_for(n) for n in (10, 20, 21)] == [1, 2, 3]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_budget_of_tokens_is_met_by_every_batch_size(batch_size: int, tmp_path: Path) -> None:
    run = make_run(tmp_path, batch_size=batch_size, trainer={"max_tokens": 350, "epochs": 1})
    one_epoch = sum(run.plan.lengths)
    assert one_epoch < 350 / 2
    state = train(run).state
    longest = max(run.plan.lengths) * batch_size
    assert 350 <= state.tokens < 350 + longest
    assert state.step == run.total_steps == logged(tmp_path)[-1]["step"]
    assert state.evaluated_step == -1 and (tmp_path / "best").is_dir()


def test_max_steps_is_a_limit_beside_tokens(tmp_path: Path) -> None:
    assert make_run(tmp_path, trainer={"max_tokens": 350, "max_steps": 3}).total_steps == 3


def test_minutes_end_training_and_the_rate_follows_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten readings of the clock a step are ten seconds; the last rates are those of the end of the schedule."""
    Clock(monkeypatch)
    points: list[int] = []

    def evaluate(head: Any) -> EvalPoint:
        points.append(1)
        time.perf_counter()
        return EvalPoint(2.0, [1.0], 1, 2)

    run = make_run(
        tmp_path,
        trainer={"max_minutes": 5.0, "epochs": 1, "eval_every": 1000},
        optim={"schedule": "linear"},
        evaluate=evaluate,
    )
    assert run.total_steps == NO_LIMIT and run.known_steps is None
    state = train(run).state
    assert 300.0 <= state.seconds < 330.0
    assert state.epoch >= 1, "time goes on over the end of the data"
    assert points == [1], "measured at the end"
    assert state.evaluated_step == state.step
    lines = logged(tmp_path)
    rates = [line["lr"] for line in lines if "lr" in line]
    assert max(rates) == pytest.approx(1e-2, rel=0.15)
    assert rates[-1] < 0.15 * max(rates)
    assert "loss" in lines[-2], "the last step is logged"


def test_minutes_count_what_a_run_before_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    first = train(make_run(tmp_path, trainer={"max_minutes": 2.0})).state
    kept = weights(make_run(tmp_path).head)
    again = make_run(tmp_path, trainer={"max_minutes": 2.0}, resume="auto")
    second = train(again).state
    assert (second.step, second.seconds) == (first.step, first.seconds)
    assert any((kept[name] != value).any() for name, value in weights(again.head).items())
    longer = train(make_run(tmp_path, trainer={"max_minutes": 4.0}, resume="auto")).state
    assert 240.0 <= longer.seconds < 270.0
    assert longer.step == pytest.approx(2 * first.step, rel=0.2)


def test_expected_steps_follow_the_pace(tmp_path: Path) -> None:
    run = make_run(tmp_path, trainer={"max_minutes": 1.0})
    assert run.expected_steps(TrainState()) == NO_LIMIT
    assert run.expected_steps(TrainState(step=10, seconds=20.0)) == 30
    assert run.expected_steps(TrainState(step=10, seconds=70.0)) == 11
    assert lr_factor(run.optim, NO_LIMIT)(0) > 0.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "trainer.max_tokens: must be at least 1 or null, got 0"),
        ({"max_minutes": 0.0}, r"trainer.max_minutes: must be positive or null, got 0.0"),
    ],
)
def test_bad_limits(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainerConfig(**settings)
