"""The record of a target that heads are built from: sizes, attention geometry, and a hash that identifies it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from specdraft.core.types import TargetSpec
from specdraft.targets.layout import Layout, rope_parameters, text_config

ROWS = 16
VALUES = 64


def target_spec(
    model: PreTrainedModel, layout: Layout, name: str, revision: str | None, eos_token_ids: tuple[int, ...]
) -> TargetSpec:
    """The record of sizes and identity that heads are built from."""
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
        fingerprint=fingerprint(config, layout),
    )


def fingerprint(config: PretrainedConfig, layout: Layout) -> str:
    """16 hexadecimal digits, the same for fp32 and bf16 loads of one checkpoint. ``config``: the text config.

    Hashed: model type, sizes, rotary block, and in bfloat16 the final norm, 16 rows of the embedding spread over the
    vocabulary, and 64 spread values of every parameter of the middle layer (a fine-tune by adapters leaves the norm and
    the embedding as they were). An fp16 load can differ: rounding to fp16 first is not always undone.
    """
    facts = {
        "model_type": config.model_type,
        "sizes": [config.hidden_size, config.num_hidden_layers, config.num_attention_heads],
        "attention": [layout.layer_types, layout.sliding_window],
        "rope": rope_parameters(config),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=float).encode())
    embedding = layout.embedding.get_parameter("weight")
    samples = [parameter.detach() for parameter in layout.final_norm.parameters()]
    samples.append(embedding.detach()[_spread(embedding.shape[0], ROWS, embedding)])
    for parameter in layout.layers[len(layout.layers) // 2].parameters():
        if parameter.is_floating_point():
            flat = parameter.detach().reshape(-1)
            samples.append(flat[_spread(flat.numel(), VALUES, flat)])
    digest.update(json.dumps(list(embedding.shape)).encode())
    for sample in samples:
        # Minus zero and zero round alike; adding zero makes them one.
        bits = (sample.to("cpu", torch.float32).to(torch.bfloat16) + 0.0).view(torch.int16)
        digest.update(bits.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _spread(size: int, count: int, like: Tensor) -> Tensor:
    """At most ``count`` indices evenly spread over ``range(size)``, first and last included."""
    steps = min(size, count)
    return torch.tensor([i * (size - 1) // max(steps - 1, 1) for i in range(steps)], device=like.device)
