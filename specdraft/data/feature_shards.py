"""One file of a feature store: some rows' hidden states, their table, and checksums of both; mapped when it is read."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from specdraft.core.errors import DataError
from specdraft.core.files import sync
from specdraft.data._quantized import decode, encode

FORMAT = "1"
KINDS = ("last", "aux")
TABLE = ("rows", "keys", "sums", "last_counts", "aux_counts", "last_channel", "aux_channel")
"""What is checked when a shard is opened, where it is there: the table, and the scales that all rows share."""
_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LARGEST_INT64 = (1 << 63) - 1


@dataclass(frozen=True)
class RowStates:
    """What is kept of a row: its place in the data set, the key of its tokens, and states ``[n, H]`` and ``[m, A*H]``."""

    row: int
    key: int
    last: Tensor
    aux: Tensor | None


def row_key(input_ids: ArrayLike, loss_mask: ArrayLike) -> int:
    """A number below 2 ** 63 that tells tokens and mask of a conversation, ``[T]`` each on the host, from others."""
    digest = xxhash.xxh3_64(np.asarray(input_ids).astype(np.int32).tobytes())
    digest.update(np.asarray(loss_mask).astype(np.uint8).tobytes())
    return digest.intdigest() & _LARGEST_INT64


@dataclass(frozen=True)
class ShardContent:
    """What a shard holds. states: the codes of every row by kind, ``[n_i, W]`` each; table: all else by name.

    The table is every other tensor of the file, the scales of states included; ``sums`` are filled in by ``write_shard``.
    """

    states: dict[str, list[Tensor]]
    table: dict[str, Tensor]

    @property
    def num_bytes(self) -> int:
        """What the shard takes, its header estimated from above."""
        tensors = [*self.table.values(), *(codes for parts in self.states.values() for codes in parts)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors) + 2048


def shard_content(rows: Sequence[RowStates], precision: str, hidden_size: int) -> ShardContent:
    """The content of a shard of ``rows``; states that have the dtype of the precision are not copied."""
    counts = [(row.last.shape[0], 0 if row.aux is None else row.aux.shape[0]) for row in rows]
    table = {
        "rows": torch.tensor([row.row for row in rows]),
        "keys": torch.tensor([row.key for row in rows]),
        "sums": torch.zeros(len(rows), dtype=torch.int64),
        "last_counts": torch.tensor([last for last, _ in counts], dtype=torch.int32),
        "aux_counts": torch.tensor([aux for _, aux in counts], dtype=torch.int32),
    }
    states = {"last": [row.last for row in rows], "aux": [row.aux for row in rows if row.aux is not None]}
    found = {}
    for name, parts in states.items():
        if not parts:
            continue
        encoded = encode(parts, precision, hidden_size)
        found[name] = [codes.contiguous() for codes in encoded.codes]
        if encoded.scale is not None and encoded.channel is not None:
            table |= {f"{name}_channel": encoded.channel, f"{name}_scale": encoded.scale}
    return ShardContent(found, table)


def _sum_of(parts: Iterable[Any]) -> int:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest() & _LARGEST_INT64


def _bytes(tensor: Tensor) -> memoryview:
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Checksum of the table: of the tensors that ``TABLE`` names, where they are there."""
    digest = xxhash.xxh3_128()
    for name in TABLE:
        if name in tensors:
            digest.update(f"{name} {list(tensors[name].shape)} {tensors[name].dtype}".encode())
            digest.update(_bytes(tensors[name]))
    return digest.hexdigest()


