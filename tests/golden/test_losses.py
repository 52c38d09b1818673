"""Twenty fp32 steps of every kind of head on a tiny target, against stored losses: a change of numbers must be meant.

After such a change: ``python -m tests.golden.test_losses --regenerate``, and say why in the changelog.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from specdraft.heads.base import head_kinds
from specdraft.train.loop import train
from tests.training import make_head, make_rows, make_run

FOLDER = Path(__file__).parent
NUM_STEPS = 20
RELATIVE = 1e-4
LOSS = {"terms": {"soft_ce": 1.0, "hard_ce": 0.5, "smooth_l1": 0.1}}


def losses(kind: str, folder: Path) -> list[float]:
    """The loss of every step."""
    torch.set_num_threads(1)
    noise = {"eagle": {"input_noise": 0.1}, "peagle": {"keep_ratio": 0.7}}.get(kind, {})
    run = make_run(
        folder,
        head=make_head(kind, **noise),
        rows=make_rows(16),
        batch_size=4,
        loss=LOSS,
        optim={"lr": 3e-3, "weight_decay": 0.01},
        trainer={"epochs": 10, "max_steps": NUM_STEPS, "accumulation_steps": 2},
    )
    train(run)
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", list(head_kinds()))
def test_losses(kind: str, tmp_path: Path) -> None:
    stored = FOLDER / f"{kind}.json"
    assert stored.exists(), f"no stored losses of {kind}: run python -m tests.golden.test_losses --regenerate"
    expected = json.loads(stored.read_text())
    assert len(expected) == NUM_STEPS
    assert len(set(expected)) == NUM_STEPS
    assert min(expected[-4:]) < 0.97 * max(expected[:4])
    assert losses(kind, tmp_path) == pytest.approx(expected, rel=RELATIVE)


def test_every_file_is_of_a_kind() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(head_kinds())


def regenerate() -> None:
    """Stores the losses of every kind anew."""
    for kind in head_kinds():
        with tempfile.TemporaryDirectory() as folder:
            values = losses(kind, Path(folder))
        (FOLDER / f"{kind}.json").write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--regenerate"]:
        sys.exit("usage: python -m tests.golden.test_losses --regenerate")
    regenerate()
