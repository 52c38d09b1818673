"""Conversations on disk between reading and rendering: any number of them, a few of which are in memory."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from numpy.typing import NDArray

from specdraft.data.shards import MappedBatch, write_batch
from specdraft.data.sources import Conversation

FILE_ROWS = 32768
"""Conversations of a file at most."""
FILE_CHARACTERS = 1 << 26
"""Characters after which a file is ended before it has so many."""
GROUP_ROWS = 8192
"""Conversations that are rendered into one shard, which is what a run that goes on may have to do again."""
GROUP_CHARACTERS = 1 << 26
RELEASE_READS = 4096
"""Reads after which the memory of the pages read is given back."""
_SCHEMA = pa.schema([("id", pa.large_string()), ("category", pa.large_string()), ("messages", pa.large_string())])


class StoreWriter:
    """Writes conversations to ``folder``, file after file, in the order in which they come."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_files = 0
        self.num_conversations = 0
        self._columns: tuple[list[str], list[str], list[str]] = ([], [], [])
        self._characters = 0

    def add(self, conversation: Conversation) -> None:
        """Adds one.

        Raises:
            OSError: a file cannot be written.
        """
        # Messages as JSON: what differs between data sets never meets in one Arrow type.
        text = json.dumps(conversation.messages, ensure_ascii=False)
        own, category = (value.encode(errors="replace").decode() for value in (conversation.id, conversation.category))
        for column, value in zip(self._columns, (own, category, text), strict=True):
            column.append(value)
        self._characters += len(text)
        self.num_conversations += 1
        if len(self._columns[0]) >= FILE_ROWS or self._characters >= FILE_CHARACTERS:
            self.flush()

    def flush(self) -> None:
        """Writes what is not on the disk yet."""
        if not self._columns[0]:
            return
        arrays = [pa.array(column, type=pa.large_string()) for column in self._columns]
        batch = pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)
        write_batch(_path(self.folder, self.num_files), batch, {"conversations": len(arrays[0])})
        self.num_files += 1
        self._columns = ([], [], [])
        self._characters = 0


class ConversationStore(Sequence[Conversation]):
    """The conversations of a folder, or those at ``places`` among them, in that order."""

    def __init__(self, folder: Path, num_files: int, places: NDArray[np.int64] | None = None) -> None:
        self.folder, self.num_files = folder, num_files
        self._files = [MappedBatch(_path(folder, number)) for number in range(num_files)]
        self._ends = list(accumulate(map(len, self._files)))
        self.places = np.arange(self._ends[-1] if self._ends else 0) if places is None else places
        self._reads = 0

    def subset(self, chosen: NDArray[np.int64]) -> ConversationStore:
        """Those at ``chosen`` of this one's."""
        return ConversationStore(self.folder, self.num_files, self.places[chosen])

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> Conversation: ...

    @overload
    def __getitem__(self, index: slice) -> list[Conversation]: ...

    def __getitem__(self, index: int | slice) -> Conversation | list[Conversation]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        columns, row = self._find(int(self.places[index]))
        own, category, text = (columns.column(i)[row].as_py() for i in range(3))
        self._reads += 1
        if self._reads % RELEASE_READS == 0:
            for file in self._files:
                file.release()
        return Conversation(own, category, json.loads(text))

    def __iter__(self) -> Iterator[Conversation]:
        return (self[i] for i in range(len(self)))

    def groups(self, max_rows: int | None = None, max_characters: int | None = None) -> list[tuple[int, int]]:
        """Consecutive parts ``(start, stop)`` of so many conversations and characters at most, for a shard each."""
        max_rows, max_characters = max_rows or GROUP_ROWS, max_characters or GROUP_CHARACTERS
        sizes = np.concatenate([np.diff(_offsets(file)) for file in self._files])[self.places]
        groups, start, characters = [], 0, 0
        for place, size in enumerate(sizes.tolist()):
            if place > start and (place - start >= max_rows or characters + size > max_characters):
                groups.append((start, place))
                start, characters = place, 0
            characters += size
        return [*groups, (start, len(sizes))] if len(sizes) else []

    def _find(self, place: int) -> tuple[Any, int]:
        number = bisect_right(self._ends, place)
        return self._files[number].batch, place - (self._ends[number - 1] if number else 0)


def _path(folder: Path, number: int) -> Path:
    return folder / f"conversations-{number:05d}.arrow"


def _offsets(file: MappedBatch) -> NDArray[np.int64]:
    """Where the messages of each conversation start, in bytes."""
    offsets: NDArray[np.int64] = np.frombuffer(file.batch.column(2).buffers()[1], dtype=np.int64)[: len(file) + 1]
    return offsets
