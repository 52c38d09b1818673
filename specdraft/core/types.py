"""The records that heads, losses, targets and the decoder exchange.

Shape letters, used in every docstring of the package:

    B batch rows      T tokens of a row      H target hidden size      V target vocabulary (rows of the lm_head)
    D draft vocabulary (D = V when it is not reduced)      A captured layers      K draft depth
    N nodes of a draft tree (decoding), or anchors of a batch (training)

An **anchor** is a position t of a training row from which a head drafts: the target's features up to t and the
token at t + 1 are known, and the token at t + 2 is supervised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Embed = Callable[[Tensor], Tensor]
"""Token ids ``[..., ]`` int64 -> embeddings ``[..., H]``, through the target's own embedding module."""


DraftSampler = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""Logits ``[m, D]`` and n -> ids ``[m, n]`` int64, drawn one after another without replacement, and the probabilities
``[m, D]`` that the first of each row was drawn from (the others: from the same without those before them)."""


@dataclass(frozen=True)
class TargetSpec:
    """What a head may know of a target: sizes, attention geometry, rotary settings and identity."""

    name: str
    revision: str | None
    model_type: str
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    """Rows of the lm_head. It can exceed the tokenizer's length (padding rows)."""
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    rope_parameters: dict[str, Any]
    """The rotary block of the full-attention layers as transformers 5 writes it (``rope_type``, ``rope_theta``, ...)."""
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    """Hash of the sizes and of a sample of the weights: two targets that differ here need different heads."""


@dataclass(frozen=True)
class FeatureRequest:
    """Hidden states a head needs besides the last one.

    ``aux_layers`` are indices into Hugging Face ``hidden_states``: 0 is the embedding output and k the output of
    block k (counted from 1). The last index (``num_hidden_layers``) is after the final norm.

    ``last``: where the head itself reads the last hidden state in training: ``prefix`` = at every position up to an anchor
    (it attends to them), ``anchors`` = at anchors only, ``none`` = nowhere. Aux layers are read at every position up to an
    anchor. The loss reads the last hidden state where it predicts a supervised token, whatever the head reads. Only what a
    feature store may leave out depends on it.
    """

    aux_layers: tuple[int, ...] = ()
    last: str = "prefix"


@dataclass(frozen=True)
class Features:
    """Hidden states of one target forward. ``last_hidden`` is always after the target's final norm.

    last_hidden: ``[B, T, H]``; aux_hidden: ``[B, T, A*H]`` in the order of the request, or None when A is 0.
    """

    last_hidden: Tensor
    aux_hidden: Tensor | None

    def select(self, index: Tensor) -> Features:
        """Rows ``index`` (``[n]`` int64) of the token axis."""
        aux = None if self.aux_hidden is None else self.aux_hidden.index_select(1, index)
        return Features(self.last_hidden.index_select(1, index), aux)

    def row(self, place: int) -> Features:
        """One row of the batch axis, as a batch of one."""
        aux = None if self.aux_hidden is None else self.aux_hidden[place : place + 1]
        return Features(self.last_hidden[place : place + 1], aux)

    @staticmethod
    def concatenate(parts: Sequence[Features]) -> Features:
        """Parts of one text after one another on the token axis; all with or all without ``aux_hidden``."""
        aux = [part.aux_hidden for part in parts if part.aux_hidden is not None]
        return Features(torch.cat([part.last_hidden for part in parts], dim=1), torch.cat(aux, dim=1) if aux else None)


@dataclass(frozen=True)
class Unembedding:
    """Hidden state -> logits, as the target computes them: ``softcap(scale * (h W^T + b))``.

    weight: ``[V, H]`` (``[D, H]`` after ``select``); bias: ``[V]`` or None; scale multiplies the logits (Cohere's
    ``logit_scale``, one over Granite's ``logits_scaling``); softcap c applies ``c * tanh(x / c)`` (Gemma 2).
    It is data rather than a module so that a loss can work on a slice of the vocabulary and of the rows at a time.
    product: computes ``h W^T + b`` with a faster kernel, for decoding; None = the plain product.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    product: Callable[[Tensor], Tensor] | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """``[..., H]`` -> ``[..., V]`` in the dtype of ``hidden`` (of autocast, inside it)."""
        if self.product is not None:
            return self.finish(self.product(hidden))
        return self.finish(torch.nn.functional.linear(hidden, self.weight, self.bias))

    def finish(self, logits: Tensor) -> Tensor:
        """Scale and soft-cap applied to raw products ``h W^T + b``, any shape."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def select(self, token_ids: Tensor) -> Unembedding:
        """The same map onto the tokens ``token_ids`` (``[D]`` int64) only."""
        bias = None if self.bias is None else self.bias.index_select(0, token_ids)
        return replace(self, weight=self.weight.index_select(0, token_ids), bias=bias, product=None)

    def to(self, dtype: torch.dtype) -> Unembedding:
        """The same map with weights of another dtype."""
        if self.weight.dtype is dtype:
            return self
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, weight=self.weight.to(dtype), bias=bias, product=None)


