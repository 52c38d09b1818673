"""Sizes of a target from its config alone: the model is built without storage, no weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdraft.core.types import TargetSpec
from specdraft.targets._config import TargetConfig
from specdraft.targets.hf import eos_token_ids
from specdraft.targets.layout import find_layout
from specdraft.targets.loading import load_config, resolve_source
from specdraft.targets.spec import target_spec

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTIZED_BYTES = {"int8": 1.0, "int4": 0.53}
"""Of a weight of the layers; int4 with its scales."""


@dataclass(frozen=True)
class TargetSizes:
    """Numbers of parameters.

    spec: without fingerprint. num_parameters: tied ones once. layer_parameters: those of the blocks.
    linear_parameters: those of linear layers, the lm_head included, which are packed on a CPU.
    """

    spec: TargetSpec
    num_parameters: int
    layer_parameters: int
    linear_parameters: int

    @property
    def outer_parameters(self) -> int:
        """Those of embedding, final norm and lm_head."""
        return self.num_parameters - self.layer_parameters

    def weight_bytes(self, config: TargetConfig, device: str) -> float:
        """What the weights take on ``device`` (cpu or cuda) as ``config`` loads them, packed copies included."""
        size = BYTES[config.dtype]
        if config.quantization != "none":
            return self.outer_parameters * size + self.layer_parameters * QUANTIZED_BYTES[config.quantization]
        packed = self.linear_parameters if device == "cpu" and config.pack_weights else 0
        return float((self.num_parameters + packed) * size)

    def step_bytes(self, config: TargetConfig) -> float:
        """What a decoding step reads of the weights: the blocks and the lm_head."""
        size = BYTES[config.dtype]
        layer_size = QUANTIZED_BYTES.get(config.quantization, size)
        return self.layer_parameters * layer_size + self.spec.vocab_size * self.spec.hidden_size * size

    def forward_flops(self, context: float, *, lm_head: bool) -> float:
        """Operations of one token's forward with so many tokens before it."""
        spec = self.spec
        attention = 4.0 * context * spec.num_attention_heads * spec.head_dim * spec.num_hidden_layers
        return 2.0 * self.layer_parameters + attention + (2.0 * spec.vocab_size * spec.hidden_size if lm_head else 0.0)

    def cache_bytes(self, config: TargetConfig, tokens: float) -> float:
        """Keys and values of so many tokens."""
        spec = self.spec
        return tokens * 2.0 * spec.num_hidden_layers * spec.num_key_value_heads * spec.head_dim * BYTES[config.dtype]


def target_sizes(config: TargetConfig) -> TargetSizes:
    """The sizes of ``config``'s target.

    Raises:
        ConfigError, UnsupportedTargetError: no such target, or one of a refused kind.
    """
    model_config = load_config(config, resolve_source(config))
    build = cast(Any, AutoModelForCausalLM).from_config
    with torch.device("meta"):
        model = cast(PreTrainedModel, build(model_config, trust_remote_code=config.trust_remote_code))
    layout = find_layout(model)
    spec = target_spec(model, layout, config.name, config.revision, eos_token_ids(model, None), None)
    return TargetSizes(
        spec=spec,
        num_parameters=sum(p.numel() for p in model.parameters()),
        layer_parameters=sum(p.numel() for p in layout.layers.parameters()),
        linear_parameters=sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear)),
    )
