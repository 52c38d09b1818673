"""P-EAGLE: EAGLE-3's layers over the text, with learned states in the place of tokens and features not known yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    Features,
    TargetSpec,
    Unembedding,
)
from specdraft.heads._blocks import DraftLayer, RMSNorm
from specdraft.heads._config import FusedLayersConfig, check_layer_init, check_shares
from specdraft.heads._fused import FusedFeaturesHead
from specdraft.heads._parallel import BlockAttention, BlockState, NormedLayer, ParallelHead
from specdraft.heads._sampled import sampled_anchors, share_of
from specdraft.heads._unroll import AnchorLayout
from specdraft.heads.base import register_head


@register_head("peagle")
@dataclass(slots=True, kw_only=True)
class PEagleConfig(FusedLayersConfig):
    """Settings of a P-EAGLE head."""

    num_layers: int = 4
    """Decoder layers; the first is EAGLE-3's, over token and feature side by side."""
    keep_ratio: float = 0.8
    """Depth k (from 0) is trained from a random share of keep_ratio ** k of the anchors, at least ``keep_floor``; 1 = all."""
    keep_floor: float = 0.2
    """The smallest share of the anchors that a depth is trained from."""
    layer_init: str = "auto"
    """What the first layer starts from: target = the target's last layer, random, or auto = the target's where it is built
    like the draft layer (the log says which). The layers behind it start as the identity."""

    def __post_init__(self) -> None:
        FusedLayersConfig.__post_init__(self)
        if self.num_draft_tokens < 2:
            raise ConfigError(
                f"head.num_draft_tokens: parallel drafts need a depth of at least 2, got {self.num_draft_tokens}; "
                "use head=eagle3 for one token"
            )
        if self.num_layers < 1:
            raise ConfigError(f"head.num_layers: must be at least 1, got {self.num_layers}; use e.g. 4")
        check_shares(keep_ratio=self.keep_ratio, keep_floor=self.keep_floor)
        check_layer_init(self.layer_init)

    def build(self, spec: TargetSpec) -> PEagleHead:
        """A head with random layer weights.

        Raises:
            ConfigError: an aux layer the target does not have.
        """
        return PEagleHead(self, spec)


