"""The target's features of training rows, kept in memory after their first use when there is room for them."""

from __future__ import annotations

import torch
from torch import Tensor

from specdraft.core.types import FeatureRequest, Features, TokenBatch
from specdraft.targets.base import Target


class FeatureMemory:
    """Captures features by batch and keeps them by row, so that a second epoch needs no target forward.

    A row's states are those of the batch in which it was captured; in another batch the target's kernels may round them
    otherwise, so training with a memory equals training without it up to rounding.

    Args of the constructor: ``limit_bytes`` is what the kept states may take, on the target's device; 0 keeps nothing.
    """

    def __init__(self, target: Target, request: FeatureRequest, limit_bytes: int) -> None:
        self.target = target
        self.request = request
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self._rows: dict[int, Features] = {}

    def capture(self, tokens: TokenBatch) -> Features:
        """Features of ``tokens``, ``[B, T, ·]``; what stands on padding is arbitrary but finite."""
        if not self.limit_bytes:
            return self.target.capture(tokens, self.request)
        rows = [self._rows.get(row) for row in tokens.row_ids.tolist()]
        known = [row for row in rows if row is not None]
        if len(known) == len(rows):
            length = tokens.input_ids.shape[1]
            aux = [row.aux_hidden for row in known if row.aux_hidden is not None]
            return Features(_pad([row.last_hidden for row in known], length), _pad(aux, length) if aux else None)
        features = self.target.capture(tokens, self.request)
        self._keep(tokens, features)
        return features

    def _keep(self, tokens: TokenBatch, features: Features) -> None:
        """Copies of the rows that are new, as long as there is room. Stand-in rows (negative ids) are not kept."""
        lengths = tokens.attention_mask.sum(1).tolist()
        for i, (row, length) in enumerate(zip(tokens.row_ids.tolist(), lengths, strict=True)):
            if row < 0 or row in self._rows:
                continue
            aux = None if features.aux_hidden is None else features.aux_hidden[i, :length]
            parts = [part for part in (features.last_hidden[i, :length], aux) if part is not None]
            size = sum(part.numel() * part.element_size() for part in parts)
            if self.num_bytes + size > self.limit_bytes:
                continue
            self.num_bytes += size
            self._rows[row] = Features(parts[0].clone(), None if aux is None else parts[1].clone())


def _pad(rows: list[Tensor], length: int) -> Tensor:
    """Rows ``[t_i, H]`` -> ``[B, length, H]`` with zeros on the right."""
    out = torch.zeros(len(rows), length, rows[0].shape[-1], dtype=rows[0].dtype, device=rows[0].device)
    for i, row in enumerate(rows):
        out[i, : row.shape[0]] = row
    return out
