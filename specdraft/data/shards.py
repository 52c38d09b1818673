"""Arrow files of one record batch each: written whole or not at all, read through memory maps."""

from __future__ import annotations

import json
import mmap
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from numpy.typing import NDArray

from specdraft.core.errors import DataError
from specdraft.core.files import replacing
from specdraft.data.chat import TokenRow

_METADATA = b"specdraft"
_TOKENS = pa.schema([("input_ids", pa.large_list(pa.int32())), ("loss_mask", pa.large_list(pa.bool_()))])


def write_batch(path: Path, batch: Any, metadata: Mapping[str, Any]) -> None:
    """Writes a record batch with ``metadata`` as the stream that ``datasets.Dataset.from_file`` opens.

    Raises:
        OSError: it cannot be written (disk full, no permission); ``path`` is as it was.
    """
    batch = batch.replace_schema_metadata({_METADATA: json.dumps(metadata).encode()})
    with replacing(path) as file, pa.ipc.new_stream(file, batch.schema) as stream:
        stream.write_batch(batch)


class MappedBatch:
    """A file of ``write_batch``: its columns are views of the file, and its pages are read when they are used.

    Raises:
        DataError: the file is missing or torn.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            reader = pa.ipc.open_stream(pa.py_buffer(self._map))
            self.batch = reader.read_next_batch()
            self.metadata: dict[str, Any] = json.loads(reader.schema.metadata[_METADATA])
        except (OSError, ValueError, KeyError, TypeError, StopIteration, pa.ArrowException) as error:
            raise DataError(
                f"data.cache_dir: not a whole file of prepared data, got {path} ({error}); remove its folder and prepare "
                "the data again"
            ) from error

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    def release(self) -> None:
        """Gives back the memory of the pages that were read; the columns stay usable."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


class TokenRows:
    """Rows on their way to a shard, in 5 bytes a token: Python's lists would take nine times as much."""

    def __init__(self, rows: Iterable[TokenRow] = ()) -> None:
        self.lengths = array("q")
        self.num_supervised = 0
        self._ids = array("i")
        self._mask = bytearray()
        for row in rows:
            self.add(row)

    def add(self, row: TokenRow) -> None:
        """Adds one."""
        self.lengths.append(len(row.input_ids))
        self.num_supervised += sum(row.loss_mask)
        self._ids.extend(row.input_ids)
        self._mask.extend(row.loss_mask)

    def batch(self) -> Any:
        """All of them as a record batch: ``input_ids`` int32 and ``loss_mask`` bool, a list each for every row."""
        offsets = np.zeros(len(self.lengths) + 1, dtype=np.int64)
        np.cumsum(self.lengths, out=offsets[1:])
        values = np.asarray(self._ids, dtype=np.int32), np.frombuffer(self._mask, dtype=np.bool_)
        columns = [pa.LargeListArray.from_arrays(offsets, pa.array(column)) for column in values]
        return pa.RecordBatch.from_arrays(columns, schema=_TOKENS)


class TokenShard(MappedBatch):
    """R rows of N tokens in all. offsets: ``[R+1]`` int64, row i is ``offsets[i]:offsets[i+1]``. ids: ``[N]`` int32.

    Raises:
        DataError: the file is missing, torn, or holds something else.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if not self.batch.schema.equals(_TOKENS, check_metadata=False):
            raise DataError(
                f"data.cache_dir: holds no token rows, got {path}; remove its folder and prepare the data again"
            )
        ids, mask = self.batch.columns
        self.offsets: NDArray[np.int64] = _view(ids.buffers()[1], np.int64)[: len(self) + 1]
        count = int(self.offsets[-1]) if len(self) else 0
        self.ids: NDArray[np.int32] = _view(ids.values.buffers()[1], np.int32)[:count]
        self._bits: NDArray[np.uint8] = _view(mask.values.buffers()[1], np.uint8)

    def mask(self, start: int, stop: int) -> NDArray[np.bool_]:
        """``[stop - start]`` bool, True = supervised; tokens by their place in the shard."""
        first = start // 8
        bits = np.unpackbits(self._bits[first : -(-stop // 8)], bitorder="little")
        return bits[start - 8 * first : stop - 8 * first].astype(np.bool_)

    def row(self, index: int) -> TokenRow:
        """One row."""
        start, stop = self.offsets[index : index + 2].tolist()
        return TokenRow(self.ids[start:stop].tolist(), self.mask(start, stop).tolist())


def _view(buffer: Any, dtype: type[np.generic]) -> NDArray[Any]:
    """The whole items in an Arrow buffer, which may be absent."""
    if buffer is None:
        return np.empty(0, dtype=dtype)
    return np.frombuffer(buffer, dtype=dtype, count=buffer.size // np.dtype(dtype).itemsize)
