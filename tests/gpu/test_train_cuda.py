"""Training on one CUDA device: every precision learns, times its phases by events, and resumes exactly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdraft.targets.hf import HFTarget
from specdraft.train.inputs import TrainInputs, make_accelerator
from specdraft.train.loop import train
from tests.tiny import tiny_models
from tests.training import make_run, reset_accelerator, weights


def cuda_run(folder: Path, precision: str, steps: int, resume: str = "never") -> TrainInputs:
    run = make_run(
        folder,
        kind="eagle",
        batch_size=4,
        resume=resume,
        trainer={"mixed_precision": "no", "epochs": 20, "max_steps": steps},
        optim={"schedule": "constant", "lr": 3e-3},
    )
    reset_accelerator()
    trainer = replace(run.trainer, mixed_precision=precision)
    target = HFTarget.from_model(tiny_models["llama"]().to("cuda"), name="tiny-llama")
    return replace(run, trainer=trainer, accelerator=make_accelerator(trainer, "auto"), target=target)


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_learns_and_resumes(tmp_path: Path, precision: str) -> None:
    straight = cuda_run(tmp_path / "straight", precision, 12)
    state = train(straight).state
    lines = [json.loads(line) for line in (tmp_path / "straight/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert all(line[f"time/{phase}"] > 0 for line in lines for phase in ("target", "draft", "optimizer"))
    assert {value.dtype for value in straight.head.parameters()} == {torch.float32}
    assert state.skipped <= (4 if precision == "fp16" else 0)
    train(cuda_run(tmp_path / "cut", precision, 6))
    resumed = cuda_run(tmp_path / "cut", precision, 12, resume="must")
    assert train(resumed).state.skipped == state.skipped
    for name, value in weights(resumed.head).items():
        torch.testing.assert_close(value, weights(straight.head)[name], atol=1e-4, rtol=1e-3)
