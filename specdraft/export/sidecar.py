"""specdraft.json beside an engine's files: what their layout has no place for, so that an import gives the same head."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import specdraft
from specdraft.core.errors import CheckpointError
from specdraft.export.card import portable
from specdraft.export.eagle_layout import fold, folded_scale
from specdraft.export.material import Material
from specdraft.export.registry import Format

SIDECAR = "specdraft.json"


def sidecar(material: Material, format: Format, files: list[str]) -> dict[str, Any]:
    """The record of one export. ``files``: all of its names, by which a later export knows what it may replace."""
    found: dict[str, Any] = {
        "specdraft": specdraft.__version__,
        "format": format.name,
        "kind": material.kind,
        "head": dict(material.settings),
        "target": portable(material.record["target"]),
        "weights": material.weights_sha256,
        "files": sorted(files),
    }
    if format.widens and material.head.vocab is not None:
        found["draft_vocab"] = _pack(np.packbits(material.tensors["vocab.t2d"].numpy()))
    if format.rounds and "embedding_scale" in material.tensors:
        scale = folded_scale(material)
        columns = material.tensors["fc.weight"][:, : material.spec.hidden_size].contiguous()
        ulps = _bits(columns) - _bits(_unfolded(fold(columns, scale), scale))
        found["embedding_columns"] = {
            "scale": scale,
            "own_scale": float(material.tensors["embedding_scale"]),
            "ulps": _pack(ulps.numpy().astype("<i4")),
        }
    return found


def read_sidecar(folder: Path) -> dict[str, Any] | None:
    """The record in ``folder``; None where there is none of ours.

    Raises:
        CheckpointError: torn.
    """
    path = folder / SIDECAR
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"source: {SIDECAR} cannot be read, got {folder} ({error}); export the head again"
        ) from error
    return (
        found if isinstance(found, dict) and {"specdraft", "format", "kind", "head", "target"} <= set(found) else None
    )


def draft_mask(record: Mapping[str, Any], vocab_size: int) -> Tensor | None:
    """``[V]`` bool: the draft vocabulary that an engine's layout had no place for; None where there is none."""
    if "draft_vocab" not in record:
        return None
    bits = np.unpackbits(np.frombuffer(_unpack(record["draft_vocab"]), np.uint8), count=vocab_size)
    return torch.from_numpy(bits.astype(bool))


def unfold(columns: Tensor, record: Mapping[str, Any]) -> tuple[Tensor, float]:
    """The fusion's columns before the embedding's factor was taken into them, to the last bit, and the head's factor."""
    kept = record["embedding_columns"]
    ulps = torch.from_numpy(np.frombuffer(_unpack(kept["ulps"]), "<i4").copy()).view(columns.shape)
    near = _unfolded(columns, kept["scale"])
    size = {4: torch.int32, 2: torch.int16}[columns.element_size()]
    return (near.view(size) + ulps.to(size)).view(columns.dtype), kept["own_scale"]


def _unfolded(columns: Tensor, scale: float) -> Tensor:
    """The quotient, which differs from what was folded by a unit in the last place here and there."""
    return (columns.double() / scale).to(columns.dtype).contiguous()


def _bits(values: Tensor) -> Tensor:
    """The values' bits as int32."""
    return values.view({4: torch.int32, 2: torch.int16}[values.element_size()]).int()


def _pack(values: Any) -> str:
    return base64.b64encode(zlib.compress(values.tobytes())).decode()


def _unpack(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))
