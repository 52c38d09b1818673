"""Decoder layers with fewer, larger operations for cached forwards; a layer is replaced only where this proves equal.

At batch 1 a layer is bound by reading its weights and, in a small model, by the number of kernels it starts. The layers
here do what a Llama layer does with one product for queries, keys and values, one for gate and up, one rotation for
queries and keys, and attention on the key-value heads without copies of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache

from specdraft.core.tree import DraftTree
from specdraft.targets.fast_ops import RMSNorm, Rotation, as_bias, as_rotation
from specdraft.targets.layout import Layout

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest accepted difference to the layer's own result, relative to what the layer adds to its input."""
PREFIX = 7
"""Cached rows in the check."""


class _Forward:
    """What the layers of one forward share: rotations and masks as the kernels want them, made by the first layer."""

    def __init__(self) -> None:
        self._cos: Tensor | None = None
        self._rotation: Rotation | None = None
        self._mask: Tensor | None = None
        self._bias: Tensor | None = None

    def rotation(self, cos: Tensor, sin: Tensor) -> Rotation:
        """See ``as_rotation``."""
        if self._rotation is None or self._cos is not cos:
            self._cos, self._rotation = cos, as_rotation(cos, sin)
        return self._rotation

    def bias(self, mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
        """``[B, 1, n, L]`` -> ``[B, 1, groups * n, L]``, see ``as_bias``."""
        if self._bias is None or self._mask is not mask:
            self._mask, self._bias = mask, as_bias(mask, dtype).repeat(1, 1, groups, 1)
        return self._bias


class FastLayer:
    """Stands in for the ``forward`` of one decoder layer: norm, attention, norm, gated MLP, each added to its input.

    Raises:
        AttributeError, TypeError: the layer has other parts.
    """

    def __init__(self, layer: nn.Module, shared: _Forward) -> None:
        attention: Any = layer.get_submodule("self_attn")
        mlp: Any = layer.get_submodule("mlp")
        self.original: Callable[..., Any] = layer.forward
        self.shared = shared
        self.index: int = attention.layer_idx
        self.head_dim: int = attention.head_dim
        self.scale: float = attention.scaling
        self.activation: Callable[[Tensor], Tensor] = mlp.act_fn.forward
        self.before_attention = RMSNorm(layer.get_submodule("input_layernorm"))
        self.before_mlp = RMSNorm(layer.get_submodule("post_attention_layernorm"))
        self.sources = [[attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]]
        self.qkv, self.gate_up = (_fused(linears) for linears in self.sources)
        self.output, self.down = _plain(attention.o_proj), _plain(mlp.down_proj)
        self.num_heads = attention.q_proj.out_features // self.head_dim
        self.num_kv_heads = attention.k_proj.out_features // self.head_dim
        # Qwen 3 norms the queries and keys of every head.
        self.head_norm: RMSNorm | None = None
        if "q_norm" in dict(attention.named_children()):
            self.head_norm = RMSNorm(attention.q_norm)
            others = RMSNorm(attention.k_norm)
            if others.eps != self.head_norm.eps or self.head_norm.weight.shape != (self.head_dim,):
                raise TypeError("queries and keys are normed in another way")
            expanded = [self.head_norm.weight.expand(self.num_heads, -1), others.weight.expand(self.num_kv_heads, -1)]
            self.head_norm.weight = torch.cat(expanded)

    @property
    def linears(self) -> list[nn.Linear]:
        """The layers whose products it computes."""
        return [self.qkv, self.output, self.gate_up, self.down]

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """``[B, n, H]`` -> ``[B, n, H]``. With gradients, under autocast or without a cache, the layer's own way."""
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if (
            cache is None
            or position_embeddings is None
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled(hidden_states.device.type)
        ):
            return self.original(
                hidden_states, attention_mask=attention_mask, position_embeddings=position_embeddings, **kwargs
            )
        rotation = self.shared.rotation(*position_embeddings)
        bias = None
        if attention_mask is not None:
            bias = self.shared.bias(attention_mask, self.groups, hidden_states.dtype)
        return self.run(hidden_states, rotation, bias, cache)

    @property
    def groups(self) -> int:
        """Heads of queries for one of keys and values."""
        return int(self.num_heads // self.num_kv_heads)

    def run(self, hidden: Tensor, rotation: Rotation, bias: Tensor | None, cache: Any) -> Tensor:
        """``[B, n, H]`` -> ``[B, n, H]``. bias: ``[B, 1, groups * n, L]``; None = a prompt into an empty cache, or n = 1."""
        hidden = hidden + self._attend(self.before_attention(hidden), rotation, bias, cache)
        gate, up = self.gate_up.forward(self.before_mlp(hidden)).chunk(2, dim=-1)
        return hidden + self.down.forward(self.activation(gate) * up)

    def _attend(self, x: Tensor, rotation: Rotation, bias: Tensor | None, cache: Any) -> Tensor:
        (batch, rows, _), width = x.shape, self.head_dim
        heads, kv_heads, groups = self.num_heads, self.num_kv_heads, self.groups
        projected = self.qkv.forward(x).view(batch, rows, heads + 2 * kv_heads, width)
        both, values = projected.split([heads + kv_heads, kv_heads], dim=2)
        if self.head_norm is not None:
            both = self.head_norm(both)
        cos, sin = rotation
        both = torch.addcmul(both * cos, both.roll(width // 2, dims=-1), sin)
        queries, keys = both.split([heads, kv_heads], dim=2)
        keys, values = cache.update(keys.transpose(1, 2), values.transpose(1, 2), self.index)
        # Queries that share a key-value head become rows of it, so that keys and values are read once.
        if rows == 1:
            grouped = queries.reshape(batch, kv_heads, groups, width)
            attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, scale=self.scale)
        elif bias is None:
            # A prompt into an empty cache.
            attended = F.scaled_dot_product_attention(
                queries.transpose(1, 2), keys, values, is_causal=True, scale=self.scale, enable_gqa=groups > 1
            ).transpose(1, 2)
        else:
            grouped = queries.reshape(batch, rows, kv_heads, groups, width).permute(0, 2, 3, 1, 4)
            grouped = grouped.reshape(batch, kv_heads, groups * rows, width)
            attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, scale=self.scale)
            attended = attended.view(batch, kv_heads, groups, rows, width).permute(0, 3, 1, 2, 4)
        return self.output.forward(attended.reshape(batch, rows, heads * width))


class FastDecoder:
    """The loop over the layers when all of them are replaced: embedding, rotary angles, layers, final norm.

    It spares what the model's own loop does around them at every step. Hooks on the layers see nothing of it.

    Raises:
        AttributeError: the decoder has no rotary embedding or another kind of norm.
    """

    def __init__(self, layout: Layout, layers: list[FastLayer]) -> None:
        self.layout = layout
        self.layers = list(zip(layers, layout.layer_types, strict=True))
        self.groups = {kind: layer.groups for layer, kind in self.layers}
        self.rotary = layout.decoder.get_submodule("rotary_emb")
        self.norm = RMSNorm(layout.final_norm)

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        masks: dict[str, Tensor | None],
        cache: Any,
        keep: Collection[int],
    ) -> dict[int, Tensor]:
        """Hidden states ``[B, n, H]`` by index: those of ``keep`` and the last one. ``masks`` is by kind of layer."""
        hidden, rotation = self.enter(input_ids, position_ids)
        biases = {
            kind: None if mask is None else as_bias(mask, hidden.dtype).repeat(1, 1, self.groups[kind], 1)
            for kind, mask in masks.items()
            if kind in self.groups
        }
        return self.run(hidden, rotation, biases, cache, keep)

    def enter(self, input_ids: Tensor, position_ids: Tensor) -> tuple[Tensor, Rotation]:
        """``[B, n]`` int64 each -> embeddings ``[B, n, H]`` and the rotation of the layers."""
        hidden: Tensor = self.layout.embedding(input_ids)
        if self.layout.embedding_scale != 1.0:
            hidden = hidden * self.layout.embedding_scale
        return hidden, as_rotation(*self.rotary(hidden, position_ids))

    def run(
        self, hidden: Tensor, rotation: Rotation, biases: Mapping[str, Tensor | None], cache: Any, keep: Collection[int]
    ) -> dict[int, Tensor]:
        """The loop itself; ``biases`` is by kind of layer, see ``FastLayer.run``."""
        kept: dict[int, Tensor] = {}
        for index, (layer, kind) in enumerate(self.layers):
            if index in keep:
                kept[index] = hidden
            hidden = layer.run(hidden, rotation, biases[kind], cache)
        kept[len(self.layers)] = self.norm(hidden)
        return kept


class FastLayers:
    """Handle of the replaced layers of one model. ``decoder`` runs them all; None when some are as they were."""

    def __init__(self, replaced: list[tuple[nn.Module, FastLayer]], decoder: FastDecoder | None = None) -> None:
        self._replaced = replaced
        self.decoder = decoder

    def __len__(self) -> int:
        return len(self._replaced)

    @property
    def linears(self) -> list[nn.Linear]:
        """The linear layers in use, the fused ones among them."""
        return [linear for _, fast in self._replaced for linear in fast.linears]

    @property
    def fused_away(self) -> list[nn.Linear]:
        """The layers' own linears whose products a fused one computes now."""
        return [linear for _, fast in self._replaced for linears in fast.sources for linear in linears]

    def remove(self) -> None:
        """Back to the layers' own way, with weights of their own."""
        for layer, _ in self._replaced:
            del layer.__dict__["forward"]
        for linear in self.fused_away:
            for parameter in linear.parameters():
                parameter.data = parameter.data.clone()
        self._replaced, self.decoder = [], None


def replace_layers(layout: Layout) -> FastLayers:
    """Replaces the ``forward`` of every frozen layer that ``FastLayer`` matches on random input.

    The weights of fused linears become views of the fused one, so that memory stays the same. Hooks on the modules
    inside a replaced layer see nothing of a cached forward.
    """
    replaced: list[tuple[nn.Module, FastLayer]] = []
    if layout.decoder.config._attn_implementation != "sdpa":  # type: ignore[union-attr]
        return FastLayers(replaced)
    shared = {kind: _Forward() for kind in set(layout.layer_types)}
    for layer, kind in zip(layout.layers, layout.layer_types, strict=True):
        if any(parameter.requires_grad for parameter in layer.parameters()):
            continue
        try:
            fast = FastLayer(layer, shared[kind])
            if not is_equal(fast):
                continue
        except (AttributeError, TypeError, RuntimeError):
            # The layer is built in another way, or does not take what a Llama layer takes.
            continue
        for linears, fused in zip(fast.sources, (fast.qkv, fast.gate_up), strict=True):
            _share(linears, fused)
        # An attribute of the instance goes before the method of its class.
        layer.__dict__["forward"] = fast
        replaced.append((layer, fast))
    return FastLayers(replaced, _decoder(layout, [fast for _, fast in replaced]))


@torch.no_grad()
def _decoder(layout: Layout, layers: list[FastLayer]) -> FastDecoder | None:
    """The loop over ``layers`` if it gives what the model's own loop over them gives for a small tree."""
    if len(layers) != len(layout.layers):
        return None
    weight = layout.embedding.get_parameter("weight")
    ids = (torch.arange(5, device=weight.device)[None] * 7919) % weight.shape[0]
    positions = torch.tensor([[3, 4, 4, 5, 6]], device=weight.device)
    tree = DraftTree((-1, -1, 0, 2), (0, 1, 0, 0)).ancestor_mask(weight.device)[None, None]
    masks: dict[str, Tensor | None] = dict.fromkeys(layout.layer_types, tree)
    inputs: dict[str, Any] = {cache_parameter(layout.decoder.forward): DynamicCache(), "use_cache": True}
    try:
        decoder = FastDecoder(layout, layers)
        mask = tree if len(masks) == 1 else masks
        output = layout.decoder(input_ids=ids, attention_mask=mask, position_ids=positions, **inputs)
        found = decoder(ids, positions, masks, DynamicCache(), ())[len(layers)]
        wanted: Tensor = output.last_hidden_state
    except (AttributeError, TypeError, RuntimeError):
        return None
    close = (found - wanted).float().norm() <= TOLERANCE[wanted.dtype] * wanted.float().norm()
    return decoder if close else None


def stand_alone(layer: nn.Module) -> FastLayer:
    """A fast layer beside ``layer``, which stays as it is.

    Raises:
        AttributeError, TypeError: the layer has other parts.
    """
    return FastLayer(layer, _Forward())


def _plain(module: nn.Module) -> nn.Linear:
    if type(module) is not nn.Linear:
        raise TypeError(f"not a plain linear layer: {type(module).__name__}")
    return module


def _fused(linears: list[nn.Linear]) -> nn.Linear:
    """One layer that computes all of ``linears``, from a copy of their weights."""
    weights = [_plain(linear).weight.detach() for linear in linears]
    fused = nn.Linear(weights[0].shape[1], sum(len(w) for w in weights), bias=False, device="meta")
    fused.weight = nn.Parameter(torch.cat(weights), requires_grad=False)
    if linears[0].bias is not None:
        fused.bias = nn.Parameter(torch.cat([linear.bias.detach() for linear in linears]), requires_grad=False)
    return fused


def _share(linears: list[nn.Linear], fused: nn.Linear) -> None:
    """Makes the parameters of ``linears`` views of those of ``fused``."""
    sizes = [linear.out_features for linear in linears]
    for name, parameter in fused.named_parameters():
        for linear, view in zip(linears, parameter.data.split(sizes), strict=True):
            linear.get_parameter(name).data = view


def cache_parameter(forward: Callable[..., Any]) -> str:
    """What a forward calls its key-value cache: ``cache`` since transformers 5.24, ``past_key_values`` before."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


class _Prefix:
    """A cache that starts with given keys and values."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys
        self.values = values

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)


