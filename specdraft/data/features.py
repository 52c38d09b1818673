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
        places = _documents(tokens)
        known = [(b, start, self._rows.get(row)) for row, b, start, _ in places]
        if all(features is not None for _, _, features in known):
            parts = [(b, start, features) for b, start, features in known if features is not None]
            last = _laid_out([(b, start, own.last_hidden) for b, start, own in parts], tokens)
            aux = [(b, start, own.aux_hidden) for b, start, own in parts if own.aux_hidden is not None]
            return Features(last, _laid_out(aux, tokens) if aux else None)
        features = self.target.capture(tokens, self.request)
        self._keep(places, features)
        return features

    def _keep(self, places: list[tuple[int, int, int, int]], features: Features) -> None:
        """Copies of the rows that are new, as long as there is room. Stand-in rows (negative ids) are not kept."""
        for row, b, start, stop in places:
            if row < 0 or row in self._rows:
                continue
            aux = None if features.aux_hidden is None else features.aux_hidden[b, start:stop]
            parts = [part for part in (features.last_hidden[b, start:stop], aux) if part is not None]
            size = sum(part.numel() * part.element_size() for part in parts)
            if self.num_bytes + size > self.limit_bytes:
                continue
            self.num_bytes += size
            self._rows[row] = Features(parts[0].clone(), None if aux is None else parts[1].clone())


def _documents(tokens: TokenBatch) -> list[tuple[int, int, int, int]]:
    """Place in the data set, row of the batch, first column and the column behind the last, of every document."""
    found = []
    for b, (places, documents) in enumerate(
        zip(tokens.row_ids.view(tokens.input_ids.shape[0], -1).tolist(), tokens.document_ids.tolist(), strict=True)
    ):
        start = 0
        for d, place in enumerate(places):
            stop = start + documents.count(d)
            if stop > start:
                found.append((place, b, start, stop))
            start = stop
    return found


def _laid_out(parts: list[tuple[int, int, Tensor]], tokens: TokenBatch) -> Tensor:
    """States ``[t_i, H]`` at their rows and columns -> ``[B, T, H]``, zeros elsewhere."""
    first = parts[0][2]
    out = torch.zeros(*tokens.input_ids.shape, first.shape[-1], dtype=first.dtype, device=first.device)
    for b, start, states in parts:
        out[b, start : start + states.shape[0]] = states
    return out
