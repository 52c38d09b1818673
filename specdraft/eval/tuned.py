"""decode.json: the shape that was tuned for a head on a machine, and whether it applies here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdraft.core.errors import CheckpointError, ConfigError
from specdraft.core.files import file_sha256
from specdraft.decode._config import DecodeConfig
from specdraft.eval.environment import cpu_name
from specdraft.eval.shapes import SHAPE_KEYS, describe_json
from specdraft.heads.storage import WEIGHTS_NAME

TUNED_NAME = "decode.json"
SCHEMA = 2


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
    folder: Path, decode: DecodeConfig, here: Mapping[str, Any], needs_chain: bool = False, batch_size: int = 1
) -> TunedShape:
    """``decode`` with the shape of the folder's decode.json, where the user gave none and it was tuned for ``here``.

    ``here``: what ``machine`` gives. needs_chain: a tree is not taken, since the verifier of the run cannot use one.
    batch_size: rows that the run decodes together; a shape tuned for another number is not taken.

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
    own = tuned["batches"].get(str(batch_size))
    if own is None:
        sizes = ", ".join(tuned["batches"])
        note = f"{TUNED_NAME}: not used, it was tuned for batches of {sizes}, not {batch_size}; run specdraft tune"
        return TunedShape(decode, False, note)
    shape = own["shape"]
    if shape["plain"]:
        note = f"{TUNED_NAME}: plain decoding is the fastest here (best draft {_best_draft(own)})"
        return TunedShape(decode, True, note)
    if needs_chain and shape["num_draft_tokens"] is None:
        return TunedShape(decode, False, f"{TUNED_NAME}: not used, it holds a tree and the verifier takes a chain")
    try:
        settings = {name: getattr(decode, name) for name in type(decode).__dataclass_fields__}
        chosen = DecodeConfig(**{**settings, **{name: shape.get(name) for name in SHAPE_KEYS}})
    except ConfigError as error:
        raise CheckpointError(f"head: {TUNED_NAME} holds no shape, got {path} ({error}); tune again") from error
    rows = "" if batch_size == 1 else f" and batches of {batch_size}"
    ratio = f"{own['measured']['speedup']:.2f}x plain decoding"
    note = f"{TUNED_NAME}: {describe_json(shape)}, tuned for this machine{rows} ({ratio})"
    return TunedShape(chosen, False, note)


def with_known_batches(path: Path, result: dict[str, Any]) -> dict[str, Any]:
    """``result``, with the shapes for other batch sizes that the file at ``path`` has for the same head and machine."""
    if not path.is_file():
        return result
    try:
        known = read_tuned(path)
    except CheckpointError:
        return result
    if known["machine"] != result["machine"] or known["head"]["sha256"] != result["head"]["sha256"]:
        return result
    merged = {**known["batches"], **result["batches"]}
    return {**result, "batches": dict(sorted(merged.items(), key=lambda entry: int(entry[0])))}


def read_tuned(path: Path) -> dict[str, Any]:
    """decode.json with its format checked.

    Raises:
        CheckpointError: it cannot be read or is of another format.
    """
    needed = {"shape": ("plain", "num_draft_tokens", "tree"), "measured": ("speedup",)}
    try:
        tuned = json.loads(path.read_text(encoding="utf-8"))
        if tuned["schema"] == 1:
            # One batch size was all there was to a file.
            own = {key: value for key, value in tuned.items() if key not in ("schema", "machine", "head", "target")}
            tuned = {**tuned, "schema": SCHEMA, "batches": {str(tuned.get("batch_size", 1)): own}}
        known = tuned["schema"] == SCHEMA and bool(tuned["machine"]) and bool(tuned["head"]["sha256"])
        for own in tuned["batches"].values() if known else []:
            known = known and all(set(keys) <= set(own[part]) for part, keys in needed.items())
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
