"""Which anchors every depth is trained from, where deeper depths are trained from a sample of them."""

from __future__ import annotations

import torch
from torch import Tensor

from specdraft.core.types import DraftBatch


@torch.compiler.disable  # type: ignore[untyped-decorator]
def sampled_anchors(batch: DraftBatch, depths: int, ratio: float, floor: float = 0.0) -> list[Tensor | None]:
    """For every depth k places among the N anchors of the batch, ``[n_k]`` int64 sorted; None = all of them.

    Depth k draws a share of max(ratio ** k, floor) of the anchors, each depth among those of the depth before (the
    conditional drop of tokens of P-EAGLE). Only real anchors are drawn, but as many as if those that pad them counted, so
    that their number, too, takes few values.
    """
    if ratio == 1.0:
        return [None] * depths
    real = batch.drafting.nonzero().flatten()
    order = real[torch.randperm(real.numel(), device=real.device)]
    shares = [max(ratio**k, floor) for k in range(depths)]
    counts = [max(round(batch.anchors.numel() * share), 1) for share in shares]
    return [None if share == 1.0 else order[:count].sort().values for share, count in zip(shares, counts, strict=True)]


def share_of(batch: DraftBatch, chosen: Tensor | None) -> Tensor | None:
    """For how many anchors each of the chosen stands in the loss, ``[n]`` float32; None where all are there."""
    if chosen is None:
        return None
    return (batch.drafting.sum() / max(chosen.numel(), 1)).expand(chosen.shape)
