"""GGUF files of version 3: tensors written one after another, and files read back in less time than the library takes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from torch import Tensor

SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
DTYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.I64: torch.int64,
}
ALIGNMENT = 32


@dataclass(frozen=True)
class Entry:
    """One tensor of a file. make: gives its values, of ``shape`` and ``dtype``, when it is its turn."""

    name: str
    shape: Sequence[int]
    dtype: torch.dtype
    make: Callable[[], Tensor]


def write_gguf(writer: GGUFWriter, entries: Sequence[Entry]) -> None:
    """Writes the values that ``writer`` was given, then the tensors, of which one at a time is in memory.

    Raises:
        OSError: the file cannot be written.
    """
    kinds = {dtype: kind for kind, dtype in DTYPES.items()}
    for entry in entries:
        size = torch.Size(entry.shape).numel() * entry.dtype.itemsize
        writer.add_tensor_info(entry.name, list(entry.shape), np.dtype(np.float32), size, raw_dtype=kinds[entry.dtype])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for entry in entries:
            writer.write_tensor_data(entry.make().to(entry.dtype).contiguous().reshape(-1).view(torch.uint8).numpy())
    finally:
        writer.close()


def interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of queries or keys as llama.cpp rotates them: pairs side by side instead of halves apart."""
    return weight.view(num_heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def halved(weight: Tensor, num_heads: int) -> Tensor:
    """The inverse of ``interleaved``."""
    return weight.view(num_heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def read_gguf(path: Path, *, texts: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Values by key, arrays of texts only with ``texts``, and tensors by name, mapped from disk in the order of torch.

    Raises:
        ValueError, struct.error, KeyError: torn, of another version, or with a kind of tensor that drafts do not have.
    """
    values: dict[str, Any] = {}
    entries: list[tuple[str, list[int], torch.dtype, int]] = []
    with path.open("rb") as file:
        if file.read(4) != b"GGUF" or _unpack(file, "I") != 3:
            raise ValueError(f"{path.name} is no GGUF file of version 3")
        num_tensors, num_values = _unpack(file, "Q"), _unpack(file, "Q")
        for _ in range(num_values):
            key = _text(file)
            values[key] = _value(file, GGUFValueType(_unpack(file, "I")), texts)
        for _ in range(num_tensors):
            name = _text(file)
            shape = [_unpack(file, "Q") for _ in range(_unpack(file, "I"))][::-1]
            kind = GGMLQuantizationType(_unpack(file, "I"))
            entries.append((name, shape, DTYPES[kind], _unpack(file, "Q")))
        start = -(-file.tell() // ALIGNMENT) * ALIGNMENT
    size = path.stat().st_size
    data = torch.from_file(str(path), size=size, dtype=torch.uint8)
    tensors = {}
    for name, shape, dtype, offset in entries:
        count = torch.Size(shape).numel() * dtype.itemsize
        if start + offset + count > size:
            raise ValueError(f"{path.name} is torn")
        tensors[name] = data[start + offset : start + offset + count].view(dtype).view(shape)
    return values, tensors


def _unpack(file: BinaryIO, code: str) -> Any:
    return struct.unpack(f"<{code}", file.read(struct.calcsize(code)))[0]


def _text(file: BinaryIO) -> str:
    return file.read(_unpack(file, "Q")).decode()


def _value(file: BinaryIO, kind: GGUFValueType, texts: bool) -> Any:
    """One value; None for an array of texts that is passed over."""
    if kind is GGUFValueType.STRING:
        return _text(file)
    if kind is not GGUFValueType.ARRAY:
        return _unpack(file, SCALARS[kind])
    inner, count = GGUFValueType(_unpack(file, "I")), _unpack(file, "Q")
    if inner is GGUFValueType.STRING and texts:
        return [_text(file) for _ in range(count)]
    if inner is GGUFValueType.STRING:
        for _ in range(count):
            file.seek(_unpack(file, "Q"), 1)
        return None
    code = SCALARS[inner]
    return list(struct.unpack(f"<{count}{code}", file.read(count * struct.calcsize(code))))
