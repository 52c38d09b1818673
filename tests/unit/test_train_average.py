"""The average of the weights: its formula, that it is what is measured and saved, and that a resume is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specdraft.core.errors import CheckpointError
from specdraft.heads.base import DraftHead
from specdraft.heads.storage import load_head
from specdraft.train.average import WeightAverage
from specdraft.train.checkpoint import AVERAGE_NAME, HEAD_NAME, list_checkpoints, read_checkpoint
from specdraft.train.loop import train
from specdraft.train.state import EvalPoint
from tests.training import make_head, make_rows, make_run, weights

DECAY = 0.3


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def test_formula_and_swap() -> None:
    head = make_head()
    first = weights(head)
    average = WeightAverage(head, DECAY)
    expected = first
    for step in (1, 2, 3):
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.add_(step)
        average.update(head, step)
        decay = min(DECAY, (1 + step) / (10 + step))
        assert (decay == DECAY) == (step == 3)
        expected = {name: decay * expected[name] + (1 - decay) * value for name, value in weights(head).items()}
    own = weights(head)
    with average.inside(head):
        for name, value in weights(head).items():
            torch.testing.assert_close(value, expected[name])
    assert same(weights(head), own)


def averages(folder: Path, **settings: Any) -> tuple[list[dict[str, torch.Tensor]], DraftHead]:
    """What every evaluation of a run saw, and the head it ends with."""
    seen: list[dict[str, torch.Tensor]] = []

    def evaluate(head: DraftHead) -> EvalPoint:
        seen.append(weights(head))
        return EvalPoint(1.0 + len(seen), [0.5], 1, 1)

    trainer = {"ema_decay": DECAY, "save_every": 1, "eval_every": 1, "keep_checkpoints": 9, "max_steps": 4}
    run = make_run(
        folder, kind="eagle3", rows=make_rows(8), batch_size=2, evaluate=evaluate, trainer=trainer, **settings
    )
    train(run)
    return seen, run.head


def test_the_average_is_measured_and_saved(tmp_path: Path) -> None:
    """Recomputed from the weights in the checkpoints, which are those of a run without an average."""
    seen, head = averages(tmp_path / "with")
    plain = make_run(
        tmp_path / "without",
        kind="eagle3",
        rows=make_rows(8),
        batch_size=2,
        trainer={"save_every": 1, "keep_checkpoints": 9, "max_steps": 4},
    )
    expected = weights(plain.head)
    train(plain)
    for step, found in enumerate(seen, start=1):
        name = f"checkpoints/step-{step:06d}"
        saved, other = (read_checkpoint(tmp_path / run / name) for run in ("with", "without"))
        assert same(saved.head, other.head)
        assert other.average is None
        decay = min(DECAY, (1 + step) / (10 + step))
        for key, parameter in plain.head.named_parameters():
            expected[key] = decay * expected[key] + (1 - decay) * saved.head[key]
            assert not torch.equal(found[key], saved.head[key])
            torch.testing.assert_close(found[key], expected[key])
            assert saved.average is not None
            assert torch.equal(saved.average[key], found[key])
            assert parameter.shape == found[key].shape
    for folder in ("best", "last"):
        assert same(dict(load_head(tmp_path / "with" / folder).state_dict()), seen[-1])
    assert same(weights(head), seen[-1])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resume_is_exact(tmp_path: Path, optimizer: str) -> None:
    optim = {"optimizer": optimizer, "schedule": "wsd", "weight_decay": 0.01}
    seen, _ = averages(tmp_path, optim=optim)
    for path in list_checkpoints(tmp_path / "checkpoints")[:2]:
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    resumed, _ = averages(tmp_path, resume="must", optim=optim)
    assert len(resumed) == 2
    assert all(same(a, b) for a, b in zip(resumed, seen[2:], strict=True))


def test_another_decay_is_refused(tmp_path: Path) -> None:
    averages(tmp_path)
    newest = list_checkpoints(tmp_path / "checkpoints")[0]
    assert {AVERAGE_NAME, HEAD_NAME} < {path.name for path in newest.iterdir()}
    run = make_run(tmp_path, kind="eagle3", rows=make_rows(8), batch_size=2, resume="must")
    with pytest.raises(CheckpointError, match=r"^resume: ema_decay differs from the checkpoint's 0.3, got None; "):
        train(run)
