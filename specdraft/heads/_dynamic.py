"""Trees grown at every step from a head's own probabilities: the levels, the beam, and the choice of the draft."""

from __future__ import annotations

import torch
from torch import Tensor

from specdraft.core.tree import GrownTree


class GrowingTree:
    """A tree that grows level by level. Everything stays on the device.

    The **beam** are the nodes of the last level that are continued, at most ``width`` of them, those of highest
    probability along their path; before the first level it is the root alone.

    tokens: ``[w]`` int64 draft ids of the beam. origin: ``[w]`` int64, the row of the beam before that each continues.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self.width = width
        self.tokens = torch.empty(0, dtype=torch.int64, device=device)
        self.origin = torch.empty(0, dtype=torch.int64, device=device)
        self._beam_scores = torch.zeros(1, device=device)
        self._beam_places = torch.full((1,), -1, device=device)
        self._levels: list[tuple[Tensor, Tensor, Tensor]] = []
        self._size = 0

    def extend(self, tokens: Tensor, log_probabilities: Tensor) -> None:
        """Continues the w nodes of the beam by their likeliest tokens: draft ids and log-probabilities ``[w, k]``."""
        count, k = tokens.shape
        ids = tokens.flatten()
        scores = (self._beam_scores[:, None] + log_probabilities).flatten()
        parents = self._beam_places[:, None].expand(count, k).flatten()
        self._levels.append((ids, scores, parents))
        best = scores.topk(min(self.width, ids.numel()))
        self.tokens, self.origin = ids[best.indices], best.indices // k
        self._beam_scores, self._beam_places = best.values, best.indices + self._size
        self._size += ids.numel()

    @property
    def finite(self) -> Tensor:
        """0-d bool: no probability of the last level, which all others go into, is NaN."""
        return ~self._levels[-1][1].isnan().any()

    def best(self, count: int) -> tuple[Tensor, GrownTree]:
        """The ``count`` nodes of highest probability of all levels: draft ids ``[count]`` and their tree.

        They are connected: no node is likelier than its parent, and among equals the stable order has the parent
        first. Siblings keep the order in which they were given. Source: Li et al. 2024 (EAGLE-2), section 4.2.
        """
        ids, scores, parents = (torch.cat(parts) for parts in zip(*self._levels, strict=True))
        chosen = scores.sort(descending=True, stable=True).indices[:count].sort().values
        above = parents[chosen]
        rows = torch.where(above < 0, 0, torch.searchsorted(chosen, above) + 1)
        tree = GrownTree(torch.cat([rows.new_zeros(1), rows]), min(len(self._levels), count), scores[chosen])
        return ids[chosen], tree


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` likeliest draft ids and their log-probabilities: ``[..., D]`` -> ``[..., count]`` twice, float32."""
    logits = logits.float()
    best = logits.topk(count, dim=-1)
    return best.indices, best.values - logits.logsumexp(dim=-1, keepdim=True)
