"""The optimizer's groups, the shape of the schedules, and the rules of the settings."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from specdraft.core.errors import ConfigError
from specdraft.heads.base import DraftHead, head_kinds
from specdraft.train._config import OptimConfig, TrackerConfig, TrainerConfig
from specdraft.train.optim import (
    JointOptimizer,
    ParameterGroups,
    build_optimizer,
    check_optimizer,
    lr_factor,
    set_lr,
)
from tests.training import make_head


def curve(total: int = 10, **settings: Any) -> list[float]:
    factor = lr_factor(OptimConfig(**settings), total)
    return [factor(step) for step in range(total + 1)]


@pytest.mark.parametrize("kind", list(head_kinds()))
def test_norms_biases_and_embeddings_are_not_decayed(kind: str) -> None:
    head = make_head(kind)
    optimizer = build_optimizer(head, OptimConfig(weight_decay=0.1, betas=[0.8, 0.9], eps=1e-6))
    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    tables = {id(m.weight) for m in head.modules() if isinstance(m, nn.Embedding)}
    assert all(p.dim() > 1 and id(p) not in tables for p in decayed["params"])
    assert all(id(p) in tables or max(p.shape) == p.numel() for p in plain["params"])
    assert len(decayed["params"]) + len(plain["params"]) == len(list(head.parameters()))
    assert (decayed["betas"], decayed["eps"], decayed["fused"]) == ((0.8, 0.9), 1e-6, True)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_frozen_parameters_are_left_out(optimizer: str) -> None:
    head = make_head("eagle3")
    before = sum(len(group["params"]) for group in build_optimizer(head, OptimConfig(optimizer=optimizer)).param_groups)
    head.get_parameter("fc.weight").requires_grad_(False)
    after = [
        p for group in build_optimizer(head, OptimConfig(optimizer=optimizer)).param_groups for p in group["params"]
    ]
    assert len(after) == before - 1
    assert all(p is not head.get_parameter("fc.weight") for p in after)


def stepped(head: DraftHead, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One update by a random gradient."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest() -> None:
    """Each part moves its parameters as it would alone, at one rate."""
    head = make_head("eagle3")
    groups = ParameterGroups(head)
    assert any(p is head.get_parameter("lm_head.weight") for p in groups.tokens)
    assert {p.dim() for p in groups.matrices} == {2}
    alone = copy.deepcopy(head)
    config = OptimConfig(optimizer="muon", momentum=0.9, weight_decay=0.1, lr=0.02)
    optimizer = build_optimizer(head, config)
    apart = ParameterGroups(alone)
    muon = torch.optim.Muon(apart.matrices, lr=0.01, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [{"params": apart.tokens, "weight_decay": 0.1}, {"params": apart.plain, "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.9, 0.95),
    )
    set_lr(optimizer, OptimConfig(lr=0.01, schedule="constant", warmup_ratio=0.0), 5, 0)
    for seed in range(3):
        stepped(head, optimizer, seed)
        stepped(alone, muon, seed)
        adamw.step()
    for (name, value), other in zip(head.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(value, other, msg=name)


def test_state_of_several_optimizers_can_be_loaded() -> None:
    """What torch and Accelerate do with a state dict: the parts go on with the loaded state and rates."""
    heads = [make_head("eagle3") for _ in range(2)]
    first, second = (build_optimizer(head, OptimConfig(optimizer="muon")) for head in heads)
    assert isinstance(first, JointOptimizer)
    stepped(heads[0], first, 0)
    heads[1].load_state_dict(heads[0].state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for head, optimizer in zip(heads, (first, second), strict=True):
        optimizer.param_groups[0]["lr"] = 0.5
        stepped(head, optimizer, 1)
    assert all(torch.equal(a, b) for a, b in zip(heads[0].parameters(), heads[1].parameters(), strict=True))
    assert len(second.state) == len(list(heads[1].parameters()))
    with pytest.raises(ValueError, match="takes no closure"):
        first.step(lambda: 0.0)


def test_medusa_under_muon_has_only_matrices_and_biases() -> None:
    optimizer = build_optimizer(make_head("medusa"), OptimConfig(optimizer="muon"))
    assert [type(part).__name__ for part in optimizer.parts] == ["Muon", "AdamW"]


def test_an_older_torch_has_no_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    check_optimizer(OptimConfig(optimizer="muon"))
    monkeypatch.delattr(torch.optim, "Muon")
    check_optimizer(OptimConfig())
    with pytest.raises(
        ConfigError, match=r"^optim.optimizer: needs torch 2.9 or newer, got muon with torch .*; use adamw"
    ):
        check_optimizer(OptimConfig(optimizer="muon"))


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
    wsd = curve(schedule="wsd", warmup_ratio=0.2, decay_ratio=0.4, min_lr_ratio=0.2)
    assert wsd == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


def test_rate_is_set_on_every_group() -> None:
    optimizer = build_optimizer(make_head(), OptimConfig(lr=0.5, warmup_ratio=0.5))
    assert set_lr(optimizer, OptimConfig(lr=0.5, warmup_ratio=0.5), 6, 0) == 0.125
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]
    assert isinstance(optimizer, torch.optim.AdamW)


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (OptimConfig, {"optimizer": "sgd"}, "optim.optimizer: unknown, got 'sgd'"),
        (OptimConfig, {"optimizer": "muon", "momentum": 1.0}, r"optim.momentum: must lie in \[0, 1\), got 1.0"),
        (OptimConfig, {"momentum": 0.9}, "optim.momentum: has no effect without optim.optimizer=muon, got 0.9"),
        (OptimConfig, {"decay_ratio": 0.5}, "optim.decay_ratio: has no effect without optim.schedule=wsd, got 0.5"),
        (OptimConfig, {"schedule": "wsd", "decay_ratio": 0.98}, "optim.decay_ratio: leaves no room for optim.warmup"),
        (TrainerConfig, {"ema_decay": 1.0}, "trainer.ema_decay: must lie between 0 and 1 or be null, got 1.0"),
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
        (TrainerConfig, {"early_stop": 0}, "trainer.early_stop: must be at least 1 or null, got 0"),
        (TrainerConfig, {"early_stop": 1, "eval_prompts": 0}, "trainer.early_stop: has no effect without trainer.eval"),
        (TrainerConfig, {"prefetch": -1}, "trainer.prefetch: must not be negative, got -1"),
        (TrainerConfig, {"mixed_precision": "fp8"}, "trainer.mixed_precision: unknown, got 'fp8'"),
        (TrackerConfig, {"kind": "mlflow"}, "tracker.kind: unknown, got 'mlflow'"),
        (TrackerConfig, {"project": ""}, "tracker.project: must not be empty"),
    ],
)
def test_bad_settings(config: type, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}.*; use "):
        config(**settings)
