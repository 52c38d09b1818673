"""The optimizer and its learning-rate schedule, counted in optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import AdamW

from specdraft.train._config import OptimConfig


def build_optimizer(head: nn.Module, config: OptimConfig) -> AdamW:
    """AdamW over the trainable parameters, fused where the device has it; norms and biases are not decayed.

    ``head`` must already be on its device.
    """
    parameters = [p for p in head.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    fused = all(p.device.type in ("cpu", "cuda") for p in parameters)
    return AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        fused=fused,
    )


def lr_factor(config: OptimConfig, total_steps: int) -> Callable[[int], float]:
    """Step (from 0) -> share of the peak rate: a linear rise, then the schedule down to the minimum."""
    warmup = round(config.warmup_ratio * total_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if config.schedule == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        shape = 0.5 * (1.0 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1.0 - progress
        return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape

    return factor


def set_lr(optimizer: torch.optim.Optimizer, config: OptimConfig, total_steps: int, step: int) -> float:
    """Sets and returns the rate of optimizer step ``step`` (from 0).

    The rate is a function of the step, so there is no scheduler state to save, to prepare or to step once too
    often.
    """
    lr = config.lr * lr_factor(config, total_steps)(step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr
