"""Which conversations of several sources are kept: draws by a seed, and shares by weight."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Sequence


def draw(count: int, keep: int, seed: int | str) -> array[int]:
    """``keep`` of the places 0 to ``count - 1``, in ascending order; a larger draw holds every smaller one."""
    order = array("q", range(count))
    if keep >= count:
        return order
    random.Random(seed).shuffle(order)
    return array("q", sorted(order[:keep]))


def shares(counts: Sequence[int], weights: Sequence[float], limit: int | None = None) -> list[int]:
    """How many conversations each source gives, in proportion to ``weights``, as many as there are and ``limit`` allows.

    No source gives more than it has, so the scarcest one decides how many there are in all. The conversations are handed
    out one by one to the source that is furthest behind (the highest averages of D'Hondt), so that every share of a
    larger limit is at least that of a smaller one.
    """
    whole = math.fsum(weights)
    parts = [weight / whole for weight in weights]
    total = math.floor(min(count / part for count, part in zip(counts, parts, strict=True)) * (1 + 1e-12))
    total = total if limit is None else min(total, limit)
    given = [min(count, math.floor(total * part)) for count, part in zip(counts, parts, strict=True)]
    for _ in range(total - sum(given)):
        behind = max(range(len(parts)), key=lambda i: (parts[i] / (given[i] + 1), -i))
        if given[behind] == counts[behind]:
            break
        given[behind] += 1
    return given


def select(counts: Sequence[int], weights: Sequence[float] | None, limit: int | None, seed: int) -> array[int]:
    """The places kept of conversations that stand source after source, ``counts`` of each, in ascending order."""
    if weights is None:
        return draw(sum(counts), sum(counts) if limit is None else limit, seed)
    kept, start = array("q"), 0
    for number, (count, share) in enumerate(zip(counts, shares(counts, weights, limit), strict=True)):
        kept.extend(start + place for place in draw(count, share, f"{seed}/{number}"))
        start += count
    return kept