@torch.no_grad()
def is_equal(fast: FastLayer) -> bool:
    """Whether the fast way gives what the layer gives: for a tree after a prefix, one token after it, and a prompt."""
    weight = fast.qkv.weight
    dtype, device = weight.dtype, weight.device
    if dtype not in TOLERANCE:
        return False
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    name = cache_parameter(fast.original)
    for rows, prefix, masked in ((5, PREFIX, True), (1, PREFIX, False), (4, 0, False)):
        hidden = random(1, rows, weight.shape[1])
        angles = torch.rand(1, rows, fast.head_dim // 2, generator=generator).to(device) * 6
        angles = torch.cat([angles, angles], dim=-1)
        tree = torch.rand(1, 1, rows, prefix + rows, generator=generator).to(device) < 0.6
        tree[0, 0, :, prefix:].fill_diagonal_(True)
        shape = (1, fast.num_kv_heads, prefix, fast.head_dim)
        inputs: dict[str, Any] = {
            "attention_mask": tree if masked else None,
            "position_ids": torch.arange(rows, device=device)[None],
            "position_embeddings": (angles.cos().to(dtype), angles.sin().to(dtype)),
            "use_cache": True,
            name: _Prefix(random(*shape), random(*shape)),
        }
        wanted, found = fast.original(hidden, **inputs), fast(hidden, **inputs)
        if not isinstance(wanted, Tensor) or wanted.shape != found.shape:
            return False
        added = (wanted - hidden).float().norm()
        if not (found - wanted).float().norm() <= TOLERANCE[dtype] * added:
            return False
    return True
