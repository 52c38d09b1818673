"""DFlash: drafts a block in one pass from masks, with the target's features as keys and values of every layer; DSpark on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from specdraft.core.errors import ConfigError
from specdraft.core.tree import DraftTree
from specdraft.core.types import (
    DraftBatch,
    DraftContext,
    DraftStep,
    Embed,
    FeatureRequest,
    Features,
    TargetSpec,
    Unembedding,
)
from specdraft.heads._blocks import RMSNorm
from specdraft.heads._config import FusedLayersConfig
from specdraft.heads._parallel import (
    BlockAttention,
    BlockState,
    NormedLayer,
    ParallelHead,
    choose_anchors,
    layout_of,
)
from specdraft.heads.base import register_head


@register_head("dflash")
@dataclass(slots=True, kw_only=True)
class DFlashConfig(FusedLayersConfig):
    """Settings of a block drafter. The defaults are DFlash; DSpark sets anchor_predicts, markov_rank, confidence_head."""

    num_layers: int = 5
    """Decoder layers."""
    causal: bool = False
    """True: a slot of the block sees the slots before it only (JetSpec); False: all of them."""
    anchor_predicts: bool = False
    """True: the slot of the last token drafts the first token, so that K slots draft K tokens (DSpark); False: only masks
    draft, each the token of its own place (DFlash)."""
    mask_token_id: int | None = None
    """A reserved token of the target whose embedding stands for what is to be drafted; null = a trained vector."""
    markov_rank: int = 0
    """Above 0: the token before adds a bias of this rank to the logits of each depth (DSpark: 256); 0 = none."""
    confidence_head: bool = False
    """True: estimates for every depth whether sampling accepts it; the loss needs the term confidence."""
    max_anchors: int | None = 512
    """Most blocks per row and training step, drawn at random from the supervised positions; null = all of these."""

    def __post_init__(self) -> None:
        FusedLayersConfig.__post_init__(self)
        for name in ("num_layers", "max_anchors"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"head.{name}: must be at least 1, got {value}; use e.g. 1")
        if self.markov_rank < 0:
            raise ConfigError(f"head.markov_rank: must not be negative, got {self.markov_rank}; use 0 for none")

    @property
    def estimates_acceptance(self) -> bool:
        """With a confidence head."""
        return self.confidence_head

    def build(self, spec: TargetSpec) -> DFlashHead:
        """A head with random layer weights.

        Raises:
            ConfigError: an aux layer or a mask token that the target does not have.
        """
        return DFlashHead(self, spec)

    def default_layers(self, count: int) -> list[int]:
        """Five, spread evenly from 2 to n - 2 of n layers."""
        return [round(2 + (count - 4) * i / 4) for i in range(5)]


class MarkovHead(nn.Module):
    """Gives the logits after a token a bias of low rank, ``W_2 W_1[token]``; none at the start."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.previous = nn.Embedding(vocab_size, rank)
        self.bias = nn.Linear(rank, draft_vocab_size, bias=False)
        nn.init.normal_(self.previous.weight, std=rank**-0.5)
        nn.init.zeros_(self.bias.weight)


