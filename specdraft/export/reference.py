"""Draft heads rebuilt from the files of an export in plain torch, by the conventions of the engines that read them.

Nothing here uses the head classes: this is the other half of the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdraft.core.errors import ExportError
from specdraft.export.probe import World
from specdraft.export.tensors import all_finite, file_pieces

Tensors = Mapping[str, Tensor]


def check_tensors(tensors: Tensors, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """No tensor missing, none too many, all of the right shape and finite.

    Raises:
        ExportError: otherwise.
    """
    missing, extra = sorted(set(shapes) - set(tensors)), sorted(set(tensors) - set(shapes))
    if missing or extra:
        what = f"lacks {missing[0]}" if missing else f"holds {extra[0]}, which no engine reads"
        raise ExportError(f"export.format: {where} {what}; nothing was written, report this")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != tuple(shape):
            raise ExportError(
                f"export.format: {name} of {where} is of shape {list(tensors[name].shape)}, expected {list(shape)}; "
                "nothing was written, report this"
            )
        if not all_finite(tensors[name]):
            raise ExportError(f"export.format: {name} of {where} holds NaN or infinity; nothing was written")


def check_shared(tensors: Tensors, name: str, original: Tensor) -> None:
    """A tensor that is the target's must be the target's to the last bit.

    Raises:
        ExportError: it is not.
    """
    if tensors[name].dtype != original.dtype or not torch.equal(tensors[name], original):
        raise ExportError(f"export.format: {name} differs from the target's; nothing was written, report this")


def check_shared_file(path: Path, name: str, original: tuple[Path, str]) -> None:
    """The same for a large tensor: both are read in pieces. original: file and name.

    Raises:
        ExportError: it is not.
    """
    try:
        pairs = zip(file_pieces(path, name), file_pieces(*original), strict=True)
        is_same = all(mine.dtype == theirs.dtype and torch.equal(mine, theirs) for mine, theirs in pairs)
    except ValueError:  # of different lengths
        is_same = False
    if not is_same:
        raise ExportError(f"export.format: {name} differs from the target's; nothing was written, report this")


def layer_shapes(config: Mapping[str, Any], prefix: str, input_size: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a bias-free Llama layer whose attention reads ``input_size`` features."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    return {
        f"{prefix}self_attn.q_proj.weight": (q, input_size),
        f"{prefix}self_attn.k_proj.weight": (kv, input_size),
        f"{prefix}self_attn.v_proj.weight": (kv, input_size),
        f"{prefix}self_attn.o_proj.weight": (hidden, q),
        f"{prefix}mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}mlp.up_proj.weight": (inner, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, inner),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
    }


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x W^T`` in float32."""
    return x @ weight.float().T


