"""Random specs, batches and embeddings for tests of heads and losses that need no target model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdraft.core.types import DraftBatch, Features, TargetSpec, TokenBatch, Unembedding
from specdraft.heads.base import DraftHead, head_config
from specdraft.losses.alignment import build_draft_batch

SPEC = TargetSpec(
    name="random",
    revision=None,
    model_type="llama",
    hidden_size=32,
    intermediate_size=48,
    vocab_size=97,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
    hidden_act="silu",
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    eos_token_ids=(2,),
    fingerprint="0" * 16,
)


@dataclass
class World:
    """A spec, frozen embeddings and lm_head, and features that depend on the prefix only, like a causal target's."""

    spec: TargetSpec
    table: Tensor
    unembed: Unembedding

    def embed(self, ids: Tensor) -> Tensor:
        """``[...]`` -> ``[..., H]``."""
        return self.table[ids]

    def features(self, tokens: TokenBatch, num_aux: int) -> Features:
        """A causal running mean of embeddings, per document, so that later tokens never reach earlier features."""
        embedded = self.table[tokens.input_ids]
        same = tokens.document_ids[:, :, None] == tokens.document_ids[:, None]
        mask = (torch.ones_like(same).tril() & same).float()
        mean = torch.einsum("bts,bsh->bth", mask / mask.sum(-1, keepdim=True).clamp(min=1), embedded) * 3
        aux = torch.cat([torch.roll(mean, i + 1, -1) for i in range(num_aux)], -1) if num_aux else None
        return Features(mean, aux)


def world(seed: int = 0, **spec_fields: object) -> World:
    """Random frozen tensors for ``SPEC`` with ``spec_fields`` replaced."""
    spec = replace(SPEC, **spec_fields)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(spec.vocab_size, spec.hidden_size, generator=generator)
    weight = torch.randn(spec.vocab_size, spec.hidden_size, generator=generator) * 0.3
    return World(spec, table, Unembedding(weight))


def make_head(kind: str, spec: TargetSpec, seed: int = 0, **settings: object) -> DraftHead:
    """A head with random weights (zero-initialised parts too, so that nothing is trivially equal) and a chosen vocabulary."""
    torch.manual_seed(seed)
    head = head_config(kind, dict(settings)).build(spec)
    if head.vocab is not None:
        size = head.vocab.d2t.numel()
        head.vocab.set_tokens(torch.randperm(spec.vocab_size)[:size].tolist())
    for parameter in head.parameters():
        if parameter.dim() > 1 or not parameter.any():
            torch.nn.init.normal_(parameter, std=0.2)
    return head


def token_batch(lengths: list[int], answers: list[tuple[int, int]], seed: int = 0, pad_to: int = 0) -> TokenBatch:
    """Random tokens; row i has ``lengths[i]`` tokens of which ``answers[i]`` = (start, stop) are supervised."""
    generator = torch.Generator().manual_seed(seed)
    width = max(max(lengths), pad_to)
    ids = torch.randint(3, SPEC.vocab_size, (len(lengths), width), generator=generator)
    columns = torch.arange(width)
    attention = columns[None] < torch.tensor(lengths)[:, None]
    start, stop = torch.tensor(answers).T
    loss = (columns >= start[:, None]) & (columns < stop[:, None]) & attention
    ids = torch.where(attention, ids, 0)
    return TokenBatch(
        ids,
        attention,
        loss,
        columns.expand(len(lengths), -1).contiguous(),
        torch.where(attention, 0, -1),
        torch.arange(len(lengths)),
    )


def draft_batch(world: World, head: DraftHead, tokens: TokenBatch) -> DraftBatch:
    """``tokens`` with the features ``head`` asks for."""
    return build_draft_batch(tokens, world.features(tokens, len(head.features().aux_layers)))
