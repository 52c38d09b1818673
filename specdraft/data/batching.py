"""The order of rows and the shape of batches. Seed and epoch decide it, so that a position can be resumed."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import overload

import torch

from specdraft.core.shapes import padded_size
from specdraft.core.types import TokenBatch
from specdraft.data.chat import TokenRow

POOL_STEPS = 16
"""Rows are sorted by length among those of at most this many optimizer steps."""

PACK_WINDOW = 512
"""Conversations are packed with others of so many that follow each other in the order of an epoch."""

_IDLE_TOKENS = 2
"""Length of the row that stands for an empty micro-batch."""

MicroBatch = list[list[int]]
"""Rows of a batch, each with the places in the data set of what it holds: one conversation, or several packed ones."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Which conversations each process sees in which micro-batch of which optimizer step.

    A step takes ``accumulation_steps * world_size`` micro-batches of ``batch_size`` rows. They are planned
    for all processes together and then dealt out, so one process with accumulation 2 and two processes with
    accumulation 1 use the same rows in every step. Epoch e and step s are all that a resume needs.

    lengths: tokens of every conversation of the data set. bucket: rows of similar length share a step.
    capacity: tokens of a row that holds several conversations; None = one conversation a row.
    """

    lengths: Sequence[int]
    batch_size: int
    accumulation_steps: int = 1
    world_size: int = 1
    rank: int = 0
    seed: int = 0
    bucket: bool = True
    capacity: int | None = None

    def num_steps(self, epoch: int) -> int:
        """Optimizer steps of an epoch, the last maybe with fewer micro-batches; epochs differ only where rows are packed."""
        if self.capacity is None:
            return -(-len(self.lengths) // self._step_rows)
        if epoch not in self._counts:
            self._counts[epoch] = len(self._global_steps(epoch))
        return self._counts[epoch]

    @cached_property
    def _counts(self) -> dict[int, int]:
        return {}

    @property
    def _step_rows(self) -> int:
        """Rows of a step over all processes."""
        return self.batch_size * self.accumulation_steps * self.world_size

    def epoch(self, epoch: int) -> Steps:
        """What this process sees: optimizer step -> micro-batch -> rows. Every conversation comes exactly once.

        Every process has as many micro-batches in a step as the others. In an epoch's last step some may be
        empty (``[]``; ``collate`` makes a batch without supervision of it), so that all processes run forward
        together.
        """
        return replace(self._global_steps(epoch), world_size=self.world_size, rank=self.rank)

    def _global_steps(self, epoch: int) -> Steps:
        """Optimizer steps -> micro-batches -> rows, over all processes."""
        generator = random.Random(hashlib.sha256(f"{self.seed}/{epoch}".encode()).digest())
        places = array("q", range(len(self.lengths)))
        generator.shuffle(places)
        rows = _Rows(places)
        if self.capacity is not None:
            rows = _Rows.packed(places, self.lengths, self.capacity)
            generator.shuffle(rows.order)
        step_rows = self._step_rows
        steps = array("q")
        if self.bucket:
            # Two pools at least, so that other rows meet in every epoch of a small data set too.
            pool = step_rows * max(1, min(POOL_STEPS, len(rows) // (2 * step_rows)))
            for start in range(0, len(rows), pool):
                part = sorted(
                    range(start, min(start + pool, len(rows))), key=lambda i: rows.num_tokens(i, self.lengths)
                )
                rows.order[start : start + pool] = array("q", (rows.order[i] for i in part))
            # Sorted pools would run from short to long; the incomplete step stays last.
            steps = array("q", range(len(rows) // step_rows))
            generator.shuffle(steps)
        return Steps(rows=rows, order=steps, step_rows=step_rows, batch_size=self.batch_size)

    def steps_for(self, num_tokens: int) -> int:
        """Optimizer steps, over as many epochs as it takes, after which all processes have seen so many tokens."""
        per_epoch, steps, epoch = max(1, sum(self.lengths)), 0, 0
        while num_tokens > per_epoch:
            num_tokens, steps, epoch = num_tokens - per_epoch, steps + self.num_steps(epoch), epoch + 1
        for micro_batches in self._global_steps(epoch):
            if num_tokens <= 0:
                break
            num_tokens -= sum(self.lengths[i] for rows in micro_batches for row in rows for i in row)
            steps += 1
        return steps

    def padding_share(self) -> float:
        """Share of the positions of an epoch's batches that hold no token."""
        real = padded = 0
        for step in self._global_steps(0):
            for rows in step:
                sizes = [sum(self.lengths[i] for i in row) for row in rows]
                real, padded = real + sum(sizes), padded + max(sizes) * len(sizes)
        return 1.0 - real / max(1, padded)


