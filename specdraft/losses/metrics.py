"""Training metrics: how often each depth agrees with the text, and the acceptance length that this suggests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepStats:
    """Counts over anchors, per draft depth; they add up over batches and ranks.

    hits: ``[K]`` float64, depth k's most likely token is the text's. counts: ``[K]``, anchors that have a label at depth k.
    prefix_hits: ``[K]``, depths 0..k all hit. prefix_counts: ``[K]``, anchors that have labels at depths 0..k.
    A label outside the draft vocabulary counts as a miss. loss_sums: ``[K]``, unnormalised loss per depth.
    """

    hits: Tensor
    counts: Tensor
    prefix_hits: Tensor
    prefix_counts: Tensor
    loss_sums: Tensor

    def __add__(self, other: StepStats) -> StepStats:
        return StepStats.unpack(self.pack() + other.pack())

    def pack(self) -> Tensor:
        """``[5, K]`` float64, for a reduction over ranks."""
        return torch.stack([self.hits, self.counts, self.prefix_hits, self.prefix_counts, self.loss_sums])

    @classmethod
    def unpack(cls, packed: Tensor) -> StepStats:
        """Inverse of ``pack``."""
        return cls(*packed.unbind(0))

    @classmethod
    def zeros(cls, num_steps: int) -> StepStats:
        """The neutral element."""
        return cls.unpack(torch.zeros(5, num_steps, dtype=torch.float64))

    @property
    def agreement(self) -> list[float]:
        """Marginal accuracy per depth, whatever the depths before; 0.0 where nothing was counted."""
        return (self.hits / self.counts.clamp(min=1)).tolist()

    @property
    def survival(self) -> list[float]:
        """Share of anchors whose depths 0..k all agree: teacher-forced, so an estimate of what decoding accepts."""
        return (self.prefix_hits / self.prefix_counts.clamp(min=1)).tolist()

    @property
    def expected_acceptance_length(self) -> float:
        """1 + the sum of ``survival``: tokens per target forward, the bonus token included.

        Drafting is taken to run from every position of the text. Decoding starts from other positions, so the measured
        figure differs.
        """
        return 1.0 + sum(self.survival)
