"""What a training run consists of and what it returns; the command line puts it together."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

from specdraft.core.errors import ConfigError
from specdraft.data.batching import BatchPlan
from specdraft.data.chat import TokenRow
from specdraft.data.features import StoredRows
from specdraft.heads.base import DraftHead
from specdraft.losses.objectives import Objective, Teacher
from specdraft.targets.base import Target
from specdraft.train._config import OptimConfig, TrainerConfig
from specdraft.train.joint import Alone
from specdraft.train.sharding import asks_to_shard
from specdraft.train.state import EvalPoint, TrainState
from specdraft.train.trackers import Tracker

NO_LIMIT = sys.maxsize


@dataclass(frozen=True, kw_only=True)
class TrainInputs:
    """A run. The same on every rank, except for ``plan.rank`` and the tracker."""

    accelerator: Accelerator
    target: Target
    head: DraftHead
    """Built, its draft vocabulary chosen, initialised from the target."""
    objective: Objective
    rows: Callable[[Sequence[int]], list[TokenRow]]
    """The rows of some indices, in that order."""
    plan: BatchPlan
    """Its ``accumulation_steps`` and ``world_size`` say how many micro-batches make a step."""
    pad_id: int
    optim: OptimConfig
    trainer: TrainerConfig
    tracker: Tracker
    folder: Path
    """Receives ``checkpoints/``, ``best/`` and ``last/``."""
    settings: dict[str, Any]
    """Of the whole run, for the tracker."""
    provenance: dict[str, Any]
    """Written into the saved heads, beside step and tokens."""
    seed: int = 0
    """Of whatever a head draws at random; every rank draws its own."""
    resume: str = "never"
    """never, auto or must."""
    joint: Alone = field(default_factory=Alone)
    """A ``Joint`` trains an adapter on the target with the head."""
    store: StoredRows | None = None
    """Where the target's features are stored; None = the target runs in every epoch."""
    evaluate: Callable[[DraftHead], EvalPoint] | None = None
    """Measures acceptance, on rank 0 only; None = the last head counts as the best."""

    @cached_property
    def total_steps(self) -> int:
        """The most optimizer steps that the run can have; NO_LIMIT where only time ends it."""
        most, steps = self.trainer.max_steps, 0
        if self.trainer.max_tokens is not None:
            steps = self.plan.steps_for(self.trainer.max_tokens)
            return steps if most is None else min(steps, most)
        if self.trainer.max_minutes is not None:
            return NO_LIMIT if most is None else most
        for epoch in range(self.trainer.epochs):
            if most is not None and steps >= most:
                return most
            steps += self.plan.num_steps(epoch)
        return steps if most is None else min(steps, most)

    @property
    def known_steps(self) -> int | None:
        """``total_steps``; None where only time ends the run."""
        return None if self.total_steps == NO_LIMIT else self.total_steps

    def is_over(self, state: TrainState) -> bool:
        """Whether training has come to its end."""
        minutes = self.trainer.max_minutes
        return state.step >= self.total_steps or (minutes is not None and state.seconds >= 60.0 * minutes)

    def progress(self, state: TrainState) -> float:
        """How much of the training is done, 0 to 1, in time where that ends it."""
        return min(1.0, state.step / max(1, self.expected_steps(state)))

    def expected_steps(self, state: TrainState) -> int:
        """Optimizer steps that the run will have had in the end: known, or at the pace so far, which ranks agree on."""
        minutes = self.trainer.max_minutes
        if minutes is None or not state.seconds:
            return self.total_steps
        return min(self.total_steps, max(state.step + 1, round(state.step * 60.0 * minutes / state.seconds)))

    def teacher(self) -> Teacher:
        """The target's side of the loss, over the head's draft vocabulary."""
        unembed, vocab = self.target.unembedding, self.head.vocab
        if vocab is None:
            return Teacher(unembed, unembed, None)
        every = vocab.t2d.new_ones(vocab.t2d.numel()).nonzero().flatten()
        return Teacher(unembed, self.head.draft_unembedding(unembed), vocab.to_draft(every))


@dataclass(frozen=True)
class TrainResult:
    """state: where training ended. stopped: True when a signal ended it early. totals: see ``Meter.totals``."""

    state: TrainState
    stopped: bool
    totals: dict[str, float]


def make_accelerator(trainer: TrainerConfig, device: str = "auto") -> Accelerator:
    """The Accelerator of a run: the launcher's processes, the precision of ``trainer``, plain DDP of the head.

    ``device``: ``auto`` (every process its own accelerator, if there are any), ``cpu``, or one CUDA device.

    Raises:
        ConfigError: several processes on one device, a precision that the device lacks, or see ``asks_to_shard``.
    """
    asks_to_shard()
    if device.startswith("cuda"):
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(f"target.device: several processes need a device each, got {device}; use auto")
        torch.cuda.set_device(torch.device(device) if ":" in device else 0)
    # Buffers are the draft-vocabulary map, equal everywhere from the start.
    ddp = DistributedDataParallelKwargs(find_unused_parameters=False, broadcast_buffers=False)
    # Rank 0 decodes held-out prompts and writes checkpoints while the others wait for it.
    patience = InitProcessGroupKwargs(timeout=timedelta(hours=2))
    on_cpu = device == "cpu" or not torch.accelerator.is_available()
    if trainer.mixed_precision == "fp16" and on_cpu:
        raise ConfigError("trainer.mixed_precision: needs an accelerator, got fp16 on the CPU; use bf16 or no")
    return Accelerator(mixed_precision=trainer.mixed_precision, cpu=on_cpu, kwargs_handlers=[ddp, patience])