class _Rows(Sequence[list[int]]):
    """The conversations of every row, in numbers of 8 bytes: lists of a million rows would take 100 MB.

    places: conversations, row after row. ends: behind each row in ``places``; None = one conversation a row. order: of the
    rows.
    """

    def __init__(self, places: array[int], ends: array[int] | None = None) -> None:
        self.places, self.ends = places, ends
        self.order = places if ends is None else array("q", range(len(ends)))

    @classmethod
    def packed(cls, order: Sequence[int], lengths: Sequence[int], capacity: int) -> _Rows:
        """Rows of several conversations."""
        places, ends = array("q"), array("q")
        for start in range(0, len(order), PACK_WINDOW):
            for row in pack(order[start : start + PACK_WINDOW], lengths, capacity):
                places.extend(row)
                ends.append(len(places))
        return cls(places, ends)

    def __len__(self) -> int:
        return len(self.order)

    @overload
    def __getitem__(self, index: int) -> list[int]: ...

    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...

    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = self.order[index]
        if self.ends is None:
            return [row]
        return self.places[self.ends[row - 1] if row else 0 : self.ends[row]].tolist()

    def num_tokens(self, index: int, lengths: Sequence[int]) -> int:
        """Of a row."""
        return sum(lengths[place] for place in self[index])


@dataclass(frozen=True, kw_only=True)
class Steps(Sequence[list[MicroBatch]]):
    """Optimizer steps of an epoch -> micro-batches -> rows, as one process sees them; made when they are asked for.

    order: of the whole steps; the others follow as they are.
    """

    rows: _Rows
    order: array[int]
    step_rows: int
    batch_size: int
    world_size: int = 1
    rank: int = 0

    def __len__(self) -> int:
        return -(-len(self.rows) // self.step_rows)

    @overload
    def __getitem__(self, index: int) -> list[MicroBatch]: ...

    @overload
    def __getitem__(self, index: slice) -> list[list[MicroBatch]]: ...

    def __getitem__(self, index: int | slice) -> list[MicroBatch] | list[list[MicroBatch]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        number = self.order[index] if index < len(self.order) else index
        rows = self.rows[number * self.step_rows : (number + 1) * self.step_rows]
        micro_batches = [rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size)]
        turns = -(-len(micro_batches) // self.world_size)
        places = [turn * self.world_size + self.rank for turn in range(turns)]
        return [micro_batches[i] if i < len(micro_batches) else [] for i in places]


def pack(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Puts conversations into as few rows of at most ``capacity`` tokens as first-fit decreasing finds, window by window.

    A conversation longer than that has a row of its own.
    """
    rows: list[list[int]] = []
    for start in range(0, len(order), PACK_WINDOW):
        window = sorted(order[start : start + PACK_WINDOW], key=lambda i: lengths[i], reverse=True)
        opened: list[list[int]] = []
        room: list[int] = []
        for place in window:
            fits = next((i for i, left in enumerate(room) if left >= lengths[place]), None)
            if fits is None:
                opened.append([place])
                room.append(capacity - lengths[place])
            else:
                opened[fits].append(place)
                room[fits] -= lengths[place]
        rows += opened
    return rows


def collate(
    rows: Sequence[TokenRow],
    pad_id: int,
    row_ids: Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
    rounded: bool = False,
) -> TokenBatch:
    """Pads on the right to the longest row, ``rounded`` to the next ``padded_size``. B rows, T tokens.

    ``row_ids`` are the rows' places in the data set (default -1). ``sizes``: how many of ``rows``, in their order, share
    each row of the batch, as documents that do not see each other; None = one each. No rows at all make a batch of one
    row of two unsupervised tokens with row id -1: a process without work still takes part in every forward.
    """
    if row_ids is not None and len(row_ids) != len(rows):
        raise ValueError(f"row_ids: one for each row is needed, got {len(row_ids)} for {len(rows)} rows")
    if sizes is not None and sum(sizes) != len(rows):
        raise ValueError(f"sizes: must add up to the {len(rows)} rows, got {list(sizes)}")
    ids = list(row_ids) if row_ids is not None and rows else [-1] * max(len(rows), 1)
    rows = rows or [TokenRow([pad_id] * _IDLE_TOKENS, [False] * _IDLE_TOKENS)]
    counts = sizes or [1] * len(rows)
    documents = iter(zip(rows, ids, strict=True))
    packed = [list(islice(documents, count)) for count in counts]
    T = max(sum(len(row.input_ids) for row, _ in line) for line in packed)
    T = padded_size(T) if rounded else T
    shape = (len(packed), T)
    input_ids = torch.full(shape, pad_id)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    position_ids = torch.arange(T).repeat(len(packed), 1)
    document_ids = torch.full(shape, -1)
    places = torch.full((len(packed), max(counts)), -1)
    for b, line in enumerate(packed):
        start = 0
        for d, (row, place) in enumerate(line):
            stop = start + len(row.input_ids)
            input_ids[b, start:stop] = torch.tensor(row.input_ids)
            loss_mask[b, start:stop] = torch.tensor(row.loss_mask)
            position_ids[b, start:] = torch.arange(T - start)
            document_ids[b, start:stop] = d
            places[b, d] = place
            start = stop
    return TokenBatch(
        input_ids=input_ids,
        attention_mask=document_ids >= 0,
        loss_mask=loss_mask,
        position_ids=position_ids,
        document_ids=document_ids,
        row_ids=places[:, 0].contiguous() if max(counts) == 1 else places,
    )
