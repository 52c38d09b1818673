"""Layers that more than one kind of head is built from: RMS norm, rotary table, and a split-open decoder layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specdraft.core.errors import ConfigError
from specdraft.core.types import LayerWeights, TargetSpec
from specdraft.heads._config import DraftLayerConfig


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight, as in Llama. ``[..., H]`` -> ``[..., H]`` in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalises over the last axis; the statistics are float32 under autocast too."""
        return nn.functional.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class RotaryTable(nn.Module):
    """Cosines and sines per position with the target's base and scaling, so that a long context means the same to both.

    The table grows on demand and is no part of the state dict.
    """

    cos: Tensor
    sin: Tensor
    inv_freq: Tensor

    def __init__(self, spec: TargetSpec) -> None:
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        # A draft layer rotates whole heads, whatever share of its heads the target rotates.
        rope: dict[str, Any] = {k: v for k, v in spec.rope_parameters.items() if k != "partial_rotary_factor"}
        config = LlamaConfig(
            hidden_size=spec.head_dim * spec.num_attention_heads,
            num_attention_heads=spec.num_attention_heads,
            head_dim=spec.head_dim,
            max_position_embeddings=spec.max_position_embeddings,
            rope_parameters=rope or None,
        )
        embedding = LlamaRotaryEmbedding(config=config)
        self.register_buffer("inv_freq", embedding.inv_freq.float(), persistent=False)
        self.scaling = float(embedding.attention_scaling)
        self.register_buffer("cos", torch.zeros(0, spec.head_dim), persistent=False)
        self.register_buffer("sin", torch.zeros(0, spec.head_dim), persistent=False)

    def reserve(self, length: int) -> None:
        """Makes the table hold positions ``0 .. length - 1``."""
        if self.cos.shape[0] >= length and self.cos.device == self.inv_freq.device:
            return
        # Doubling keeps a growing context from rebuilding the table at every step. float32: bf16 has no integers past 256.
        size = max(length, 2 * self.cos.shape[0], 256)
        angles = torch.outer(torch.arange(size, device=self.inv_freq.device).float(), self.inv_freq.float())
        angles = torch.cat([angles, angles], -1)
        self.cos, self.sin = angles.cos() * self.scaling, angles.sin() * self.scaling

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """``x`` ``[M, heads, head_dim]`` at ``positions`` ``[M]`` int64 (reserved before), rotated, in the dtype of x."""
        cos, sin = self.cos[positions][:, None].to(x.dtype), self.sin[positions][:, None].to(x.dtype)
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * cos + turned * sin