class DFlashHead(ParallelHead):
    """A block [e(x_{t+1}), MASK, ...] at positions t + 1, t + 2, ... attends to the target's features up to t and itself.

    With c_t = norm(W [h^l1_t; ...; h^l5_t]) and z the block's normed states, every layer has the queries W_Q z and the keys
    and values W_K [c_{<=t}; z], W_V [c_{<=t}; z].
    Slot j says softmax(U norm(z_j)), U the target's frozen lm_head, for the token of its own place (j from 1), or for the
    one after it where the anchor predicts (j from 0). The c of the text are projected once and cached; the block's keys
    are gone after the draft. In training every anchor has a block, and blocks do not see each other.
    Source: Chen et al. 2026 (DFlash), its sections on conditioning and on training; causal: JetSpec.

    DSpark adds to the logits of each depth W_2 W_1[x_prev], x_prev the token before it (the text's in training, the
    drafted one in decoding), and the confidence sigma(w . [z_j; W_1[x_prev]] + b). Source: DSpark, its sections on the
    Markov head and on confidence.
    """

    def __init__(self, config: DFlashConfig, spec: TargetSpec) -> None:
        super().__init__(config, spec)
        size, depths = spec.hidden_size, config.num_draft_tokens
        self.aux_layers = config.layers_of(spec)
        self.causal, self.max_anchors = config.causal, config.max_anchors
        self.first = 0 if config.anchor_predicts else 1  # slot of the first drafted token
        self.num_slots = depths + self.first
        self.fc = nn.Linear(len(self.aux_layers) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, spec.rms_norm_eps)
        self.layers = nn.ModuleList(NormedLayer(spec, config) for _ in range(config.num_layers))
        self.norm = RMSNorm(size, spec.rms_norm_eps)
        self.mask_token_id = config.mask_token_id
        self.mask_embedding: nn.Parameter | None = None
        if self.mask_token_id is None:
            if self.num_slots > 1:
                self.mask_embedding = nn.Parameter(torch.randn(size) * 0.02)
        elif not 0 <= self.mask_token_id < spec.vocab_size:
            raise ConfigError(
                f"head.mask_token_id: the target has tokens 0..{spec.vocab_size - 1}, got {self.mask_token_id}; use null"
            )
        rank = config.markov_rank
        self.markov = MarkovHead(spec.vocab_size, config.draft_vocab_size or spec.vocab_size, rank) if rank else None
        self.confidence = nn.Linear(size + rank, 1) if config.confidence_head else None

    @property
    def blocks(self) -> list[NormedLayer]:
        """The decoder layers."""
        return cast(list[NormedLayer], list(self.layers))

    def features(self) -> FeatureRequest:
        """The layers that become keys and values."""
        return FeatureRequest(self.aux_layers, last="none")

    def vocabulary_parameters(self) -> list[str]:
        """The biases that the Markov head gives."""
        return [] if self.markov is None else ["markov.bias.weight"]

    def init_from_target(self, embed: Embed, unembed: Unembedding) -> None:
        """The norm before the lm_head starts where the logits of random states have a standard deviation of 1.

        Some targets' own norm is large, for states that are far from random: with it training begins far off.
        """
        shared = self.draft_unembedding(unembed)
        deviation = float(shared.weight.float().square().sum(-1).mean().sqrt()) * abs(shared.scale)
        if deviation:
            nn.init.constant_(self.norm.weight, 1.0 / deviation)

    def _context(self, features: Features) -> Tensor:
        """Target features ``[B, T, A*H]`` -> c ``[B*T, H]``."""
        if features.aux_hidden is None:
            raise ValueError("a DFlash head was given features without auxiliary layers")
        context: Tensor = self.hidden_norm(self.fc(features.aux_hidden.flatten(0, 1).to(self.dtype)))
        return context

    def _block(self, tokens: Tensor, embed: Embed) -> Tensor:
        """Last tokens ``[n]`` -> the input of their blocks ``[n, S, H]``: the token, then masks."""
        first = embed(tokens).detach().to(self.dtype)
        if self.mask_embedding is not None:
            mask = self.mask_embedding.to(first.dtype)
        elif self.mask_token_id is not None:
            mask = embed(tokens.new_full((1,), self.mask_token_id)).detach().to(first.dtype)[0]
        else:
            return first[:, None]
        masks = mask.expand(first.shape[0], self.num_slots - 1, -1)
        return torch.cat([first[:, None], masks], dim=1)

    def forward(self, batch: DraftBatch, embed: Embed, unembed: Unembedding) -> list[DraftStep]:
        """See DraftHead: step k has offset k + 2; with more than ``max_anchors`` in a row, of a sample of them."""
        sample = choose_anchors(batch, self.max_anchors) if self.training and self.max_anchors else None
        chosen, share = sample or (None, None)
        anchors = batch.anchors if chosen is None else batch.anchors[chosen]
        ids, positions = batch.input_ids.flatten(), batch.position_ids.flatten()
        count, slots = anchors.numel(), self.num_slots
        last = ids.numel() - 1
        following = ids[(anchors[:, None] + 1 + torch.arange(slots, device=ids.device)).clamp(max=last)]
        hidden = self._block(following[:, 0], embed).flatten(0, 1)
        places = (positions[anchors, None] + 1 + torch.arange(slots, device=ids.device)).flatten()
        context = self._context(batch.features)
        attention = BlockAttention(layout_of(batch, chosen), count, self._inner(ids.device))
        for block in self.blocks:
            block.layer.rotary.reserve(batch.input_ids.shape[1] + slots + 1)
            hidden = self.recomputed(self._layer, block, attention, (hidden, places), (context, positions))
        # The token before the one that slot j drafts stands at offset j + 1 of its anchor, or one before.
        hidden = self.norm(hidden).view(count, slots, self.spec.hidden_size)[:, self.first :]
        before = following if not self.first else following[:, : slots - 1]
        return self._steps(hidden, before, self._trained_unembedding(unembed), (chosen, share))

    def _layer(
        self, block: NormedLayer, attention: BlockAttention, own: tuple[Tensor, Tensor], text: tuple[Tensor, Tensor]
    ) -> Tensor:
        """One layer over the blocks' states and positions, with the text's c and positions: next states ``[n * S, H]``."""
        hidden, places = own
        query, key, value = block.layer.project(block.input_layernorm(hidden), places)
        return block.layer.finish(attention(query, (key, value), block.layer.keys_values(*text)), hidden)

    def _steps(
        self, hidden: Tensor, before: Tensor, unembed: Unembedding, sample: tuple[Tensor | None, Tensor | None]
    ) -> list[DraftStep]:
        """Normed states ``[n, K, H]`` of the depths and the tokens before them ``[n, K]`` -> steps."""
        if self.markov is not None:
            hidden = torch.cat([hidden, self.markov.previous(before).to(hidden.dtype)], dim=-1)
        steps = []
        for k in range(hidden.shape[1]):
            own = hidden[:, k]
            confidence = None if self.confidence is None else self.confidence(own)[:, 0]
            steps.append(DraftStep(own, k + 2, unembed, *sample, confidence=confidence))
        return steps

    def _trained_unembedding(self, unembed: Unembedding) -> Unembedding:
        """The target's lm_head; with a Markov head ``[U, W_2]`` over ``[z; W_1[x]]``, which is the sum of both."""
        shared = self.draft_unembedding(unembed)
        if self.markov is None:
            return shared
        bias = self.markov.bias.weight
        return replace(shared, weight=torch.cat([shared.weight.detach().to(bias.dtype), bias], 1), product=None)

    def _inner(self, device: torch.device) -> Tensor:
        """``[S, S]`` bool: which slots of the block see which."""
        every = torch.ones(self.num_slots, self.num_slots, dtype=torch.bool, device=device)
        return every.tril() if self.causal else every

    def unembedding(self, unembed: Unembedding) -> Unembedding:
        """The target's lm_head over the draft vocabulary."""
        return self.draft_unembedding(unembed)

    def transition(self, tokens: Tensor) -> Tensor | None:
        """The bias of the Markov head."""
        if self.markov is None:
            return None
        bias: Tensor = self.markov.bias(self.markov.previous(tokens))
        return bias

    def estimate(self, hidden: Tensor, before: Tensor) -> Tensor | None:
        """The confidence head's."""
        if self.confidence is None:
            return None
        if self.markov is not None:
            hidden = torch.cat([hidden, self.markov.previous(before).to(hidden.dtype)], dim=-1)
        return torch.sigmoid(self.confidence(hidden)[:, 0])

    def init_state(self, max_length: int, tree: DraftTree, unembed: Unembedding) -> BlockState:
        """Keys and values of the text in every layer."""
        self.check_depth(tree)
        for block in self.blocks:
            block.layer.rotary.reserve(max_length + self.num_slots + 1)
        blocks = self.blocks
        caches = self.caches(len(blocks), blocks[0].layer, max_length, self.num_slots)
        return BlockState(caches, self.unembedding(unembed))

    def draft_blocks(self, states: Sequence[Any], contexts: Sequence[DraftContext], embed: Embed) -> Tensor:
        """Adds the keys of the committed positions, then runs the blocks behind them; all slots, as in training."""
        slots, device = self.num_slots, contexts[0].next_tokens.device
        counts = [context.next_tokens.shape[1] for context in contexts]
        ends = [context.start + count for context, count in zip(contexts, counts, strict=True)]
        # A block begins at the position of its first token, one behind the last with features.
        places = torch.cat(
            [
                *(torch.arange(end - count, end, device=device) for end, count in zip(ends, counts, strict=True)),
                *(torch.arange(end, end + slots, device=device) for end in ends),
            ]
        )
        text = self._context(Features.concatenate([context.features for context in contexts]))
        hidden = self._block(torch.cat([context.next_tokens[0, -1:] for context in contexts]), embed).flatten(0, 1)
        sizes = [*counts, *[slots] * len(counts)]
        for i, block in enumerate(self.blocks):
            rows = torch.cat([text, block.input_layernorm(hidden)])
            query, keys, values = (part.split(sizes) for part in block.layer.project(rows, places))
            attended = []
            for row, (state, end, count) in enumerate(zip(states, ends, counts, strict=True)):
                cache, own = state.caches[i], len(counts) + row
                cache.write(end - count, keys[row], values[row])
                cache.write(end, keys[own], values[own])
                attended.append(cache.attend(query[own], end + slots, self.causal))
            hidden = block.layer.finish(torch.cat(attended), hidden)
        normed: Tensor = self.norm(hidden).unflatten(0, (-1, slots))
        return normed[:, self.first :]
