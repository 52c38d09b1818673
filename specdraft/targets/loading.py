"""From the target's settings to a transformers model and tokenizer, with one clear line for whatever goes wrong."""

from __future__ import annotations

import logging
import os
import pickle
import re
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from specdraft.core.errors import CheckpointError, ConfigError, SpecDraftError, UnsupportedTargetError
from specdraft.targets._config import TargetConfig
from specdraft.targets.layout import check_class, check_config, needs_eager, refuse
from specdraft.targets.placement import placement
from specdraft.targets.smollm2 import ensure_smollm2

logger = logging.getLogger(__name__)

LOAD_ERRORS = (
    OSError,
    EOFError,
    RuntimeError,
    AssertionError,
    SafetensorError,
    pickle.UnpicklingError,
    KeyError,
    ValueError,
    ImportError,
)
"""What transformers, torch and accelerate raise for weights and devices that cannot be used."""


def resolve_device(name: str) -> torch.device:
    """The device of ``target.device``; ``auto`` takes this process's own accelerator, else the CPU.

    Raises:
        ConfigError: no such device on this machine.
    """
    if name == "auto":
        if not torch.cuda.is_available():
            return torch.device("cpu")
        # Launchers that start one process a device number them here.
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    try:
        device = torch.device(name)
        # Whether the device exists shows only when something is put there.
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"target.device: not usable here, got {name!r}; use auto or cpu") from error
    return device


def resolve_source(config: TargetConfig) -> str:
    """Folder or Hub id to load from; fetches the embedded target on its first use.

    Raises:
        ConfigError: a folder that does not exist, or the embedded target cannot be fetched.
    """
    name = config.name
    if name == "smollm2":
        return str(ensure_smollm2())
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    if path.exists():
        raise ConfigError(f"target.name: a file, not a folder, got {name!r}; give the folder that holds config.json")
    if name.startswith((".", "~")) or path.is_absolute() or name.count("/") > 1:
        raise ConfigError(f"target.name: no such folder, got {name!r}; check the path")
    return name


def load_config(config: TargetConfig, source: str) -> PretrainedConfig:
    """The model's config, checked before any weights are read.

    Raises:
        ConfigError: no such model, or its code may not be run.
        UnsupportedTargetError: transformers does not know it as a causal LM, or it is of a refused kind.
    """
    try:
        model_config: PretrainedConfig = AutoConfig.from_pretrained(
            source, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _config_error(config, source, error) from error
    # A model with its own code brings its own class, which is checked once loaded.
    if "AutoModelForCausalLM" not in (getattr(model_config, "auto_map", None) or {}):
        check_config(model_config)
        try:
            model_class = cast(type[Any], MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)])
        except KeyError as error:
            raise refuse(model_config.model_type, "transformers has no causal LM (with an lm_head) for it") from error
        check_class(model_class, model_config.model_type)
    return model_config


def load_model(
    config: TargetConfig, source: str, model_config: PretrainedConfig, device: torch.device
) -> PreTrainedModel:
    """The causal LM of ``config`` on ``device``, complete.

    Raises:
        ConfigError: the model does not fit the device, or has no such attention kernel.
        CheckpointError: the weights are missing, torn, or do not fit the config.
        UnsupportedTargetError: transformers cannot build it as a causal LM.
    """
    attention = config.attn_implementation
    if attention == "sdpa" and needs_eager(model_config):
        logger.warning("%s soft-caps its attention scores, which sdpa cannot: using eager attention", config.name)
        attention = "eager"
    options = placement(config, device)
    read = cast(Any, AutoModelForCausalLM.from_pretrained)
    try:
        model, info = read(
            source,
            revision=config.revision,
            dtype=getattr(torch, config.dtype),
            attn_implementation=attention,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            **options,
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"target.device: {config.name} does not fit, got {device}; use another device or dtype"
        ) from error
    except LOAD_ERRORS as error:
        raise _load_error(config, source, error) from error
    absent = sorted({*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])})
    if absent:
        # transformers fills these with random numbers and goes on.
        raise _weights_error(config, source, f"{len(absent)} weights missing or of another shape, first {absent[0]}")
    return cast(PreTrainedModel, model)


def load_tokenizer(config: TargetConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of the target.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    source = resolve_source(config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        if not Path(source).is_dir():
            raise _config_error(config, source, error) from error
        raise _tokenizer_error(config, _first_line(error)) from error
    if not len(tokenizer) or not tokenizer("a").input_ids:
        # Without tokenizer files some classes start empty instead of failing.
        raise _tokenizer_error(config, "its vocabulary is empty")
    return tokenizer


def _tokenizer_error(config: TargetConfig, reason: str) -> ConfigError:
    return ConfigError(
        f"target.name: the tokenizer cannot be loaded ({reason}), got {config.name!r}; "
        "put tokenizer.json and tokenizer_config.json beside config.json"
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:160].rstrip(".;:, ")


def _config_error(config: TargetConfig, source: str, error: Exception) -> SpecDraftError:
    """What to tell the user when the config could not be had."""
    text, reason, name = str(error), _first_line(error), config.name
    if "trust_remote_code" in text:
        return ConfigError(
            f"target.trust_remote_code: {name} comes with its own code, got false; read that code, then set true"
        )
    if "does not recognize this architecture" in text:
        return UnsupportedTargetError(
            f"target.name: transformers {transformers.__version__} does not know the architecture, got {name!r}; "
            "upgrade transformers or use another target"
        )
    if not Path(source).is_dir():
        return ConfigError(
            f"target.name: neither a folder nor a model in the Hub's cache or reach ({reason}), got {name!r}; "
            "check the id, target.revision, the network and your access"
        )
    if not (Path(source) / "config.json").is_file():
        return ConfigError(f"target.name: the folder holds no config.json, got {name!r}; give a model's folder")
    return CheckpointError(f"target.name: config.json cannot be read ({reason}), got {name!r}; fetch the model again")


def _load_error(config: TargetConfig, source: str, error: Exception) -> SpecDraftError:
    """What to tell the user when the model could not be built."""
    text, reason = str(error), _first_line(error)
    if config.device_map is not None and re.search("device|offload|cuda", text, re.IGNORECASE):
        return ConfigError(
            f"target.device_map: not usable here ({reason}), got {config.device_map}; name devices of this machine, cpu or disk"
        )
    if not isinstance(error, ValueError | ImportError):
        return _weights_error(config, source, reason)
    if "scaled_dot_product_attention" in text:
        return ConfigError(f"target.attn_implementation: {config.name} has no sdpa attention, got 'sdpa'; use eager")
    return UnsupportedTargetError(f"target.name: {reason}, got {config.name!r}")


def _weights_error(config: TargetConfig, source: str, reason: str) -> SpecDraftError:
    if "out of memory" in reason.lower():
        return ConfigError(f"target.device: {config.name} does not fit ({reason}); use another device or dtype")
    where = "the folder" if Path(source).is_dir() else "the Hub's cache"
    return CheckpointError(
        f"target.name: the weights in {where} cannot be used ({reason}), got {config.name!r}; fetch the model again"
    )