class DraftLayer(nn.Module):
    """One Llama-style decoder layer without its own norms on the input, opened at the attention.

    ``queries`` and ``keys_values`` go in, whoever owns the cache or the mask attends, ``finish`` does the rest. The
    projections are fused: one product for q, k, v and one for gate, up.

    Args of the constructor: ``input_size`` is the width of what is projected (H for EAGLE-1, 2H for EAGLE-3).
    """

    def __init__(self, spec: TargetSpec, config: DraftLayerConfig, input_size: int) -> None:
        super().__init__()
        intermediate_size = config.intermediate_size or spec.intermediate_size
        self.num_heads, self.head_dim = spec.num_attention_heads, spec.head_dim
        self.num_kv_heads = config.key_value_heads(spec)
        self.q_size = self.num_heads * self.head_dim
        self.kv_size = self.num_kv_heads * self.head_dim
        self.qkv_proj = nn.Linear(input_size, self.q_size + 2 * self.kv_size, bias=False)
        self.o_proj = nn.Linear(self.q_size, spec.hidden_size, bias=False)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.gate_up_proj = nn.Linear(spec.hidden_size, 2 * intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, spec.hidden_size, bias=False)
        self.rotary = RotaryTable(spec)

    @torch.no_grad()
    def start_from(self, layer: LayerWeights, input_scale: Tensor) -> bool:
        """Copies a target's layer; what is projected first is read from the last H columns of the input.

        Args:
            layer: of the same attention heads and widths; key-value heads are repeated where this layer has more.
            input_scale: ``[H]``, multiplies the columns of the projections. The columns before them become 0: what
                they read is learned.

        Returns:
            False, and nothing is copied, where the sizes differ.
        """
        kv_heads = layer.k.shape[0] // self.head_dim
        if layer.gate.shape[0] != self.down_proj.in_features or self.num_kv_heads % kv_heads:
            return False

        def repeated(weight: Tensor) -> Tensor:
            heads = weight.view(kv_heads, self.head_dim, -1)
            return heads.repeat_interleave(self.num_kv_heads // kv_heads, 0).flatten(0, 1)

        weight = self.qkv_proj.weight
        projections = torch.cat([layer.q, repeated(layer.k), repeated(layer.v)]).to(weight.dtype)
        weight.zero_()
        weight[:, -projections.shape[1] :] = projections * input_scale.to(weight.dtype)
        self.o_proj.weight.copy_(layer.o)
        self.post_attention_layernorm.weight.copy_(layer.mlp_norm)
        self.gate_up_proj.weight.copy_(torch.cat([layer.gate, layer.up]))
        self.down_proj.weight.copy_(layer.down)
        return True

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """``[M, input_size]`` at ``[M]`` -> rotated queries ``[M, heads, head_dim]``."""
        q = nn.functional.linear(x, self.qkv_proj.weight[: self.q_size])
        return self.rotary.rotate(q.view(-1, self.num_heads, self.head_dim), positions)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``[M, input_size]`` at ``[M]`` -> rotated keys and values, ``[M, kv_heads, head_dim]`` each."""
        k, v = nn.functional.linear(x, self.qkv_proj.weight[self.q_size :]).split(self.kv_size, -1)
        k = self.rotary.rotate(k.reshape(-1, self.num_kv_heads, self.head_dim), positions)
        return k, v.reshape(-1, self.num_kv_heads, self.head_dim)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the same rows in one product."""
        q, k, v = self.qkv_proj(x).split([self.q_size, self.kv_size, self.kv_size], -1)
        heads = torch.cat([q, k], -1).view(-1, self.num_heads + self.num_kv_heads, self.head_dim)
        q, k = self.rotary.rotate(heads, positions).split([self.num_heads, self.num_kv_heads], 1)
        return q, k, v.reshape(-1, self.num_kv_heads, self.head_dim)

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Attention output ``[M, heads * head_dim]`` and residual ``[M, H]`` -> the layer's output ``[M, H]``."""
        hidden = residual + self.o_proj(attended)
        gate, up = self.gate_up_proj(self.post_attention_layernorm(hidden)).chunk(2, -1)
        output: Tensor = hidden + self.down_proj(nn.functional.silu(gate) * up)
        return output


def start_first_layer(
    layer_init: str, draft: DraftLayer, layer: LayerWeights | None, fc: nn.Linear, norm: RMSNorm
) -> str:
    """Starts a layer over ``[embedding; fused features]`` from the target's last layer over the last fused features.

    What it predicts first is the target's own next token. layer_init: auto, target or random. layer: None where the target
    has no plain one. fc: fuses the features. norm: before the lm_head.

    Returns:
        A line for the log.

    Raises:
        ConfigError: the target's layer is asked for and does not fit.
    """
    if layer_init == "random":
        return "draft layer: starts at random"
    if layer is not None and draft.start_from(layer, layer.attention_norm):
        with torch.no_grad():
            fc.weight.zero_()
            fc.weight[:, -fc.out_features :].fill_diagonal_(1.0)
            norm.weight.copy_(layer.final_norm)
        return "draft layer: starts from the target's last layer"
    reason = "it has other sizes" if layer is not None else "it is built in another way"
    if layer_init == "target":
        raise ConfigError(
            f"head.layer_init: the target's last layer does not fit the draft layer ({reason}), got target; use auto"
        )
    return f"draft layer: starts at random, the target's last layer does not fit ({reason})"