def _header(content: ShardContent, store: str) -> bytes:
    """The beginning of the safetensors file: lengths, dtypes and places of its tensors, the table's before the states.

    Its length does not depend on what the sums are.
    """
    metadata = {"format": FORMAT, "store": store, "table": _digest(content.table)}
    described: dict[str, Any] = {"__metadata__": metadata}
    shapes = {name: (tensor.dtype, list(tensor.shape)) for name, tensor in content.table.items()}
    for name, parts in content.states.items():
        shapes[name] = (parts[0].dtype, [sum(len(part) for part in parts), parts[0].shape[1]])
    start = 0
    for name, (dtype, shape) in shapes.items():
        stop = start + math.prod(shape) * dtype.itemsize
        described[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_shard(temporary: Path, path: Path, content: ShardContent, store: str) -> None:
    """Writes a shard that appears at ``path`` whole or not at all, and is on the disk when this returns.

    The safetensors library writes whole tensors, which would have to be put together first: here the states of the rows go
    to the file as they lie, each summed while it is in the processor's cache, and the table in front of them comes last.

    store: digest of the identity of its store.

    Raises:
        OSError: it cannot be written; ``temporary`` may be left.
    """
    table = content.table
    sums = [xxhash.xxh3_64() for _ in range(table["rows"].numel())]
    with temporary.open("wb") as file:
        file.seek(len(_header(content, store)) + sum(len(_bytes(tensor)) for tensor in table.values()))
        for name, parts in content.states.items():
            owners = [digest for digest, count in zip(sums, table[f"{name}_counts"].tolist(), strict=True) if count]
            start = 0
            for digest, part in zip(owners, (part for part in parts if len(part)), strict=True):
                codes, stop = _bytes(part), start + len(part)
                digest.update(codes)
                if f"{name}_scale" in table:
                    digest.update(_bytes(table[f"{name}_scale"][start:stop]))
                file.write(codes)
                start = stop
        table["sums"].copy_(torch.tensor([digest.intdigest() & _LARGEST_INT64 for digest in sums]))
        file.seek(0)
        file.write(_header(content, store))
        for tensor in table.values():
            file.write(_bytes(tensor))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync(path.parent)


class Shard:
    """A file of a store, mapped. The table is read and checked at once, rows when they are asked for."""

    def __init__(self, path: Path, store: str) -> None:
        """Raises DataError: no whole file of the format, another store's, or a table that is not what was written."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._tensors, metadata = _mapped(self._map)
            broken = metadata["table"] != _digest(self._tensors)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise shard_error(path, f"cannot be read ({' '.join(str(error).split()) or 'it is empty'})") from error
        if metadata.get("format") != FORMAT or metadata.get("store") != store:
            raise shard_error(path, "belongs to another store")
        if broken:
            raise shard_error(path, "has a table that is not what was written")
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self._layout = {
            name: (tensor.data_ptr() - self._bytes.ctypes.data, tensor.shape[1] * tensor.element_size())
            for name, tensor in self._tensors.items()
            if tensor.dim() == 2
        }
        self.rows: Tensor = self._tensors["rows"].clone()
        counts = torch.stack([self._tensors["last_counts"], self._tensors["aux_counts"]]).long()
        self._ends = torch.cat([counts.new_zeros(2, 1), counts.cumsum(1)], 1).tolist()
        self._keys, self._sums = self._tensors["keys"].tolist(), self._tensors["sums"].tolist()

    def counts(self, slot: int) -> tuple[int, int]:
        """Positions that are stored of the row at ``slot``: of the last hidden state, of the aux layers."""
        last, aux = self._spans(slot)
        return last[1] - last[0], aux[1] - aux[0]

    def key(self, slot: int) -> int:
        """The key of the tokens that the row at ``slot`` was captured from."""
        found: int = self._keys[slot]
        return found

    def _spans(self, slot: int) -> list[tuple[int, int]]:
        return [(ends[slot], ends[slot + 1]) for ends in self._ends]

    def _pieces(self, slot: int) -> dict[str, tuple[int, int]]:
        """Where the codes and scales of a row lie in the file, in the order of its checksum."""
        found = {}
        for name, (start, stop) in zip(KINDS, self._spans(slot), strict=True):
            for key in (name, f"{name}_scale"):
                if key in self._layout and stop > start:
                    first, width = self._layout[key]
                    found[key] = (first + start * width, first + stop * width)
        return found

    def announce(self, slot: int) -> None:
        """Lets the system begin to read the states of the row at ``slot``, where it can be told."""
        if not hasattr(mmap, "MADV_WILLNEED"):
            return
        for first, end in self._pieces(slot).values():
            begin = first // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, begin, end - begin)

    def _is_intact(self, slot: int) -> bool:
        pieces = self._pieces(slot).values()
        return bool(_sum_of(self._bytes[first:end] for first, end in pieces) == self._sums[slot])

    def read(self, slot: int, last: Tensor, aux: Tensor | None) -> None:
        """The states of the row at ``slot`` into ``last`` ``[n, H]`` and ``aux`` ``[m, A*H]``, in their dtype.

        Raises:
            DataError: the row is not what was written.
        """
        pieces = self._pieces(slot)
        if not self._is_intact(slot):
            raise shard_error(self.path, f"holds row {int(self.rows[slot])} otherwise than it was written")
        for name, out, (start, stop) in zip(KINDS, (last, aux), self._spans(slot), strict=True):
            if out is None or stop == start:
                continue
            codes, scale = self._tensors[name], self._tensors.get(f"{name}_scale")
            if scale is None and codes.dtype is out.dtype:
                # A plain copy of bytes: an operation of torch would take longer to begin than this to end.
                first, end = pieces[name]
                np.copyto(out.view(torch.uint8).numpy().reshape(-1), self._bytes[first:end])
            else:
                kept = None if scale is None else scale[start:stop]
                decode(codes[start:stop], kept, self._tensors.get(f"{name}_channel"), out)

    def forget_pages(self) -> None:
        """Gives back the memory of pages that were read; they stay in the system's cache of files."""
        if hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def is_whole(self) -> bool:
        """Whether every row is what was written; reads all of it. The table was checked when the shard was opened."""
        whole = all(self._is_intact(slot) for slot in range(self.rows.numel()))
        self.forget_pages()
        return whole


def _mapped(mapped: mmap.mmap) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors that lie in a mapped safetensors file, and its metadata.

    Raises:
        ValueError, KeyError: it is none, or is cut off.
    """
    size = int.from_bytes(mapped[:8], "little")
    if size > len(mapped) - 8:
        raise ValueError("the file is cut off")
    header: dict[str, Any] = json.loads(mapped[8 : 8 + size])
    metadata: dict[str, str] = header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        start, stop = (8 + size + offset for offset in entry["data_offsets"])
        if stop > len(mapped):
            raise ValueError("the file is cut off")
        dtype = _DTYPES[entry["dtype"]]
        flat = torch.frombuffer(mapped, dtype=torch.uint8, count=stop - start, offset=start)
        tensors[name] = flat.view(dtype).view(entry["shape"])
    return tensors, metadata


def shard_error(path: Path, what: str) -> DataError:
    """The error for a shard that cannot be used."""
    return DataError(
        f"features.dir: {path.name} {what}, got {path.parent}; run specdraft prepare with the same settings, which "
        "captures its rows again"
    )
