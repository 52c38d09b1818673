"""decode.json: the shape that was tuned for a head on a machine, and whether it applies here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdraft.core.errors import CheckpointError, ConfigError
from specdraft.data.sources import file_sha256
from specdraft.decode._config import DecodeConfig
from specdraft.eval.environment import cpu_name
from specdraft.heads.storage import WEIGHTS_NAME

TUNED_NAME = "decode.json"
SCHEMA = 1


@dataclass(frozen=True)
class TunedShape:
    """What decode.json says to a run: its settings, whether plain decoding was the fastest, and a line for the user."""

    decode: DecodeConfig
    plain: bool
    note: str | None


def machine(device: torch.device, dtype: torch.dtype, head_dtype: torch.dtype) -> dict[str, Any]:
    """What a shape is tuned for besides the head: runs that differ here may want different shapes.

    dtype: the target's.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return {
        "device": device.type,
        "processor": name,
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "head_dtype": str(head_dtype).removeprefix("torch."),
    }


def with_tuned_shape(
    folder: Path, decode: DecodeConfig, here: Mapping[str, Any], needs_chain: bool = False
) -> TunedShape:
    """``decode`` with the shape of the folder's decode.json, where the user gave none and it was tuned for ``here``.

    ``here``: what ``machine`` gives. needs_chain: a tree is not taken, since the verifier of the run cannot use one.

    Raises:
        CheckpointError: decode.json is torn or not of this format.
    """
    path = folder / TUNED_NAME
    if decode.has_shape or not path.is_file():
        return TunedShape(decode, False, None)
    tuned = read_tuned(path)
    here = {**here, "head_sha256": file_sha256(folder / WEIGHTS_NAME)}
    there = {**tuned["machine"], "head_sha256": tuned["head"]["sha256"]}
    for key, value in here.items():
        if there.get(key) != value:
            what = "another head" if key == "head_sha256" else f"{key} {there.get(key)}, not {value}"
            return TunedShape(decode, False, f"{TUNED_NAME}: not used, it was tuned for {what}; run specdraft tune")
    shape = tuned["shape"]
    if shape["plain"]:
        note = f"{TUNED_NAME}: plain decoding is the fastest here (best draft {_best_draft(tuned)})"
        return TunedShape(decode, True, note)
    if needs_chain and shape["tree"]:
        return TunedShape(decode, False, f"{TUNED_NAME}: not used, it holds a tree and the verifier takes a chain")
    try:
        settings = {name: getattr(decode, name) for name in type(decode).__dataclass_fields__}
        chosen = DecodeConfig(**{**settings, "num_draft_tokens": shape["num_draft_tokens"], "tree": shape["tree"]})
    except ConfigError as error:
        raise CheckpointError(f"head: {TUNED_NAME} holds no shape, got {path} ({error}); tune again") from error
    kind = f"a tree of {len(shape['tree'])} nodes" if shape["tree"] else f"a chain of {shape['num_draft_tokens']}"
    speedup = tuned["measured"]["speedup"]
    return TunedShape(chosen, False, f"{TUNED_NAME}: {kind}, tuned for this machine ({speedup:.2f}x plain decoding)")


def read_tuned(path: Path) -> dict[str, Any]:
    """decode.json with its format checked.

    Raises:
        CheckpointError: it cannot be read or is of another format.
    """
    needed = {
        "shape": ("plain", "num_draft_tokens", "tree"),
        "machine": (),
        "head": ("sha256",),
        "measured": ("speedup",),
    }
    try:
        tuned = json.loads(path.read_text(encoding="utf-8"))
        known = tuned["schema"] == SCHEMA and all(set(keys) <= set(tuned[part]) for part, keys in needed.items())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"head: {TUNED_NAME} cannot be read, got {path} ({error}); delete it or tune again"
        ) from error
    if not known:
        raise CheckpointError(f"head: {TUNED_NAME} is not of schema {SCHEMA}, got {path}; delete it or tune again")
    result: dict[str, Any] = tuned
    return result


def _best_draft(tuned: Mapping[str, Any]) -> str:
    """The best measured draft against plain decoding, as a ratio."""
    plain = max((run["tokens_per_s"] for run in tuned["verified"] if run["plain"]), default=0.0)
    drafts = [run["tokens_per_s"] for run in tuned["verified"] if not run["plain"]]
    return f"{max(drafts) / plain:.2f}x" if drafts and plain else "not measured"
