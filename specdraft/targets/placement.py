"""Where a target's weights lie and in how many bits: several devices through accelerate, bitsandbytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig
from transformers.utils.import_utils import is_bitsandbytes_available

from specdraft.core.errors import ConfigError
from specdraft.targets._config import TargetConfig


def placement(config: TargetConfig, device: torch.device) -> dict[str, Any]:
    """What ``from_pretrained`` is told about devices and bits.

    Raises:
        ConfigError: bitsandbytes is needed and not installed.
    """
    options: dict[str, Any] = {}
    if config.device_map is not None:
        options["device_map"] = config.device_map
    elif device.type != "cpu" or config.quantization != "none":
        options["device_map"] = {"": str(device)}
    if config.quantization != "none":
        options["quantization_config"] = _quantization(config)
    return options


def _quantization(config: TargetConfig) -> BitsAndBytesConfig:
    if not is_bitsandbytes_available():
        raise ConfigError(
            f"target.quantization: needs the package bitsandbytes, got {config.quantization} without it; install it or "
            "use none"
        )
    if config.quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=getattr(torch, config.dtype)
    )


def is_dispatched(model: nn.Module) -> bool:
    """Whether accelerate moves inputs or weights of its modules at each forward.

    Such modules have a ``forward`` of accelerate's, which a layer of ours would take the place of.
    """
    return any(hasattr(module, "_hf_hook") for module in model.modules())


def stored_values(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """A function that gives a parameter's values, also of one that is loaded for each forward only."""
    owners = {id(p): (module, name) for module in model.modules() for name, p in module.named_parameters(recurse=False)}

    def read(parameter: Tensor) -> Tensor:
        if parameter.device.type != "meta":
            return parameter.detach()
        from accelerate.utils import align_module_device

        module, name = owners[id(parameter)]
        with align_module_device(module, torch.device("cpu")):
            return module.get_parameter(name).detach().clone()

    return read
