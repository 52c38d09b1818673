"""The parts that every Llama-shaped export shares: config keys, layer tensors, the rotary block in both layouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from specdraft.core.types import TargetSpec
from specdraft.export.material import Material

ATTENTION = ("q_proj", "k_proj", "v_proj")


def rope_block(spec: TargetSpec) -> dict[str, Any]:
    """The rotary settings under the keys of older loaders (``rope_theta``, ``rope_scaling``) and of transformers 5.

    A draft layer rotates whole heads, so a target's partial rotation is left out.
    """
    rope = {key: value for key, value in spec.rope_parameters.items() if key != "partial_rotary_factor"}
    rope_type = rope.get("rope_type", "default")
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope_type == "default" else {**scaling, "type": rope_type},
        "rope_parameters": rope,
    }


def draft_config(material: Material) -> dict[str, Any]:
    """config.json of a one-layer Llama with the head's sizes and the target's vocabulary, limits and special tokens."""
    spec, text = material.spec, material.target.config.get_text_config(decoder=True)
    layer = material.head.get_submodule("layer")
    dtype = str(material.dtype).removeprefix("torch.")
    eos = list(spec.eos_token_ids)
    padding = getattr(text, "pad_token_id", None)
    return {
        "model_type": "llama",
        "hidden_size": spec.hidden_size,
        "intermediate_size": layer.get_parameter("down_proj.weight").shape[1],
        "num_hidden_layers": 1,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        "max_position_embeddings": spec.max_position_embeddings,
        **rope_block(spec),
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "pretraining_tp": 1,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": getattr(text, "bos_token_id", None),
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "pad_token_id": padding if isinstance(padding, int) else eos[0] if eos else 0,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def split_layer(tensors: Mapping[str, Tensor], q_size: int, prefix: str) -> dict[str, Tensor]:
    """Our fused draft layer as the separate projections of Llama, under ``prefix``; all are views."""
    qkv, gate_up = tensors["layer.qkv_proj.weight"], tensors["layer.gate_up_proj.weight"]
    kv_size = (qkv.shape[0] - q_size) // 2
    parts = dict(zip(ATTENTION, qkv.split([q_size, kv_size, kv_size]), strict=True))
    gate, up = gate_up.chunk(2)
    return {
        **{f"{prefix}self_attn.{name}.weight": part for name, part in parts.items()},
        f"{prefix}self_attn.o_proj.weight": tensors["layer.o_proj.weight"],
        f"{prefix}mlp.gate_proj.weight": gate,
        f"{prefix}mlp.up_proj.weight": up,
        f"{prefix}mlp.down_proj.weight": tensors["layer.down_proj.weight"],
        f"{prefix}post_attention_layernorm.weight": tensors["layer.post_attention_layernorm.weight"],
    }
