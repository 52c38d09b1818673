"""Safetensors files written from tensors as they lie in memory or on disk, without a second copy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Dtypes of heads and targets -> their names in the file."""
CHUNK_ROWS = 4096


@dataclass(frozen=True)
class Pieces:
    """A tensor that never is in memory as a whole. pieces: gives its rows in order."""

    shape: Sequence[int]
    dtype: torch.dtype
    pieces: Callable[[], Iterator[Tensor]]

    def numel(self) -> int:
        """Of the whole."""
        return torch.Size(self.shape).numel()

    def element_size(self) -> int:
        """Bytes of one value."""
        return self.dtype.itemsize


def write_safetensors(path: Path, tensors: Mapping[str, Tensor | Pieces]) -> None:
    """Writes ``tensors`` to ``path`` in the safetensors layout, one after another.

    Raises:
        OSError: the file cannot be written.
    """
    # Wide types first, so that every tensor is aligned to its own size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        tensor = tensors[name]
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in order:
            for part in _parts(tensors[name]):
                file.write(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _parts(tensor: Tensor | Pieces) -> Iterator[Tensor]:
    """Some rows at a time."""
    if isinstance(tensor, Pieces):
        yield from tensor.pieces()
        return
    rows = tensor.detach()
    yield from (rows.reshape(1) if rows.dim() == 0 else rows).split(CHUNK_ROWS)


def file_pieces(path: Path, name: str) -> Iterator[Tensor]:
    """The rows of a tensor in a file, some at a time; the file is opened anew for each, so that no page of it is kept."""
    start, count = 0, 1
    while start < count:
        with safe_open(path, framework="pt") as file:
            rows = file.get_slice(name)
            count = rows.get_shape()[0]
            yield rows[start : start + CHUNK_ROWS]
        start += CHUNK_ROWS


def all_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite; looks at some rows at a time, since the check makes copies."""
    if not tensor.is_floating_point() or tensor.dim() == 0:
        return bool(tensor.isfinite().all())
    return all(bool(part.isfinite().all()) for part in tensor.split(CHUNK_ROWS))
