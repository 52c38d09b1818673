"""A published head as files: its config and its tensors, found in a folder or on the Hub, never unpickled."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdraft.core.errors import CheckpointError
from specdraft.export.formats.gguf import FILE as GGUF
from specdraft.export.formats.gguf import read_draft
from specdraft.export.formats.sglang_eagle import HOT_TOKENS
from specdraft.export.sidecar import read_sidecar
from specdraft.export.tensors import all_finite

PATTERNS = ["*.json", "*.safetensors", "*.bin", "*.pt", "*.gguf"]
PICKLED = ("*.bin", "*.pt")


@dataclass
class Checkpoint:
    """config: of config.json. tensors: by name, mapped from disk. record: our own specdraft.json, if it is an export of ours.

    hot_tokens: ``[D]``, the draft vocabulary of an EAGLE-1 head for SGLang.
    """

    source: str
    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    record: dict[str, Any] | None
    hot_tokens: Tensor | None

    def error(self, what: str, advice: str = "it cannot be imported") -> CheckpointError:
        """The error about this checkpoint; the caller raises it."""
        return CheckpointError(f"source: {what}, got {self.source}; {advice}")


def open_checkpoint(source: str, revision: str | None = None) -> Checkpoint:
    """The checkpoint in a folder or Hub repository.

    Raises:
        CheckpointError: not there, no head, torn, or its pickles hold more than tensors.
    """
    folder = _locate(source, revision)
    if (folder / GGUF).is_file() and not (folder / "config.json").exists():
        try:
            config, drafted = read_draft(folder / GGUF)
        except (OSError, ValueError, KeyError, IndexError, RuntimeError, struct.error) as error:
            raise CheckpointError(f"source: {GGUF} cannot be read, got {source} ({error}); fetch it again") from error
        _check_finite(drafted, source)
        return Checkpoint(source, folder, config, drafted, read_sidecar(folder), None)
    try:
        config = json.loads((folder / "config.json").read_text())
    except OSError as error:
        raise CheckpointError(f"source: holds no config.json, got {source}; give the folder of a head") from error
    except ValueError as error:
        raise CheckpointError(f"source: config.json is not JSON, got {source} ({error}); fetch it again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"source: config.json is no object, got {source}; fetch it again")
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(folder, source):
        tensors.update(_read(path, source))
    _check_finite(tensors, source)
    hot = folder / HOT_TOKENS
    hot_tokens = next(iter(_read(hot, source).values())) if hot.is_file() else None
    return Checkpoint(source, folder, config, tensors, read_sidecar(folder), hot_tokens)


def _check_finite(tensors: Mapping[str, Tensor], source: str) -> None:
    """Raises CheckpointError for a tensor with a value that is no number."""
    for name, tensor in tensors.items():
        if not all_finite(tensor):
            raise CheckpointError(f"source: tensor {name} holds NaN or infinity, got {source}; use another checkpoint")


def _locate(source: str, revision: str | None) -> Path:
    """The local folder; a Hub repository is fetched, its weights and JSON only."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or source.count("/") != 1 or source.startswith((".", "/", "~")):
        raise CheckpointError(f"source: no such folder, got {source}; give the folder of a head or a Hub id")
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"source: neither a folder nor a reachable Hub id, got {source} ({reason}); check the name and the network"
        ) from error


def _weight_files(folder: Path, source: str) -> list[Path]:
    """The files with weights: safetensors where there are some, else pickles."""
    found = sorted(folder.glob("*.safetensors"))
    for pattern in PICKLED:
        found = found or sorted(path for path in folder.glob(pattern) if path.name != HOT_TOKENS)
    if not found:
        raise CheckpointError(f"source: holds no weights, got {source}; give the folder of a head")
    return found


def _read(path: Path, source: str) -> dict[str, Tensor]:
    """The tensors of one file.

    Raises:
        CheckpointError: torn, or a pickle of anything but tensors.
    """
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in list(file.keys())}
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"source: {path.name} holds more than tensors, which is never unpickled, got {source}; convert it to safetensors"
        ) from error
    except (OSError, SafetensorError, RuntimeError, EOFError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise CheckpointError(f"source: {path.name} cannot be read, got {source} ({reason}); fetch it again") from error
    if isinstance(loaded, Tensor):
        return {"": loaded}
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise CheckpointError(f"source: {path.name} is no set of tensors, got {source}; give the folder of a head")
    return loaded