class PEagleHead(FusedFeaturesHead, ParallelHead):
    """Slot 0 at t is EAGLE-3's row [e(x_{t+1}); g_t] with g = W [low; mid; high]; slots 1..K-1 are [m; W M] at t + 1, ...

    The vectors m (in the place of the embedding) and M (of the fused features) are learned and the same for every slot.
    All rows go through one causal stack: a slot sees the rows of the text up to t and the slots of its block before it.
    Slot k says softmax(lm_head(norm(output))) for token t + k + 2. Training draws for every depth a share of the anchors,
    each depth's among those of the depth before (conditional drop of tokens), and weighs them up again.
    Source: P-EAGLE (2026), its sections on the architecture and on training.
    """

    def __init__(self, config: PEagleConfig, spec: TargetSpec) -> None:
        super().__init__(config, spec)
        self.layer_init = config.layer_init
        self.keep_ratio, self.keep_floor = config.keep_ratio, config.keep_floor
        self.aux_layers = config.layers_of(spec)
        size, count = spec.hidden_size, len(self.aux_layers)
        self.fc = nn.Linear(count * size, size, bias=False)
        self.input_layernorm = RMSNorm(size, spec.rms_norm_eps)
        self.hidden_norm = RMSNorm(size, spec.rms_norm_eps)
        self.layer = DraftLayer(spec, config, 2 * size)
        self.deeper = nn.ModuleList(NormedLayer(spec, config) for _ in range(config.num_layers - 1))
        for block in self._deeper():
            block.start_as_identity()
        self.norm = RMSNorm(size, spec.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size or spec.vocab_size, bias=False)
        self.mask_embedding = nn.Parameter(torch.randn(size) * 0.02)
        self.mask_hidden = nn.Parameter(torch.randn(count * size) * 0.02)

    def _rows(self, features: Features, following: Tensor, embed: Embed, masks: int) -> tuple[Tensor, Tensor]:
        """Input and residual of the first layer: rows of the text ``[M, .]``, then ``masks`` equal rows of slots.

        features: ``[B, T, ·]`` with B * T = M. following: ``[M]`` the token after each.
        """
        if features.aux_hidden is None:
            raise ValueError("a P-EAGLE head was given features without auxiliary layers")
        aux = features.aux_hidden.flatten(0, 1).to(self.dtype)
        hidden = self.fc(torch.cat([aux, self.mask_hidden[None].to(aux.dtype)]))
        embedded = embed(following).detach().to(self.dtype)
        embedded = torch.cat([embedded, self.mask_embedding[None].to(embedded.dtype)])
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.input_layernorm(embedded).to(normed.dtype), normed], -1)
        x, hidden = (torch.cat([part[:-1], part[-1:].expand(masks, -1)]) for part in (x, hidden))
        return x, hidden

    def _layers(self) -> list[tuple[nn.Module | None, DraftLayer]]:
        """The norm before every layer, if it has one of its own, and the layer."""
        return [(None, self.layer), *((block.input_layernorm, block.layer) for block in self._deeper())]

    def _deeper(self) -> list[NormedLayer]:
        """The layers behind the first."""
        return cast(list[NormedLayer], list(self.deeper))

    def _reserve(self, length: int) -> None:
        """Makes every layer's rotary table hold ``length`` positions."""
        for _, layer in self._layers():
            layer.rotary.reserve(length)

    def forward(self, batch: DraftBatch, embed: Embed, unembed: Unembedding) -> list[DraftStep]:
        """See DraftHead: step k has offset k + 2, from a sample of the anchors in training."""
        ratio, depths = self.keep_ratio if self.training else 1.0, self.config.num_draft_tokens
        chosen = sampled_anchors(batch, depths, ratio, self.keep_floor)
        count, slots, text = batch.anchors.numel(), self.config.num_draft_tokens, batch.input_ids.numel()
        ids, positions = batch.input_ids.flatten(), batch.position_ids.flatten()
        every = torch.arange(count, device=ids.device)
        masks = [(every if own is None else own, slot) for slot, own in enumerate(chosen) if slot]
        owner = torch.cat([own for own, _ in masks])
        slot = torch.cat([torch.full_like(own, place) for own, place in masks])
        places = torch.cat([positions, positions[batch.anchors[owner]] + slot])
        self._reserve(batch.input_ids.shape[1] + slots)
        # The token after the end of a row is read from the next row; only rows no anchor sees come from it.
        x, hidden = self._rows(batch.features, ids.roll(-1), embed, owner.numel())
        # Every slot sees the rows of the text up to its anchor, slot 0 among them, and the masks of its block up to itself.
        inner = torch.ones(slots, slots, dtype=torch.bool, device=ids.device).tril()
        inner[:, 0] = False
        layout, place = AnchorLayout.of(batch), owner * slots + slot
        attention, mask = BlockAttention(layout, count, inner, place), TextMask.of(batch)
        *lower, top = self._layers()

        def through(layer: DraftLayer, x: Tensor, hidden: Tensor) -> Tensor:
            query, key, value = layer.project(x, places)
            kept = key[:text], value[:text]
            seen = mask.attend(query[:text], *kept)
            drafted = attention(query[text:], (key[text:], value[text:]), kept)
            return layer.finish(torch.cat([seen, drafted]), hidden)

        for norm, layer in lower:
            hidden = self.recomputed(through, layer, x if norm is None else norm(hidden), hidden)
        # Nothing reads the other rows of the text behind the last layer.
        wanted = torch.cat([batch.anchors, torch.arange(text, text + owner.numel(), device=ids.device)])
        whole = BlockAttention(layout, count, inner, torch.cat([every * slots, place]))
        norm, layer = top
        query, key, value = layer.project(x if norm is None else norm(hidden), places)
        attended = whole(query[wanted], (key[wanted], value[wanted]), (key[:text], value[:text]))
        normed = self.norm(layer.finish(attended, hidden[wanted]))
        parts = normed.split([count, *(own.numel() for own, _ in masks)])
        shared = self.unembedding(unembed)
        return [
            DraftStep(part, k + 2, shared, own, share_of(batch, own))
            for k, (own, part) in enumerate(zip(chosen, parts, strict=True))
        ]

    def unembedding(self, unembed: Unembedding) -> Unembedding:
        """The head's own lm_head, finished (scaled, soft-capped) as the target's logits are."""
        return Unembedding(self.lm_head.weight, None, unembed.scale, unembed.softcap, self.lm_head)

    def init_state(self, max_length: int, tree: DraftTree, unembed: Unembedding) -> BlockState:
        """Keys and values of the text in every layer."""
        self.check_depth(tree)
        slots = self.config.num_draft_tokens
        self._reserve(max_length + slots)
        return BlockState(self.caches(1 + len(self.deeper), self.layer, max_length, slots), self.unembedding(unembed))

    def draft_blocks(self, states: Sequence[Any], contexts: Sequence[DraftContext], embed: Embed) -> Tensor:
        """One causal pass over the committed positions of every row and the masks behind them."""
        slots, device = self.config.num_draft_tokens, contexts[0].next_tokens.device
        counts = [context.next_tokens.shape[1] for context in contexts]
        ends = [context.start + count for context, count in zip(contexts, counts, strict=True)]
        sizes, masks = [count + slots - 1 for count in counts], (slots - 1) * len(counts)
        features = Features.concatenate([context.features for context in contexts])
        following = torch.cat([context.next_tokens[0] for context in contexts])
        x, hidden = self._rows(features, following, embed, masks)
        if len(counts) > 1:  # every row's text, then its masks
            parts = zip(torch.arange(x.shape[0] - masks, device=device).split(counts), range(len(counts)), strict=True)
            behind = torch.arange(x.shape[0] - masks, x.shape[0], device=device).view(len(counts), -1)
            order = torch.cat([part for text, row in parts for part in (text, behind[row])])
            x, hidden = x[order], hidden[order]
        places = torch.cat(
            [torch.arange(end - n, end + slots - 1, device=device) for end, n in zip(ends, counts, strict=True)]
        )
        layers = self._layers()
        for i, (norm, layer) in enumerate(layers):
            last = i + 1 == len(layers)
            project = layer.project(x if norm is None else norm(hidden), places)
            attended = []
            for state, end, query, key, value in zip(
                states, ends, *(part.split(sizes) for part in project), strict=True
            ):
                state.caches[i].write(end + slots - 1 - key.shape[0], key, value)
                # Behind the last layer nothing reads the other rows.
                own = query[-slots:] if last else query
                attended.append(state.caches[i].attend(own, end + slots - 1, causal=True))
            if last:
                hidden = torch.cat([part[-slots:] for part in hidden.split(sizes)])
            hidden = layer.finish(torch.cat(attended), hidden)
        normed: Tensor = self.norm(hidden).unflatten(0, (-1, slots))
        return normed


@dataclass(frozen=True)
class TextMask:
    """Causal attention within the documents of a batch. visible: ``[B, 1, T, T]`` bool, True = the row sees the column."""

    visible: Tensor

    @classmethod
    def of(cls, batch: DraftBatch) -> TextMask:
        """The mask of a batch; every row sees itself, padding too."""
        same = batch.document_ids[:, :, None] == batch.document_ids[:, None]
        return cls(torch.ones_like(same).tril()[:, None] & same[:, None])

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """``[B*T, heads, d]`` and ``[B*T, kv, d]`` twice -> ``[B*T, heads * d]``."""
        rows, length = self.visible.shape[0], self.visible.shape[-1]
        q, k, v = (part.view(rows, length, *part.shape[1:]).transpose(1, 2) for part in (query, key, value))
        grouped = key.shape[1] != query.shape[1]
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.visible, enable_gqa=grouped)
        return out.transpose(1, 2).reshape(rows * length, -1)
