"""The key-value cache of a batch: one allocation, a slot for every row, a length of its own for every slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdraft.decode.cache import KVCache


class BatchCache(KVCache):
    """Slots of one capacity, of which the first ``len(lengths)`` hold rows that are being decoded.

    A forward over all rows writes its new keys behind the longest row, into the same columns of every slot, which is
    one slice a layer; ``commit_rows`` then moves what each row keeps to that row's own end, for all layers at once. In
    between, the mask of a row shows it its own columns and the new ones.

    Args:
        num_layers: layers of the model.
        capacity: columns of a slot, those of the draft tree included.
        num_slots: rows at a time.
    """

    def __init__(self, num_layers: int, capacity: int, num_slots: int) -> None:
        super().__init__(num_layers, capacity, num_slots)
        self.lengths: list[int] = []

    @property
    def num_slots(self) -> int:
        """Rows that fit."""
        return self.store.num_slots

    def open_slot(self) -> None:
        """The next forwards run the prompt of a new row: they see and fill the first free slot alone."""
        self.store.slots = (len(self.lengths), 1)
        self.store.length = 0

    def close_slot(self) -> None:
        """The new row is one of the rows from now on, with what was committed since ``open_slot``."""
        self.lengths.append(self.store.length)

    def wipe(self, slot: int) -> None:
        """Zeros all of a slot. One that held NaN must not be read again: a masked key of NaN still poisons its row."""
        for tensor in self.store.tensors.values():
            tensor[:, slot].zero_()

    def open_rows(self) -> int:
        """The next forward is about all rows; returns the length of the longest, behind which it writes."""
        self.store.slots = (0, len(self.lengths))
        self.store.length = max(self.lengths)
        return self.store.length

    def commit_rows(self, paths: Sequence[Sequence[int]]) -> None:
        """Keeps for every row its path through the last forward: ascending places among the new columns, or none."""
        start = self.store.length
        moving = [
            slot
            for slot, path in enumerate(paths)
            if path and (self.lengths[slot] < start or list(path) != list(range(len(path))))
        ]
        if moving:
            self._move(start, moving, [paths[slot] for slot in moving])
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]

    def _move(self, start: int, slots: list[int], paths: list[Sequence[int]]) -> None:
        """Copies columns of the last forward to the ends of their rows."""
        count = max(map(len, paths))
        # Short paths are filled up with their last column: what lands behind a row's end is written anew before it counts.
        sources = [[start + place for place in (*path, *[path[-1]] * (count - len(path)))] for path in paths]
        places = [list(range(self.lengths[slot], self.lengths[slot] + count)) for slot in slots]
        tables = [[[slot] * count for slot in slots], sources, places]
        for tensor in self.store.tensors.values():
            rows, source, place = torch.tensor(tables, device=tensor.device)
            columns = tensor.transpose(2, 3)
            columns[:, rows, place] = columns[:, rows, source]

    def remove(self, slot: int) -> None:
        """The row of ``slot`` leaves; the last row takes its place."""
        last = len(self.lengths) - 1
        length = self.lengths.pop()
        if slot < last:
            self.lengths[slot] = length
            for tensor in self.store.tensors.values():
                tensor[:, slot, :, :length].copy_(tensor[:, last, :, :length])

    def reset(self) -> None:
        """Empties all slots and keeps their memory."""
        super().reset()
        self.lengths = []


def batch_masks(
    lengths: Tensor, start: int, depths: Tensor, ancestors: Tensor, window: int | None
) -> tuple[Tensor, Tensor | None]:
    """Masks of a forward over all rows for the full and for the sliding layers, ``[B, 1, n, start + n]`` bool each.

    Args:
        lengths: ``[B]`` int64, committed tokens of each row, at most ``start``.
        start: the column from which the new keys lie.
        depths: ``[B, n]`` int64, of the new tokens below the root of their row.
        ancestors: ``[B, n, n]`` bool, True where a new token sees another.
        window: keys a query of a sliding layer sees, itself included; None without such layers.
    """
    columns = torch.arange(start, device=lengths.device)
    committed = (columns < lengths[:, None])[:, None].expand(-1, depths.shape[1], -1)
    full = torch.cat([committed, ancestors], dim=-1)[:, None]
    if window is None:
        return full, None
    near = (lengths[:, None] + depths)[..., None] - columns < window
    close = depths[..., None] - depths[:, None] < window
    return full, torch.cat([committed & near, ancestors & close], dim=-1)[:, None]
