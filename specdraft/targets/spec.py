"""The record of a target that heads are built from: sizes, attention geometry, and a hash that identifies it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from specdraft.core.types import TargetSpec
from specdraft.targets.layout import Layout, rope_parameters, text_config

ROWS = 64
VALUES = 4096


def target_spec(
    model: PreTrainedModel,
    layout: Layout,
    name: str,
    revision: str | None,
    eos_token_ids: tuple[int, ...],
    read: Callable[[Tensor], Tensor] | None = Tensor.detach,
) -> TargetSpec:
    """The record of sizes and identity that heads are built from.

    ``read``: see ``fingerprint``; None where only sizes are asked for and no weights are at hand: then there is none.
    """
    config = text_config(model.config)

    def first(*names: str, default: Any) -> Any:
        values = [getattr(config, key, None) for key in names]
        return next((value for value in values if value is not None), default)

    heads = config.num_attention_heads
    hidden = config.hidden_size
    return TargetSpec(
        name=name,
        revision=revision,
        model_type=model.config.model_type,
        hidden_size=hidden,
        intermediate_size=first("intermediate_size", "ffn_dim", "n_inner", default=4 * hidden),
        vocab_size=layout.lm_head.get_parameter("weight").shape[0],
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=first("num_key_value_heads", default=heads),
        head_dim=first("head_dim", default=hidden // heads),
        max_position_embeddings=first("max_position_embeddings", "n_positions", default=2048),
        rms_norm_eps=first("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", default=1e-6),
        hidden_act=first("hidden_act", "hidden_activation", "activation_function", default="silu"),
        rope_parameters=rope_parameters(config),
        eos_token_ids=eos_token_ids,
        fingerprint="" if read is None else fingerprint(config, layout, read),
    )


def fingerprint(config: PretrainedConfig, layout: Layout, read: Callable[[Tensor], Tensor] = Tensor.detach) -> str:
    """16 hexadecimal digits, the same whatever dtype one checkpoint is loaded in. ``config``: the text config.

    ``read`` gives a parameter's values; those of a model without storage are read from its files.

    Hashed: model type, sizes, attention kinds, rotary block, and the signs of a sample of weights: 64 rows of the
    embedding spread over the vocabulary, and 4,096 spread values of every matrix of the middle layer (a fine-tune by
    adapters leaves the embedding as it was). Signs, since rounding to another dtype never changes one, while training
    flips some of so many.
    """
    facts = {
        "model_type": config.model_type,
        "sizes": [config.hidden_size, config.num_hidden_layers, config.num_attention_heads],
        "attention": [layout.layer_types, layout.sliding_window],
        "rope": rope_parameters(config),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=float).encode())
    embedding = read(layout.embedding.get_parameter("weight"))
    digest.update(json.dumps(list(embedding.shape)).encode())
    samples = [embedding[_spread(embedding.shape[0], ROWS, embedding)]]
    for parameter in layout.layers[len(layout.layers) // 2].parameters():
        if parameter.dim() >= 2 and parameter.is_floating_point():
            flat = read(parameter).reshape(-1)
            samples.append(flat[_spread(flat.numel(), VALUES, flat)])
    for sample in samples:
        digest.update(torch.signbit(sample.to("cpu", torch.float32)).numpy().tobytes())
    return digest.hexdigest()[:16]


def _spread(size: int, count: int, like: Tensor) -> Tensor:
    """At most ``count`` indices evenly spread over ``range(size)``, first and last included."""
    steps = min(size, count)
    return torch.tensor([i * (size - 1) // max(steps - 1, 1) for i in range(steps)], device=like.device)
