"""The loop over a target's layers as one compiled graph: for a small target most of a step is the start of kernels.

The graph works on a cache of fixed addresses: it writes the new keys and values at a place given as a tensor, and attends
to all columns of a block that is longer than what is filled, behind a mask.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from specdraft.core.compiling import COLUMNS, StaticGraph, kept, rounded
from specdraft.targets.fast_ops import as_bias
from specdraft.targets.fast_path import FastDecoder

MAX_ROWS = 64
"""A longer forward is bound by its products and runs uncompiled."""


@runtime_checkable
class StaticCache(Protocol):
    """A cache whose tensors stay where they are."""

    def static_views(self, count: int, columns: int) -> tuple[int, list[Tensor], list[Tensor]] | None:
        """The place of the next row, and the first columns of the keys and of the values of every layer.

        Args:
            count: rows that are to be written.
            columns: the views end at a multiple of this, or at the end of the cache.

        Returns:
            The place and two lists of ``[B, heads, L, d]``; None before the cache is allocated and when it is too full.
        """
        ...


class _Views:
    """What a layer takes for its cache inside the graph."""

    def __init__(self, keys: list[Tensor], values: list[Tensor], places: Tensor) -> None:
        self.keys = keys
        self.values = values
        self.places = places

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """``[B, heads, n, d]`` each, written in place -> all columns."""
        self.keys[layer].index_copy_(2, self.places, keys)
        self.values[layer].index_copy_(2, self.places, values)
        return self.keys[layer], self.values[layer]


class CompiledDecoder:
    """Stands in for a ``FastDecoder``: forwards of at most ``MAX_ROWS`` rows into a filled ``StaticCache`` are compiled.

    A graph is compiled for every number of rows of a forward, padded to a power of two so that few graphs serve every tree;
    on a CUDA device it is recorded as a CUDA graph and replayed.

    Args:
        decoder: whose loop is compiled.
        pad: pad the number of rows.

    Raises:
        ConfigError: there is no compiler.
    """

    def __init__(self, decoder: FastDecoder, pad: bool = True) -> None:
        self.decoder = decoder
        self.device = decoder.layout.embedding.get_parameter("weight").device
        self.pad = pad
        self._graph = StaticGraph("target", self._run, self.device)

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        masks: dict[str, Tensor | None],
        cache: Any,
        keep: Collection[int],
    ) -> dict[int, Tensor]:
        """As ``FastDecoder``."""
        count = input_ids.shape[1]
        rows = rounded(count) if self.pad else count
        static = None
        if rows <= MAX_ROWS and isinstance(cache, StaticCache):
            static = cache.static_views(rows, COLUMNS)
        if static is None:
            return self.decoder(input_ids, position_ids, masks, cache, keep)
        place, keys, values = static
        places = torch.arange(place, place + rows, device=self.device)
        hidden, (cos, sin) = self.decoder.enter(_padded(input_ids, rows), _padded(position_ids, rows))
        biases = {
            kind: _wide_bias(mask, count, rows, place, keys[0].shape[2], hidden)
            for kind, mask in masks.items()
            if kind in self.decoder.groups
        }
        caches = (*keys, *values)
        states = self._graph(caches, biases.values(), hidden, cos, sin, biases, keys, values, places, tuple(keep))
        return {index: kept(state[:, :count]) for index, state in states.items()}

    def _run(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        biases: dict[str, Tensor],
        keys: list[Tensor],
        values: list[Tensor],
        places: Tensor,
        keep: tuple[int, ...],
    ) -> dict[int, Tensor]:
        grouped = {kind: bias.repeat(1, 1, self.decoder.groups[kind], 1) for kind, bias in biases.items()}
        return self.decoder.run(hidden, (cos, sin), grouped, _Views(keys, values, places), keep)


def _padded(ids: Tensor, rows: int) -> Tensor:
    """``[B, n]`` -> ``[B, rows]``: the last column again and again."""
    missing = rows - ids.shape[1]
    return torch.cat([ids, ids[:, -1:].expand(-1, missing)], dim=1) if missing else ids


def _wide_bias(mask: Tensor | None, count: int, rows: int, place: int, columns: int, like: Tensor) -> Tensor:
    """What is added to the scores of ``rows`` rows over all ``columns``, ``[B, 1, rows, columns]``.

    Args:
        mask: ``[B or 1, 1, count, place + count]``, see ``as_bias``; None = a single row that sees all.
        count: rows of the forward; those of the padding see the first column alone.
        rows: with padding.
        place: columns filled before.
        columns: of the views.
        like: in whose dtype, on its device.
    """
    batch = 1 if mask is None else mask.shape[0]
    bias = like.new_full((batch, 1, rows, columns), float("-inf"))
    bias[:, :, :count, : place + count] = 0.0 if mask is None else as_bias(mask, like.dtype)
    bias[:, :, count:, 0] = 0.0
    return bias