def frequencies(config: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Rotary frequencies ``[head_dim / 2]`` and scale of the table, read the old and the new way, which must agree.

    Raises:
        ExportError: they do not.
    """
    sizes = {key: config[key] for key in ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")}
    older: dict[str, Any] = {"rope_theta": config["rope_theta"], "rope_scaling": config["rope_scaling"]}
    old = LlamaConfig(**sizes, **older)
    new = LlamaConfig(**sizes, rope_parameters=dict(config["rope_parameters"]))
    tables = [LlamaRotaryEmbedding(config=one) for one in (old, new)]
    if not torch.equal(tables[0].inv_freq, tables[1].inv_freq):
        raise ExportError("export.format: rope_theta and rope_scaling contradict rope_parameters; report this")
    if config["rope_scaling"] is None:
        exponent = torch.arange(0, config["head_dim"], 2).float() / config["head_dim"]
        return 1.0 / torch.tensor(float(config["rope_theta"])) ** exponent, 1.0
    return tables[0].inv_freq.float(), float(tables[0].attention_scaling)


class Recurrence:
    """A one-layer draft model run from every position of a text at once; each chain attends to its own past only."""

    def __init__(self, config: Mapping[str, Any], tensors: Tensors, prefix: str) -> None:
        self.config, self.tensors, self.prefix = config, tensors, prefix
        self.eps = float(config["rms_norm_eps"])
        self.inverse, self.rope_scale = frequencies(config)

    def weight(self, name: str) -> Tensor:
        """A tensor of the layer."""
        return self.tensors[f"{self.prefix}{name}.weight"]

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """``[P, heads, dim]`` turned by halves."""
        angles = positions[:, None].float() * self.inverse
        cos = torch.cat([angles, angles], -1).cos()[:, None] * self.rope_scale
        sin = torch.cat([angles, angles], -1).sin()[:, None] * self.rope_scale
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def causal(self, x: Tensor, residual: Tensor) -> Tensor:
        """One pass over ``[T, .]`` at positions 0 .. T - 1, each of which sees those up to itself; ``[T, H]``."""
        count, heads, dim = x.shape[0], self.config["num_attention_heads"], self.config["head_dim"]
        group, positions = heads // self.config["num_key_value_heads"], torch.arange(x.shape[0])
        query, key, value = (
            linear(x, self.weight(f"self_attn.{name}")).view(count, -1, dim) for name in ("q_proj", "k_proj", "v_proj")
        )
        query, key = self.rotate(query, positions), self.rotate(key, positions).repeat_interleave(group, 1)
        scores = torch.einsum("phd,khd->hpk", query, key) / dim**0.5
        scores = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), float("-inf"))
        mixed = torch.einsum("hpk,khd->phd", scores.softmax(-1), value.repeat_interleave(group, 1))
        return self.finish(mixed.reshape(count, -1), residual)

    def finish(self, mixed: Tensor, residual: Tensor) -> Tensor:
        """What the attention found -> the layer's output."""
        after = residual + linear(mixed, self.weight("self_attn.o_proj"))
        normed = rms(after, self.weight("post_attention_layernorm"), self.eps)
        gated = torch.nn.functional.silu(linear(normed, self.weight("mlp.gate_proj")))
        return after + linear(gated * linear(normed, self.weight("mlp.up_proj")), self.weight("mlp.down_proj"))

    def run(
        self,
        hidden: Tensor,
        drafted: Tensor,
        world: World,
        mix: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        feed: Callable[[Tensor], Tensor],
    ) -> list[Tensor]:
        """Layer outputs ``[P, H]`` of every step.

        Args:
            hidden: ``[P, H]``, the first hidden states.
            drafted: ``[P, K]``, tokens that go in from the second step on.
            world: for the embeddings, as stored.
            mix: embeddings and hidden states -> input of the attention, residual.
            feed: output -> the next hidden state.
        """
        count, heads = hidden.shape[0], self.config["num_attention_heads"]
        dim, group = self.config["head_dim"], heads // self.config["num_key_value_heads"]
        positions, tokens = torch.arange(count), world.next_tokens
        base: tuple[Tensor, Tensor] | None = None
        chain: list[tuple[Tensor, Tensor]] = []
        outputs = []
        for step in range(drafted.shape[1]):
            x, residual = mix(world.embedding[tokens].float(), hidden)
            query, key, value = (
                linear(x, self.weight(f"self_attn.{name}")).view(count, -1, dim)
                for name in ("q_proj", "k_proj", "v_proj")
            )
            query, key = self.rotate(query, positions + step), self.rotate(key, positions + step)
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
            if base is None:
                base = key, value
            else:
                chain.append((key, value))
            scores = torch.einsum("phd,khd->hpk", query, base[0]) / dim**0.5
            scores = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), float("-inf"))
            own = [torch.einsum("phd,phd->hp", query, k)[..., None] / dim**0.5 for k, _ in chain]
            weights = torch.cat([scores, *own], -1).softmax(-1)
            mixed = torch.einsum("hpk,khd->phd", weights[..., :count], base[1])
            for i, (_, v) in enumerate(chain):
                mixed = mixed + weights[..., count + i].T[..., None] * v
            output = self.finish(mixed.reshape(count, -1), residual)
            outputs.append(output)
            hidden, tokens = feed(output), drafted[:, step]
        return outputs
