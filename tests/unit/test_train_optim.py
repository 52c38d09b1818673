"""The optimizer's groups, the shape of the schedules, and the rules of the settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from specdraft.core.errors import ConfigError
from specdraft.heads.base import head_kinds
from specdraft.train._config import OptimConfig, TrackerConfig, TrainerConfig
from specdraft.train.optim import build_optimizer, lr_factor, set_lr
from tests.training import make_head


def curve(total: int = 10, **settings: Any) -> list[float]:
    factor = lr_factor(OptimConfig(**settings), total)
    return [factor(step) for step in range(total + 1)]


@pytest.mark.parametrize("kind", list(head_kinds()))
def test_norms_and_biases_are_not_decayed(kind: str) -> None:
    head = make_head(kind)
    optimizer = build_optimizer(head, OptimConfig(weight_decay=0.1, betas=[0.8, 0.9], eps=1e-6))
    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in plain["params"]} <= {1}
    assert len(decayed["params"]) + len(plain["params"]) == len(list(head.parameters()))
    assert (decayed["betas"], decayed["eps"], decayed["fused"]) == ((0.8, 0.9), 1e-6, True)


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model[0].requires_grad_(False)
    (group,) = build_optimizer(model, OptimConfig()).param_groups
    assert group["params"] == [model[1].weight]


def test_warm_up_is_linear_and_never_zero() -> None:
    assert curve(warmup_ratio=0.4)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert curve(warmup_ratio=0.0)[0] == 1.0


def test_schedules() -> None:
    linear = curve(schedule="linear", warmup_ratio=0.0, min_lr_ratio=0.2)
    assert linear == pytest.approx([1 - 0.08 * step for step in range(11)])
    cosine = curve(schedule="cosine", warmup_ratio=0.0)
    assert cosine[5] == pytest.approx(0.5)
    assert cosine[10] == pytest.approx(0.0)
    assert cosine[2] > linear[2] - 0.2
    assert curve(schedule="constant", warmup_ratio=0.1)[1:] == [1.0] * 10


def test_rate_is_set_on_every_group() -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), OptimConfig(lr=0.5, warmup_ratio=0.5))
    assert set_lr(optimizer, OptimConfig(lr=0.5, warmup_ratio=0.5), 6, 0) == 0.125
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]
    assert isinstance(optimizer, torch.optim.AdamW)


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (OptimConfig, {"lr": 0.0}, "optim.lr: must be positive, got 0.0"),
        (OptimConfig, {"betas": [0.9]}, r"optim.betas: two numbers in \[0, 1\) are needed, got \[0.9\]"),
        (OptimConfig, {"betas": [0.9, 1.0]}, "optim.betas: two numbers"),
        (OptimConfig, {"weight_decay": -1.0}, "optim.weight_decay: must not be negative, got -1.0"),
        (OptimConfig, {"eps": 0.0}, "optim.eps: must be positive, got 0.0"),
        (OptimConfig, {"schedule": "step"}, "optim.schedule: unknown, got 'step'"),
        (OptimConfig, {"warmup_ratio": 1.5}, "optim.warmup_ratio: must lie in 0..1, got 1.5"),
        (OptimConfig, {"min_lr_ratio": -0.1}, "optim.min_lr_ratio: must lie in 0..1, got -0.1"),
        (OptimConfig, {"schedule": "constant", "min_lr_ratio": 0.1}, "optim.min_lr_ratio: has no effect"),
        (OptimConfig, {"max_grad_norm": 0.0}, "optim.max_grad_norm: must be positive or null, got 0.0"),
        (TrainerConfig, {"epochs": 0}, "trainer.epochs: must be at least 1, got 0"),
        (TrainerConfig, {"accumulation_steps": 0}, "trainer.accumulation_steps: must be at least 1"),
        (TrainerConfig, {"log_every": 0}, "trainer.log_every: must be at least 1"),
        (TrainerConfig, {"keep_checkpoints": 0}, "trainer.keep_checkpoints: must be at least 1"),
        (TrainerConfig, {"eval_max_new_tokens": 0}, "trainer.eval_max_new_tokens: must be at least 1"),
        (TrainerConfig, {"max_steps": 0}, "trainer.max_steps: must be at least 1 or null, got 0"),
        (TrainerConfig, {"eval_every": 0}, "trainer.eval_every: must be at least 1 or null"),
        (TrainerConfig, {"save_every": 0}, "trainer.save_every: must be at least 1 or null"),
        (TrainerConfig, {"eval_prompts": -1}, "trainer.eval_prompts: must not be negative, got -1"),
        (TrainerConfig, {"mixed_precision": "fp8"}, "trainer.mixed_precision: unknown, got 'fp8'"),
        (TrackerConfig, {"kind": "mlflow"}, "tracker.kind: unknown, got 'mlflow'"),
        (TrackerConfig, {"project": ""}, "tracker.project: must not be empty"),
    ],
)
def test_bad_settings(config: type, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}.*; use "):
        config(**settings)
