"""Where a Hugging Face causal LM keeps its parts, how it makes logits, and which targets are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from specdraft.core.errors import UnsupportedTargetError

LAYER_LISTS = ("layers", "h", "blocks", "block")
"""Names that decoders give to the list of their blocks."""
FINAL_NORMS = ("norm", "final_layer_norm", "final_layernorm", "ln_f", "norm_f", "ln_out")
"""Names that decoders give to the norm after the last block."""
EMBEDDING_SCALES = ("embedding_multiplier", "scale_emb", "embedding_scale")
"""Config keys of a factor that the decoder, not the embedding module, applies (Granite, MiniCPM, HRM)."""
SCALED_BY_DECODER = ("gemma", "gemma2")
"""Families whose decoder multiplied embeddings by the root of their width before its embedding module did (5.0 on)."""
ATTENTION_KINDS = ("full_attention", "sliding_attention")
"""Kinds of layers whose masks and caches are built here."""
RECURRENT_KEYS = (
    "ssm_state_size",
    "mamba_d_state",
    "linear_num_value_heads",
    "lru_width",
    "attention_hidden_size",
)
"""Config keys that only recurrent, state-space and linear-attention models have."""


@dataclass(frozen=True)
class Layout:
    """The parts of one loaded target."""

    decoder: nn.Module
    """The text model without lm_head: ids -> hidden states after the final norm."""
    layers: nn.ModuleList
    final_norm: nn.Module
    embedding: nn.Module
    embedding_scale: float
    """What the decoder multiplies the embedding module's output by."""
    lm_head: nn.Module
    logit_scale: float
    softcap: float | None
    layer_types: tuple[str, ...]
    sliding_window: int | None
    """Keys that a query of a sliding layer sees, itself included; None without sliding layers."""


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The part of a config that describes the text decoder (the config itself for plain text models)."""
    return config.get_text_config(decoder=True)


def refuse(model_type: str, reason: str) -> UnsupportedTargetError:
    """The error for a target that cannot be used; the caller raises it."""
    return UnsupportedTargetError(
        f"target.name: {reason}, got a model of type {model_type!r}; use a decoder-only transformer"
    )


def check_config(config: PretrainedConfig) -> None:
    """Refuses from the config alone, before any weights are read.

    Raises:
        UnsupportedTargetError: an encoder-decoder, a model with a state that cannot be rolled back, attention whose
            masks or caches are not built here.
    """
    kind = config.model_type
    text = text_config(config)
    if config.is_encoder_decoder or getattr(text, "is_encoder_decoder", False):
        raise refuse(kind, "an encoder-decoder is not supported")
    if any(getattr(text, key, None) for key in RECURRENT_KEYS):
        raise refuse(kind, "its recurrent state cannot be rolled back to drop rejected drafts")
    if getattr(text, "num_kv_shared_layers", 0):
        raise refuse(kind, "layers that share the keys and values of other layers are not supported")
    if getattr(text, "index_topk", None):
        raise refuse(kind, "sparse attention with an indexer is not supported")
    if getattr(text, "attention_chunk_size", None) and not getattr(text, "layer_types", None):
        raise refuse(kind, "chunked attention is not supported")
    unknown = sorted(set(getattr(text, "layer_types", None) or ()) - set(ATTENTION_KINDS))
    if any("linear" in name or "mamba" in name or "recurrent" in name or "conv" in name for name in unknown):
        raise refuse(kind, f"its {unknown[0]} layers keep a recurrent state that cannot be rolled back")
    if unknown:
        raise refuse(kind, f"layers of kind {unknown[0]} are not supported")


def check_class(model_class: type[Any], model_type: str) -> None:
    """Refuses a model class that transformers marks as stateful.

    Raises:
        UnsupportedTargetError: the class keeps a state that cannot be rolled back.
    """
    if getattr(model_class, "_is_stateful", False):
        raise refuse(model_type, "its recurrent state cannot be rolled back to drop rejected drafts")


def find_layout(model: PreTrainedModel) -> Layout:
    """Locates the parts of ``model`` by the library's accessors and the tables above.

    Raises:
        UnsupportedTargetError: a part was not found, or the target is of a kind that is refused.
    """
    kind = model.config.model_type
    check_config(model.config)
    check_class(type(model), kind)
    config = text_config(model.config)
    lm_head = model.get_output_embeddings()
    if lm_head is None:
        raise refuse(kind, "it has no lm_head")
    weight = getattr(lm_head, "weight", None)
    if not (isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.is_floating_point()):
        raise refuse(kind, "its lm_head has no plain [vocabulary, hidden] weight")
    decoder = model.get_decoder()
    if decoder is None or decoder is model:
        decoder = model.base_model
    layers = _child(decoder, LAYER_LISTS, kind, "list of decoder layers")
    if not isinstance(layers, nn.ModuleList) or len(layers) != config.num_hidden_layers:
        raise refuse(kind, f"its decoder does not hold {config.num_hidden_layers} layers in one list")
    layer_types, sliding_window = attention_layers(config)
    return Layout(
        decoder=decoder,
        layers=layers,
        final_norm=_child(decoder, FINAL_NORMS, kind, "final norm"),
        embedding=model.get_input_embeddings(),
        embedding_scale=_embedding_scale(config, model.get_input_embeddings()),
        lm_head=lm_head,
        logit_scale=logit_scale(config),
        softcap=getattr(config, "final_logit_softcapping", None),
        layer_types=layer_types,
        sliding_window=sliding_window,
    )


def _child(decoder: nn.Module, names: tuple[str, ...], kind: str, what: str) -> nn.Module:
    children = dict(decoder.named_children())
    for name in names:
        if name in children:
            return children[name]
    raise refuse(kind, f"no {what} was found in {type(decoder).__name__}")


def _first_float(config: PretrainedConfig, names: tuple[str, ...], default: float) -> float:
    values = [getattr(config, name, None) for name in names]
    return next((float(value) for value in values if value is not None), default)


def _embedding_scale(config: PretrainedConfig, embedding: nn.Module) -> float:
    """What the decoder multiplies the embedding module's output by."""
    if config.model_type in SCALED_BY_DECODER and not hasattr(embedding, "embed_scale"):
        scale: float = float(config.hidden_size) ** 0.5
        return scale
    return _first_float(config, EMBEDDING_SCALES, 1.0)


