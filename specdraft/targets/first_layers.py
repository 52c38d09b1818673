"""A target cut to its first layers: the cheapest draft model there is, since it shares every weight with the whole."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from specdraft.core.errors import ConfigError
from specdraft.targets.fast_path import FastDecoder, FastLayers
from specdraft.targets.hf import HFTarget
from specdraft.targets.layout import Layout
from specdraft.targets.packing import PackedLinears


def first_layers(target: HFTarget, num_layers: int) -> HFTarget:
    """A target of the first ``num_layers`` layers of ``target``, its final norm and its lm_head.

    Weights, packed ones included, are the same tensors; layers that are left out stay in memory only as long as
    ``target`` does. Packing ``target`` later is not seen here: pack it before.

    Raises:
        ConfigError: ``target`` does not have so many layers.
    """
    whole = target.layout
    if not 1 <= num_layers <= len(whole.layers):
        raise ConfigError(f"proposer.layers: the model has {len(whole.layers)}, got {num_layers}; use fewer")
    decoder, layers = _cut(whole.decoder, whole.layers, num_layers)
    kinds = whole.layer_types[:num_layers]
    layout = replace(
        whole,
        decoder=decoder,
        layers=layers,
        layer_types=kinds,
        sliding_window=whole.sliding_window if "sliding_attention" in kinds else None,
    )
    spec = replace(target.spec, name=f"{target.spec.name}, first {num_layers} layers", num_hidden_layers=num_layers)
    draft = HFTarget(cast(PreTrainedModel, decoder), layout, spec, target.tokenizer)
    draft.fast_layers = _fast_layers(target, layout)
    # Nothing of its own to pack: the layers are those of the target.
    draft.packed = PackedLinears([])
    return draft


def _cut(decoder: nn.Module, layers: nn.ModuleList, num_layers: int) -> tuple[nn.Module, nn.ModuleList]:
    """A copy of ``decoder`` that shares its modules and loops over the first ``num_layers`` only, and these."""
    config: Any = copy.deepcopy(decoder.config)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    kept = nn.ModuleList(list(layers)[:num_layers])
    modules = {name: kept if module is layers else module for name, module in decoder._modules.items()}
    cut = copy.copy(decoder)
    cut.__dict__["config"], cut.__dict__["_modules"] = config, modules
    # What accelerate puts in its place would run the whole decoder; the modules inside keep theirs.
    cut.__dict__.pop("forward", None)
    return cut, kept


def _fast_layers(target: HFTarget, layout: Layout) -> FastLayers | None:
    """The target's replaced layers over its first ones; None where it runs them in the model's own way."""
    if target.fast_layers is None or target.fast_layers.decoder is None:
        return None
    kept = [layer for layer, _ in target.fast_layers.decoder.layers[: len(layout.layers)]]
    return FastLayers([], FastDecoder(layout, kept))
