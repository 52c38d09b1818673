"""Which hidden states of a row are stored, and the bytes that they take. Exact for training: what is left out is never read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from specdraft.core.types import FeatureRequest

Places = NDArray[np.int64]

CODE_BYTES = {"bf16": 2, "fp32": 4, "fp8": 1, "int8": 1}
"""Bytes of one number, by precision."""
SCALED = ("fp8", "int8")
"""Precisions with scales."""
SCALE_BYTES = 4
ROW_BYTES = 32
"""Of the table of a shard, for each row: its place, the key of its tokens, a checksum, and two counts."""
ROWS_AT_ONCE = 65536
SHARD_BYTES = 1024
"""About what the header of a shard takes."""


@dataclass(frozen=True)
class KeptCounts:
    """How much of a data set is stored: rows with something kept, positions of the last hidden state and of the layers."""

    rows: int
    last: int
    aux: int

    def __add__(self, other: KeptCounts) -> KeptCounts:
        return KeptCounts(self.rows + other.rows, self.last + other.last, self.aux + other.aux)


def kept_positions(loss_mask: ArrayLike, request: FeatureRequest) -> tuple[Places, Places]:
    """Positions of the last hidden state and of the aux layers that training on a conversation reads, sorted.

    With S the supervised positions from 2 on, the anchors are S - 2 and the target predicts S at S - 1:

    - the loss reads the last hidden state at S - 1;
    - a head that reads it at anchors also at S - 2; one that attends to the text up to an anchor, from 0 to max(S) - 2;
    - aux layers are read from 0 to max(S) - 2, since every head that asks for them attends to the text.

    loss_mask: ``[T]`` bool of one conversation, on the host, True = supervised.
    """
    supervised = np.flatnonzero(np.asarray(loss_mask)[2:]) + 2
    if not supervised.size:
        return supervised, supervised
    end = int(supervised[-1])
    aux = np.arange(end - 1 if request.aux_layers else 0)
    if request.last == "prefix":
        return np.arange(end), aux
    if request.last == "anchors":
        return np.union1d(supervised - 2, supervised - 1), aux
    return supervised - 1, aux


def row_counts(loss_mask: Tensor, offsets: Tensor, request: FeatureRequest) -> Tensor:
    """``[R, 2]`` int64: how many positions of the last hidden state and of the aux layers are kept of every row.

    loss_mask: ``[N]`` bool of R rows one after the other; offsets: ``[R+1]`` int64, row i is ``offsets[i]:offsets[i+1]``.
    The same as ``kept_positions`` of every row, for many rows at once.
    """
    parts = [
        _counts(loss_mask[int(bounds[0]) : int(bounds[-1])], bounds - bounds[0], request)
        for start in range(0, offsets.numel() - 1, ROWS_AT_ONCE)
        for bounds in (offsets[start : start + ROWS_AT_ONCE + 1],)
    ]
    return torch.cat([torch.zeros(0, 2, dtype=torch.int64), *parts])


def _counts(loss_mask: Tensor, offsets: Tensor, request: FeatureRequest) -> Tensor:
    count = offsets.numel() - 1
    row = torch.repeat_interleave(torch.arange(count), offsets.diff())
    position = torch.arange(loss_mask.numel()) - offsets[row]
    flat = (loss_mask & (position >= 2)).nonzero().flatten()
    end = torch.zeros(count, dtype=torch.int64).scatter_reduce_(0, row[flat], position[flat], "amax")
    aux = (end - 1).clamp(min=0) if request.aux_layers else torch.zeros_like(end)
    if request.last == "prefix":
        return torch.stack([end, aux], 1)
    kept = torch.zeros_like(loss_mask)
    kept[flat - 1] = True
    if request.last == "anchors":
        kept[flat - 2] = True
    return torch.stack([torch.bincount(row[kept], minlength=count), aux], 1)


def kept_counts(counts: Tensor) -> KeptCounts:
    """The sums of ``row_counts``."""
    last, aux = counts.sum(0).tolist()
    return KeptCounts(int((counts[:, 0] > 0).sum()), last, aux)


def store_bytes(
    counts: KeptCounts, request: FeatureRequest, hidden_size: int, precision: str, shard_bytes: int = 256 << 20
) -> int:
    """What a store takes on disk, to within a percent; a pure function of how much is stored.

    counts: see ``kept_counts``. shard_bytes: features.shard_mib in bytes.
    """
    width = len(request.aux_layers)
    scale = SCALE_BYTES if precision in SCALED else 0
    position = hidden_size * CODE_BYTES[precision] + scale
    body = counts.last * position + counts.aux * width * position + counts.rows * ROW_BYTES
    channels = (1 + width) * hidden_size * scale
    return body + max(1, -(-body // shard_bytes)) * (SHARD_BYTES + channels)


def expected_counts(num_rows: int, num_tokens: int, num_supervised: int, request: FeatureRequest) -> KeptCounts:
    """``kept_counts`` where the rows are not there yet: one answer at the end of every row, all of it supervised."""
    aux = max(0, num_tokens - 2 * num_rows) if request.aux_layers else 0
    last = {"prefix": num_tokens - num_rows, "anchors": num_supervised + num_rows, "none": num_supervised}[request.last]
    return KeptCounts(num_rows, max(0, last), aux)