def logit_scale(config: PretrainedConfig) -> float:
    """What the model multiplies the lm_head's output by. ``config``: the text config."""
    if getattr(config, "logits_scaling", None) is not None:
        # HyperCLOVA X multiplies by what Granite, under the same name, divides by.
        scaling = float(config.logits_scaling)
        return scaling if config.model_type.startswith("hyperclovax") else 1.0 / scaling
    if getattr(config, "dim_model_base", None):
        return float(config.dim_model_base) / float(config.hidden_size)
    return _first_float(config, ("logit_scale", "output_multiplier"), 1.0)


def attention_layers(config: PretrainedConfig) -> tuple[tuple[str, ...], int | None]:
    """Kind of every layer, and the window of the sliding ones (None when there are none).

    Some families list ``layer_types``; in the others (Mistral, Mixtral, Phi-3) a window means that every layer slides.
    """
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        types = [ATTENTION_KINDS[0] if window is None else ATTENTION_KINDS[1]] * config.num_hidden_layers
    return tuple(types), int(window) if window is not None and ATTENTION_KINDS[1] in types else None


def needs_eager(config: PretrainedConfig) -> bool:
    """Whether the attention scores are soft-capped (Gemma 2), which the sdpa kernel cannot do."""
    return getattr(text_config(config), "attn_logit_softcapping", None) is not None


def rope_parameters(config: PretrainedConfig) -> dict[str, Any]:
    """The rotary block of the full-attention layers; plain rope of base 10,000 for a model without one."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    nested = {key: value for key, value in rope.items() if isinstance(value, dict)}
    if nested:
        rope = dict(nested.get(ATTENTION_KINDS[0]) or next(iter(nested.values())))
    return {"rope_type": "default", "rope_theta": 10_000.0, **rope}
