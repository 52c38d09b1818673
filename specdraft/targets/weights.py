"""A target's files without its model: config, and single tensors by name, mapped from disk rather than loaded."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from specdraft.core.errors import CheckpointError, SpecDraftError
from specdraft.core.types import TargetSpec
from specdraft.targets._config import TargetConfig
from specdraft.targets.hf import eos_token_ids, load_target
from specdraft.targets.layout import find_layout
from specdraft.targets.loading import load_config, load_tokenizer, resolve_source
from specdraft.targets.spec import target_spec

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
OTHER_NAMES = {"lm_head.weight": "embed_out.weight"}
"""Names of transformers 5 -> those in the checkpoints of some families."""


class TargetFiles:
    """What exports and imports may ask of a target that is never loaded.

    Tensors are mapped: only the pages that are touched are read, in the dtype of the checkpoint.
    """

    def __init__(self, name: str, revision: str | None = None) -> None:
        """Reads the config and builds the model without storage.

        Raises:
            ConfigError, CheckpointError, UnsupportedTargetError: no such target, or one of a refused kind.
        """
        self._settings = TargetConfig(name=name, revision=revision)
        self.source = resolve_source(self._settings)
        self.config = load_config(self._settings, self.source)
        with torch.device("meta"):
            self._model = cast(PreTrainedModel, cast(Any, AutoModelForCausalLM).from_config(self.config))
        self.layout = find_layout(self._model)
        self._names: dict[int, list[str]] = {}
        for key, parameter in self._model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(key)
        self._open: dict[str, Any] = {}

    @property
    def name(self) -> str:
        """As the target was asked for."""
        return self._settings.name

    @property
    def revision(self) -> str | None:
        """Commit of a Hub id, where known."""
        return getattr(self.config, "_commit_hash", None) or self._settings.revision

    @cached_property
    def embedding(self) -> Tensor:
        """``[rows, H]``: the embedding table as stored, without any scale."""
        return self._read(self.layout.embedding.get_parameter("weight"))

    @cached_property
    def lm_head(self) -> Tensor:
        """``[V, H]``; the embedding table where the two are tied."""
        return self._read(self.layout.lm_head.get_parameter("weight"))

    def embedding_file(self) -> tuple[Path, str]:
        """The file that holds the embedding table, and its name there: to read it in parts."""
        path, key = self._find(self.layout.embedding.get_parameter("weight"))
        return Path(str(self._file(path))), key

    def tensor(self, name: str) -> Tensor:
        """The stored values of the model's parameter ``name``, as the loaded model would call it."""
        return self._read(self._model.get_parameter(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the model's parameter ``name``; nothing is read."""
        return tuple(self._model.get_parameter(name).shape)

    @property
    def has_lm_head_bias(self) -> bool:
        """Whether logits have a bias."""
        return isinstance(self.layout.lm_head, nn.Linear) and self.layout.lm_head.bias is not None

    @property
    def embedding_scale(self) -> float:
        """What the model multiplies rows of the table by, in its embedding module or behind it."""
        own = getattr(self.layout.embedding, "scalar_embed_scale", None)
        return self.layout.embedding_scale * (1.0 if own is None else float(own))

    def spec(self) -> TargetSpec:
        """The record of the target, the same as that of the loaded model.

        A model whose checkpoint keeps other tensors than the model has (experts that are packed when it loads) is loaded.
        """
        with suppress(OSError):  # many models have none
            self._model.generation_config = GenerationConfig.from_pretrained(
                self.source, revision=self._settings.revision or "main"
            )
        eos = eos_token_ids(self._model, load_tokenizer(self._settings))
        try:
            return target_spec(self._model, self.layout, self.name, self.revision, eos, self._read)
        except CheckpointError:
            settings = replace(self._settings, dtype="bfloat16", device="cpu", pack_weights=False)
            return load_target(settings).spec

    def _read(self, parameter: Tensor) -> Tensor:
        """The stored values of a parameter of the model.

        Raises:
            CheckpointError: not found under any of its names, of another shape, or not readable.
        """
        path, key = self._find(parameter)
        try:
            if path not in self._open:
                self._open[path] = safe_open(self._file(path), framework="pt")
            tensor = cast(Tensor, self._open[path].get_tensor(key))
        except (OSError, SafetensorError) as error:
            raise self._unreadable(f"cannot be read ({error})") from error
        if tensor.shape != parameter.shape:
            raise self._unreadable(f"holds {key} of shape {list(tensor.shape)}, expected {list(parameter.shape)}")
        return tensor

    def _find(self, parameter: Tensor) -> tuple[str, str]:
        """The file that a parameter is in, and its name there.

        Raises:
            CheckpointError: not found under any of its names.
        """
        names = self._names[id(parameter)]
        names = [*names, *(OTHER_NAMES[name] for name in names if name in OTHER_NAMES)]
        key = next((key for name in names if (key := self._key(name)) is not None), None)
        if key is None:
            raise self._unreadable(f"holds no tensor {names[0]}")
        return self._weight_map[key], key

    def _key(self, name: str) -> str | None:
        """The checkpoint's name of a parameter: the same, or the only one that ends alike behind another prefix."""
        keys = self._weight_map
        if name in keys:
            return name
        parts = name.split(".")
        for start in range(1, len(parts) - 1):
            tail = ".".join(parts[start:])
            found = [key for key in keys if key == tail or key.endswith(f".{tail}")]
            if len(found) == 1:
                return found[0]
        return None

    @cached_property
    def _weight_map(self) -> dict[str, str]:
        """Tensor -> file, of the index or of the only file."""
        index = self._file(INDEX, optional=True)
        try:
            if index is not None:
                return cast(dict[str, str], json.loads(Path(index).read_text())["weight_map"])
            with safe_open(self._file(WEIGHTS), framework="pt") as file:
                return dict.fromkeys(file.keys(), WEIGHTS)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise self._unreadable(f"cannot be read ({error})") from error

    def _file(self, name: str, optional: bool = False) -> str | None:
        """The local path of one of the target's files; None where it does not exist and is ``optional``."""
        if Path(self.source).is_dir():
            path = Path(self.source) / name
            if path.is_file():
                return str(path)
        else:
            try:
                return str(hf_hub_download(self.source, name, revision=self._settings.revision))
            except (EntryNotFoundError, LocalEntryNotFoundError):
                pass
            except (HfHubHTTPError, OSError) as error:
                raise self._unreadable(f"cannot be fetched ({error})") from error
        if optional:
            return None
        raise self._unreadable(f"has no {name}")

    def _unreadable(self, reason: str) -> SpecDraftError:
        return CheckpointError(
            f"target.name: the checkpoint {' '.join(reason.split())}, got {self.name!r}; fetch the model again, as "
            "safetensors"
        )
