"""A LoRA adapter on the target: trained beside the head through peft, merged into the weights for decoding."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from specdraft.core.errors import CheckpointError, ConfigError
from specdraft.core.types import AdapterWeights
from specdraft.targets._config import AdapterConfig
from specdraft.targets.hf import HFTarget

NAME = "default"
"""Of the adapter, as peft has it."""


def check_peft(config: AdapterConfig) -> None:
    """Raises ConfigError where an adapter is asked for and peft is not installed; nothing is loaded for that."""
    if config.rank is not None and importlib.util.find_spec("peft") is None:
        raise ConfigError(
            f"adapter.rank: needs the package peft, got {config.rank} without it; pip install 'specdraft[lora]', or use null"
        )


class LoraAdapter:
    """``W x + alpha / r * B A x`` in the linear layers of a target's blocks, B = 0 at the start (Hu et al. 2021).

    Building it changes the target in place: with the adapter on, and B still zero, it computes what it did before.
    A, B are float32 whatever the target's dtype.
    """

    def __init__(self, target: HFTarget, config: AdapterConfig) -> None:
        """Puts the adapter into ``target``.

        Raises:
            ConfigError: a name in ``adapter.modules`` that no linear layer of the target's blocks has.
        """
        from peft import LoraConfig, inject_adapter_in_model

        assert config.rank is not None
        self.config = config
        names = _linear_layers(target, config.modules)
        settings: dict[str, Any] = {"r": config.rank, "lora_alpha": config.alpha, "target_modules": names}
        inject_adapter_in_model(LoraConfig(**settings), target.model, NAME)
        self._layers: dict[str, Any] = {name: target.model.get_submodule(name) for name in names}
        for parameter in self.parameters.values():
            parameter.data = parameter.data.float()
        target.model.eval()

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """``<layer>.lora_A.weight`` ``[r, in]`` and ``<layer>.lora_B.weight`` ``[out, r]`` of every layer."""
        return {
            f"{name}.{part}.weight": getattr(layer, part)[NAME].weight
            for name, layer in self._layers.items()
            for part in ("lora_A", "lora_B")
        }

    @property
    def weights(self) -> AdapterWeights:
        """A copy on the host."""
        assert self.config.rank is not None
        tensors = {name: value.detach().cpu().clone() for name, value in self.parameters.items()}
        return AdapterWeights(tensors, self.config.alpha / self.config.rank)

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Copies saved tensors in.

        Raises:
            CheckpointError: names or shapes differ.
        """
        mine = self.parameters
        if {k: v.shape for k, v in mine.items()} != {k: v.shape for k, v in tensors.items()}:
            raise CheckpointError(
                "resume: the adapter in the checkpoint has other layers or another rank; use its settings"
            )
        with torch.no_grad():
            for name, parameter in mine.items():
                parameter.copy_(tensors[name])

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the target is the original."""
        for layer in self._layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)


def _linear_layers(target: HFTarget, wanted: list[str] | None) -> list[str]:
    """Full names of the linear layers in the target's blocks, all or those whose last part is wanted."""
    inside = {id(module) for module in target.layout.layers.modules()}
    found = [
        name for name, module in target.model.named_modules() if id(module) in inside and isinstance(module, nn.Linear)
    ]
    last = sorted({name.rpartition(".")[2] for name in found})
    unknown = sorted(set(wanted or ()) - set(last))
    if unknown or not found:
        raise ConfigError(
            f"adapter.modules: no linear layer of the target's blocks has that name, got {unknown or wanted}; "
            f"use some of {', '.join(last) or 'another target'}"
        )
    return [name for name in found if wanted is None or name.rpartition(".")[2] in wanted]


@torch.no_grad()
def merge(target: HFTarget, adapter: AdapterWeights) -> None:
    """Adds ``scale * B A`` to the target's weights, for good. Its spec stays that of the original.

    Raises:
        CheckpointError: the target lacks a layer, or one has another shape.
        ConfigError: its layers are not plain matrices (quantised, or moved by accelerate).
    """
    layers = sorted({name.rpartition(".lora_")[0] for name in adapter.tensors})
    modules = dict(target.model.named_modules())
    for name in layers:
        layer = modules.get(name)
        a, b = (adapter.tensors[f"{name}.lora_{part}.weight"] for part in "AB")
        if layer is None or not hasattr(layer, "weight"):
            raise CheckpointError(
                f"head: its adapter is for another target, got one without {name}; load its own target"
            )
        weight: Tensor = layer.get_parameter("weight")
        if type(layer) is not nn.Linear or weight.device.type == "meta":
            raise ConfigError(
                f"target: the head's adapter needs plain weights, got {type(layer).__name__}; use target.quantization=none "
                "target.device_map=null"
            )
        if weight.shape != (b.shape[0], a.shape[1]):
            raise CheckpointError(
                f"head: its adapter is for another target, got {name} of shape {list(weight.shape)}; load its own target"
            )
        change = (b.float() @ a.float()).to(weight.device) * adapter.scale
        weight.copy_((weight.float() + change).to(weight.dtype))
    target.adapted = True