@dataclass(frozen=True)
class LayerWeights:
    """A Llama-style decoder layer without biases and the norm after the last layer, as a draft layer may start from.

    q, k, v: ``[heads * head_dim, H]`` (k, v: of the key-value heads); o: ``[H, heads * head_dim]``; gate, up: ``[I, H]``;
    down: ``[H, I]``; the norms, before attention, before the MLP and after the layer: ``[H]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    attention_norm: Tensor
    mlp_norm: Tensor
    final_norm: Tensor


@dataclass(frozen=True)
class AdapterWeights:
    """A LoRA adapter of a target: ``scale * B A`` is added to the weights of each of its layers.

    tensors: ``<layer>.lora_A.weight`` ``[r, in]`` and ``<layer>.lora_B.weight`` ``[out, r]``, float32.
    """

    tensors: dict[str, Tensor]
    scale: float

    @property
    def num_parameters(self) -> int:
        """Of all matrices together."""
        return sum(tensor.numel() for tensor in self.tensors.values())


@dataclass(frozen=True)
class TokenBatch:
    """One padded batch of tokenised conversations, before the target saw it.

    input_ids: ``[B, T]`` int64. attention_mask: ``[B, T]`` bool, True = a real token (padding is on the right).
    loss_mask: ``[B, T]`` bool, True = supervised. position_ids: ``[B, T]`` int64. document_ids: ``[B, T]`` int64, -1 on
    padding, counted from 0 in every row. row_ids: ``[B]`` int64, the rows' places in the data set; ``[B, P]`` where a row
    holds up to P documents, each from its own place, -1 behind the last.
    """

    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    document_ids: Tensor
    row_ids: Tensor

    def to(self, device: torch.device | str) -> TokenBatch:
        """The same batch on ``device``."""
        return TokenBatch(*(getattr(self, name).to(device, non_blocking=True) for name in self.__dataclass_fields__))

    def pinned(self) -> TokenBatch:
        """The same batch in page-locked memory, from which ``to`` copies while the host goes on."""
        return TokenBatch(*(getattr(self, name).pin_memory() for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class DraftBatch:
    """One padded batch of conversations with the target's features, as a head is trained on it.

    input_ids: ``[B, T]`` int64. attention_mask: ``[B, T]`` bool, True = a real token (padding is on the right).
    loss_mask: ``[B, T]`` bool, True = this token is supervised (a token the target wrote).
    features: target states at every position. position_ids: ``[B, T]`` int64, from 0 in every document.
    document_ids: ``[B, T]`` int64, -1 on padding; attention never crosses documents.
    anchors: ``[N]`` int64, sorted flat positions ``b * T + t`` from which drafting is trained. The last column of a row is
    none: where it is among them, it pads them (see ``drafting``).
    """

    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    features: Features
    position_ids: Tensor
    document_ids: Tensor
    anchors: Tensor

    @property
    def drafting(self) -> Tensor:
        """``[N]`` bool, True = a real anchor; False = one that only pads them to a rounded size, with nothing to draft."""
        length = self.input_ids.shape[1]
        return self.anchors % length != length - 1

    @property
    def num_tokens(self) -> Tensor:
        """Real tokens in the batch, a 0-d int64 tensor."""
        return self.attention_mask.sum()


@dataclass(frozen=True)
class DraftStep:
    """One draft depth of a head on a batch.

    ``unembed(hidden)[n]`` are the logits for ``input_ids`` at ``anchors[n] + offset``, so ``offset >= 2``: the target
    itself predicts offset 1. Medusa head k (from 0) has offset k + 2, EAGLE's unroll step s has s + 2. Only
    ``losses.alignment`` turns an offset into shifted ids, masks, hidden states and teacher logits.

    hidden: ``[N, H']``; offset: int; unembed: to logits ``[N, D]`` over the head's draft vocabulary. A head that drafts
    from a sample of the anchors only, to save work in training, gives ``chosen``, ``[n]`` int64 sorted places among the N
    anchors, and ``share``, ``[n]`` float32, for how many anchors each stands in the loss; hidden then has n rows.
    confidence: ``[N]`` (or ``[n]``) logits of the chance that sampling accepts the drafted token, those before it accepted.
    """

    hidden: Tensor
    offset: int
    unembed: Unembedding
    chosen: Tensor | None = None
    share: Tensor | None = None
    confidence: Tensor | None = None


@dataclass(frozen=True)
class DraftContext:
    """What the target committed since the last proposal, for one decoded row.

    Position p runs over ``start .. start + n - 1``. next_tokens: ``[1, n]`` int64, the tokens at p + 1; the last of them
    is emitted but not yet run through the target: the root of the draft tree. features: target states at p.
    The first call after ``begin`` carries the whole prompt.
    new_ids: what the text has grown by, as the decoder has read it anyway: at the first call the prompt and the first
    token (n + 1 ids, since the prompt's own first one is no ``next_tokens``), later the n ids of ``next_tokens``.
    sampler: with what drafts are wanted to be drawn; None, or a proposer that cannot draw, gives its likeliest tokens.
    """

    next_tokens: Tensor
    features: Features
    start: int
    new_ids: Sequence[int] = ()
    sampler: DraftSampler | None = None
