"""The order of rows and the shape of batches. Seed and epoch decide it, so that a position can be resumed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from specdraft.core.types import TokenBatch
from specdraft.data.chat import TokenRow

POOL_STEPS = 16
"""Rows are sorted by length among those of this many optimizer steps."""

_IDLE_TOKENS = 2
"""Length of the row that stands for an empty micro-batch."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Which rows each process sees in which micro-batch of which optimizer step.

    A step takes ``accumulation_steps * world_size`` micro-batches of ``batch_size`` rows. They are planned
    for all processes together and then dealt out, so one process with accumulation 2 and two processes with
    accumulation 1 use the same rows in every step. Epoch e and step s are all that a resume needs.

    lengths: tokens of every row of the data set. bucket: rows of similar length share a step.
    """

    lengths: Sequence[int]
    batch_size: int
    accumulation_steps: int = 1
    world_size: int = 1
    rank: int = 0
    seed: int = 0
    bucket: bool = True

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one epoch over all processes; the last may have fewer rows."""
        return -(-len(self.lengths) // self.batch_size)

    @cached_property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch, the same for every epoch; the last may have fewer micro-batches."""
        return -(-self.num_micro_batches // (self.accumulation_steps * self.world_size))

    def epoch(self, epoch: int) -> list[list[list[int]]]:
        """Row indices of this process: optimizer step -> micro-batch -> rows. Every row comes exactly once.

        Every process has as many micro-batches in a step as the others. In an epoch's last step some may be
        empty (``[]``; ``collate`` makes a batch without supervision of it), so that all processes run forward
        together.
        """
        steps = self._global_steps(epoch)
        dealt = []
        for micro_batches in steps:
            turns = -(-len(micro_batches) // self.world_size)
            places = [turn * self.world_size + self.rank for turn in range(turns)]
            dealt.append([micro_batches[i] if i < len(micro_batches) else [] for i in places])
        return dealt

    def _global_steps(self, epoch: int) -> list[list[list[int]]]:
        """Optimizer steps -> micro-batches -> rows, over all processes."""
        generator = random.Random(hashlib.sha256(f"{self.seed}/{epoch}".encode()).digest())
        order = list(range(len(self.lengths)))
        generator.shuffle(order)
        step_rows = self.batch_size * self.accumulation_steps * self.world_size
        if self.bucket:
            pool = step_rows * POOL_STEPS
            order = [
                row
                for start in range(0, len(order), pool)
                for row in sorted(order[start : start + pool], key=lambda i: self.lengths[i])
            ]
        steps = [order[start : start + step_rows] for start in range(0, len(order), step_rows)]
        if self.bucket:
            # Sorted pools would run from short to long; the incomplete step stays last.
            whole = len(order) // step_rows
            shuffled = steps[:whole]
            generator.shuffle(shuffled)
            steps = [*shuffled, *steps[whole:]]
        size = self.batch_size
        return [[rows[start : start + size] for start in range(0, len(rows), size)] for rows in steps]


def collate(rows: Sequence[TokenRow], pad_id: int, row_ids: Sequence[int] | None = None) -> TokenBatch:
    """Pads rows on the right to the longest. B rows, T tokens.

    ``row_ids`` are the rows' places in the data set (default -1). No rows at all make a batch of one row of
    two unsupervised tokens with row id -1: a process without work still takes part in every forward.
    """
    if row_ids is not None and len(row_ids) != len(rows):
        raise ValueError(f"row_ids: one for each row is needed, got {len(row_ids)} for {len(rows)} rows")
    ids = list(row_ids) if row_ids is not None and rows else [-1] * max(len(rows), 1)
    rows = rows or [TokenRow([pad_id] * _IDLE_TOKENS, [False] * _IDLE_TOKENS)]
    T = max(len(row.input_ids) for row in rows)
    lengths = torch.tensor([len(row.input_ids) for row in rows])
    positions = torch.arange(T).expand(len(rows), T)
    real = positions < lengths[:, None]
    return TokenBatch(
        input_ids=torch.tensor([row.input_ids + [pad_id] * (T - len(row.input_ids)) for row in rows]),
        attention_mask=real,
        loss_mask=torch.tensor([row.loss_mask + [False] * (T - len(row.loss_mask)) for row in rows]),
        position_ids=positions.contiguous(),
        document_ids=torch.where(real, 0, -1),
        row_ids=torch.tensor(ids),
    )
