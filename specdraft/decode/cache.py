"""The key-value cache of decoding: allocated once, written in place, rolled back by moving a length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack
from transformers.cache_utils import Cache, CacheLayerMixin

Shape = tuple[int, int, int, torch.dtype, torch.device]


class Store:
    """Keys and values of all layers. State 2i are the keys of layer i, state 2i + 1 its values.

    States of one shape share a tensor ``[states, B, heads, capacity, head_dim]``, so that what concerns all layers is
    one call. The tensors are made at the first ``commit``, from the shapes of the first forward.

    length: the place at which a forward writes. slots: the first and the number of the B slots that it is about.
    """

    def __init__(self, num_layers: int, capacity: int, num_slots: int = 1) -> None:
        self.num_states = 2 * num_layers
        self.capacity = capacity
        self.num_slots = num_slots
        self.length = 0
        self.slots = (0, 1)
        self.tensors: dict[Shape, Tensor] = {}
        self._members: dict[Shape, list[int]] = {}
        self._first: dict[int, Tensor] = {}
        self._opened: tuple[int, int, tuple[int, int]] | None = None
        self._slots: list[Tensor] = []
        self._filled: list[Tensor] = []
        self._static: tuple[tuple[int, tuple[int, int]], list[Tensor], list[Tensor]] | None = None

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Puts n rows after the committed ones and returns views of both together, ``[B, heads, length + n, d]``."""
        if not self.tensors:
            self._first[2 * layer], self._first[2 * layer + 1] = keys, values
            return keys, values
        count = keys.shape[-2]
        if self._opened != (self.length, count, self.slots):
            self._open(count)
        self._slots[2 * layer].copy_(keys)
        self._slots[2 * layer + 1].copy_(values)
        return self._filled[2 * layer], self._filled[2 * layer + 1]

    def _open(self, count: int) -> None:
        """Views for a forward of ``count`` rows, for all layers at once: slicing each layer costs more than copying."""
        end = self.length + count
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} rows, {end} are needed")
        slots: dict[int, Tensor] = {}
        filled: dict[int, Tensor] = {}
        for shape, tensor in self.tensors.items():
            rows = tensor.narrow(1, *self.slots)
            slots.update(zip(self._members[shape], rows.narrow(3, self.length, count).unbind(0), strict=True))
            filled.update(zip(self._members[shape], rows.narrow(3, 0, end).unbind(0), strict=True))
        self._slots = [slots[state] for state in range(self.num_states)]
        self._filled = [filled[state] for state in range(self.num_states)]
        self._opened = (self.length, count, self.slots)

    def columns(self, count: int, multiple: int) -> tuple[list[Tensor], list[Tensor]] | None:
        """The first columns of the keys and of the values of every layer; see ``KVCache.static_views``."""
        if not self.tensors or self.length + count > self.capacity:
            return None
        end = min(-(-(self.length + count) // multiple) * multiple, self.capacity)
        if self._static is None or self._static[0] != (end, self.slots):
            views: dict[int, Tensor] = {}
            for shape, tensor in self.tensors.items():
                filled = tensor.narrow(1, *self.slots).narrow(3, 0, end)
                # Through DLPack each view is a storage of its own to a compiler, which copies what might share memory.
                apart = (from_dlpack(view) for view in filled.unbind(0))
                views.update(zip(self._members[shape], apart, strict=True))
            keys, values = ([views[state] for state in range(kind, self.num_states, 2)] for kind in (0, 1))
            self._static = (end, self.slots), keys, values
        return self._static[1:]

    def commit(self, rows: Sequence[int], index: Tensor | None) -> None:
        """Keeps ``rows`` of the last forward, in this order, and forgets the others."""
        if not self.tensors:
            self._allocate()
        kept = 0
        while kept < len(rows) and rows[kept] == kept:
            kept += 1
        moved = len(rows) - kept
        if moved:
            for tensor in self.tensors.values():
                source = torch.tensor(rows, device=tensor.device) if index is None else index.to(tensor.device)
                found = tensor.index_select(3, source[kept:] + self.length)
                tensor.narrow(3, self.length + kept, moved).copy_(found)
        self.length += len(rows)

    def _allocate(self) -> None:
        for state in range(self.num_states):
            first = self._first[state]
            shape = (self.num_slots, first.shape[1], first.shape[3], first.dtype, first.device)
            self._members.setdefault(shape, []).append(state)
        for shape, members in self._members.items():
            slots, heads, width, dtype, device = shape
            size = (len(members), slots, heads, self.capacity, width)
            # Zeros rather than empty: a masked key of NaN would still poison the attention output.
            tensor = torch.zeros(size, dtype=dtype, device=device)
            for place, state in zip(tensor.unbind(0), members, strict=True):
                first = self._first[state]
                place.narrow(0, *self.slots).narrow(2, 0, first.shape[2]).copy_(first)
            self.tensors[shape] = tensor
        self._first = {}

    def reset(self) -> None:
        """Forgets what is committed and keeps the tensors."""
        self.length = 0
        self._first = {}


class _Layer(CacheLayerMixin):
    """One layer as transformers sees it."""

    def __init__(self, store: Store, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.store = store
        self.index = index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the store allocates for all layers together."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.store.write(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        # The first releases of transformers 5 give the positions instead of their number.
        rows = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.store.length + rows, 0

    def get_seq_length(self) -> int:
        return self.store.length

    def get_max_length(self) -> int:
        return self.store.capacity

    def get_max_cache_shape(self) -> int:
        """What the first releases of transformers 5 call ``get_max_length``."""
        return self.store.capacity

    def reset(self) -> None:
        self.store.reset()


class KVCache(Cache):
    """A transformers cache for speculative decoding.

    ``update`` writes the new rows after the committed ones and returns views of both; nothing is concatenated.
    ``length`` grows by ``commit`` alone, so whatever is not committed is overwritten by the next forward. Layers with
    a sliding window keep all rows as well: the window is a matter of the mask, and rolling back stays exact.

    Args:
        num_layers: layers of the model.
        capacity: rows that fit, those of the draft tree included.
        num_slots: texts that fit; those beyond the first are for ``BatchCache``.
    """

    def __init__(self, num_layers: int, capacity: int, num_slots: int = 1) -> None:
        self.store = Store(num_layers, capacity, num_slots)
        super().__init__(layers=[_Layer(self.store, i) for i in range(num_layers)])

    @property
    def length(self) -> int:
        """Committed rows."""
        return self.store.length

    @property
    def capacity(self) -> int:
        """Rows that fit."""
        return self.store.capacity

    @property
    def num_bytes(self) -> int:
        """Memory of the keys and values; 0 before the first commit."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.store.tensors.values())

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """``[B, heads, n, head_dim]`` each -> views ``[B, heads, length + n, head_dim]``."""
        return self.store.write(layer_idx, key_states, value_states)

    def static_views(self, count: int, columns: int) -> tuple[int, list[Tensor], list[Tensor]] | None:
        """See ``targets.compiled.StaticCache``."""
        views = self.store.columns(count, columns)
        return None if views is None else (self.store.length, *views)

    def commit(self, rows: Sequence[int], index: Tensor | None = None) -> None:
        """Keeps rows of the last forward: a path from the root, so ``rows[i] >= i``, ascending.

        Rows that lie where they belong are not touched: a chain costs nothing, a tree one gather for all layers.

        Args:
            rows: places among the n rows of the last forward.
            index: the same as ``[len(rows)]`` int64 on the cache's device, which spares a copy to it.
        """
        self.store.commit(rows, index)

    def rollback(self, length: int) -> None:
        """Forgets all but the first ``length`` committed rows."""
        if not 0 <= length <= self.store.length:
            raise ValueError(f"the cache holds {self.store.length} rows, {length} cannot be kept")
        self.store.length = length

    def reset(self) -> None:
        """Empties the cache and keeps its memory."""
        self.store.reset()
