"""The optimizer and its learning-rate schedule, counted in optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from specdraft.core.errors import ConfigError
from specdraft.heads.base import DraftHead
from specdraft.train._config import OptimConfig


def check_optimizer(config: OptimConfig) -> None:
    """Raises ConfigError when the installed torch lacks the optimizer; no model is needed for that."""
    if config.optimizer == "muon" and not hasattr(torch.optim, "Muon"):
        raise ConfigError(
            f"optim.optimizer: needs torch 2.9 or newer, got muon with torch {torch.__version__}; use adamw"
        )


class ParameterGroups:
    """The trained parameters of a head by how they are updated.

    matrices: 2-d weights between hidden states, which Muon may take. tokens: weights with a row or column per token of
    either vocabulary (lm_heads), and of more than two axes. plain: norms, biases, single vectors and embedding tables,
    which are not decayed.
    """

    def __init__(self, head: DraftHead) -> None:
        tables = {id(p) for module in head.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
        vocabularies = {head.spec.vocab_size, head.config.draft_vocab_size}
        self.matrices: list[Tensor] = []
        self.tokens: list[Tensor] = []
        self.plain: list[Tensor] = []
        for parameter in head.parameters():
            if not parameter.requires_grad:
                continue
            if id(parameter) in tables or sum(size > 1 for size in parameter.shape) < 2:
                self.plain.append(parameter)
            elif parameter.dim() != 2 or vocabularies & set(parameter.shape):
                self.tokens.append(parameter)
            else:
                self.matrices.append(parameter)


def build_optimizer(head: DraftHead, config: OptimConfig) -> Optimizer:
    """The optimizer of ``config`` over the trained parameters. ``head`` must already be on its device.

    AdamW is fused where the device has it.
    """
    groups = ParameterGroups(head)
    by_adamw = groups.tokens if config.optimizer == "muon" else [*groups.matrices, *groups.tokens]
    parts: list[Optimizer] = []
    if config.optimizer == "muon" and groups.matrices:
        muon = torch.optim.Muon(
            groups.matrices,
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        parts.append(muon)
    listed = [(by_adamw, config.weight_decay), (groups.plain, 0.0)]
    if any(parameters for parameters, _ in listed):
        adamw = AdamW(
            [{"params": parameters, "weight_decay": decay} for parameters, decay in listed if parameters],
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            fused=all(p.device.type in ("cpu", "cuda") for p in head.parameters()),
        )
        parts.append(adamw)
    return parts[0] if len(parts) == 1 else JointOptimizer(parts)


class JointOptimizer(Optimizer):
    """Several optimizers over different parameters as one: its groups and its state are theirs."""

    def __init__(self, parts: list[Optimizer]) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Gives every part its share of the groups, and all of them one state."""
        start = 0
        for part in self.parts:
            stop = start + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[start:stop], self.state
            start = stop

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See torch: makes new groups and a new state, which the parts then have too."""
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Every part's step; a closure is not taken, since none of them may evaluate the loss again."""
        if closure is not None:
            raise ValueError("this optimizer takes no closure")
        for part in self.parts:
            part.step()


def lr_factor(config: OptimConfig, total_steps: int) -> Callable[[int], float]:
    """Step (from 0) -> share of the peak rate: a linear rise, then the schedule down to the minimum."""
    warmup = round(config.warmup_ratio * total_steps)
    start = total_steps - round(config.decay_ratio * total_steps) if config.schedule == "wsd" else warmup

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if config.schedule == "constant" or step < start:
            return 1.0
        progress = min(1.0, (step - start) / max(1, total_steps - start))
        shape = 0.5 * (1.0 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1.0 - progress
        return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape

    return factor


def set_lr(optimizer: Optimizer, config: OptimConfig, total_steps: int, step: int) -> float:
    """Sets and returns the rate of optimizer step ``step`` (from 0); groups with an ``lr_share`` get that share of it.

    The rate is a function of the step, so there is no scheduler state to save, to prepare or to step once too
    often.
    """
    lr = config.lr * lr_factor(config, total_steps)(step)
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_share", 1.0)
    return lr
