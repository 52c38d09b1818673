"""Heads that draft all depths in one pass: a block of slots per anchor, its attention, and drafts from its hidden states."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from specdraft.core.tree import DraftTree, Proposal, TreeGrowth
from specdraft.core.types import DraftBatch, DraftContext, Embed, TargetSpec, Unembedding
from specdraft.heads._blocks import DraftLayer, RMSNorm
from specdraft.heads._config import DraftLayerConfig
from specdraft.heads._dynamic import GrowingTree, likeliest
from specdraft.heads._unroll import AnchorLayout
from specdraft.heads._unroll_batch import choose, draft
from specdraft.heads._unroll_state import TreePlan
from specdraft.heads.base import DraftHead, TokenPicker


class ParallelHead(DraftHead):
    """One pass over the slots of a block gives the hidden states of all depths; a tree is filled in from them.

    A kind supplies ``draft_blocks``, ``transition`` where a depth depends on the token before it, and ``unembedding``.
    """

    grows = True

    @abstractmethod
    def draft_blocks(self, states: Sequence[Any], contexts: Sequence[DraftContext], embed: Embed) -> Tensor:
        """Takes in what was committed in every row; hidden states ``[B, K, H]`` of all depths after its last position."""

    @abstractmethod
    def unembedding(self, unembed: Unembedding) -> Unembedding:
        """Hidden states -> logits over the draft vocabulary, given the target's unembedding."""

    def transition(self, tokens: Tensor) -> Tensor | None:
        """What tokens ``[m]`` (target ids) add to the raw logits of the depth after them, ``[m, D]``; None = nothing."""
        return None

    def estimate(self, hidden: Tensor, before: Tensor) -> Tensor | None:
        """Chances ``[m]`` that sampling accepts what hidden states ``[m, H]`` draft behind tokens ``[m]``; None = unknown."""
        return None

    def propose(self, state: Any, context: DraftContext, embed: Embed, tree: DraftTree) -> Proposal:
        """The block's most likely tokens by rank; where depths depend on each other, level by level."""
        return self.propose_batch([state], [context], embed, tree)[0]

    def propose_batch(
        self, states: Sequence[Any], contexts: Sequence[DraftContext], embed: Embed, tree: DraftTree
    ) -> list[Proposal]:
        """See DraftHead: the rows share every product with a weight."""
        state = states[0]
        hidden = self.draft_blocks(states, contexts, embed)[:, : tree.max_depth]
        raw = state.raw(hidden.flatten(0, 1)).unflatten(0, (len(states), -1))
        roots = torch.cat([context.next_tokens[0, -1:] for context in contexts])
        pickers = [TokenPicker(self, context) for context in contexts]
        plan = state.plan(tree, raw.device)
        bias = self.transition(roots)
        if bias is None:
            logits = state.unembed.finish(raw)
            ranked = [picker.ranked(own, tree.max_rank + 1) for picker, own in zip(pickers, logits, strict=True)]
            drafts = [
                picker.proposal(own[plan.depths, plan.ranks], tree, plan.queries)
                for picker, own in zip(pickers, ranked, strict=True)
            ]
        else:
            drafted: list[Tensor] = []
            for depth, level in enumerate(plan.levels):
                if depth:
                    bias = self.transition(drafted[-1].index_select(1, level.query_tokens).flatten())
                assert bias is not None
                logits = raw[:, depth, None] + bias.unflatten(0, (len(states), -1))
                drafted.append(choose(pickers, state.unembed.finish(logits.flatten(0, 1)), level))
            found = torch.cat(drafted, dim=1)
            drafts = [picker.proposal(own, tree) for picker, own in zip(pickers, found, strict=True)]
        if not tree.is_chain:
            return drafts
        rows = zip(drafts, hidden, roots, strict=True)
        return [self._estimated(proposal, own, root) for proposal, own, root in rows]

    def _estimated(self, proposal: Proposal, hidden: Tensor, root: Tensor) -> Proposal:
        """A chain with the estimate of every depth, if the head makes any."""
        before = torch.cat([root[None], proposal.tokens[0, :-1]])
        return replace(proposal, confidence=self.estimate(hidden, before))

    def grow(self, state: Any, context: DraftContext, embed: Embed, growth: TreeGrowth) -> Proposal:
        """The likeliest paths by the product of the probabilities of their depths, best first (DDTree)."""
        return self.grow_batch([state], [context], embed, growth)[0]

    def grow_batch(
        self, states: Sequence[Any], contexts: Sequence[DraftContext], embed: Embed, growth: TreeGrowth
    ) -> list[Proposal]:
        """See DraftHead: the rows share the block; their trees grow one after another."""
        hidden = self.draft_blocks(states, contexts, embed)[:, : growth.depth]
        raw = states[0].raw(hidden.flatten(0, 1)).unflatten(0, (len(states), -1))
        rows = zip(raw, contexts, strict=True)
        return [self._grown(states[0].unembed, own, context.next_tokens[0, -1:], growth) for own, context in rows]

    def _grown(self, unembed: Unembedding, raw: Tensor, root: Tensor, growth: TreeGrowth) -> Proposal:
        """The tree of one row from the raw logits ``[depth, D]``."""
        bias = self.transition(root)
        # Where depths do not depend on each other, a beam of all that can be chosen costs no more.
        tree = GrowingTree(growth.total_tokens if bias is None else growth.top_k, raw.device)
        for depth in range(growth.depth):
            width = tree.tokens.numel() if depth else 1
            if depth and bias is not None:
                bias = self.transition(self.to_target_ids(tree.tokens))
            logits = raw[depth : depth + 1] if bias is None else raw[depth] + bias
            ids, scores = likeliest(unembed.finish(logits), growth.top_k)
            tree.extend(ids.expand(width, -1), scores.expand(width, -1))
        return draft(self, tree, growth)

    def caches(self, num_layers: int, layer: DraftLayer, max_length: int, num_slots: int) -> list[KeyValueCache]:
        """Empty caches of ``num_layers`` layers like ``layer``: ``max_length`` positions and the slots behind them."""
        shape = (1, layer.num_kv_heads, max_length + num_slots, layer.head_dim)
        device = layer.qkv_proj.weight.device

        def empty() -> Tensor:
            return torch.empty(shape, dtype=self.dtype, device=device)

        return [KeyValueCache(empty(), empty()) for _ in range(num_layers)]


@dataclass(frozen=True)
class BlockPlan:
    """How a tree is filled in from the depths of a block, prepared once per tree.

    levels: for depths that depend on each other. depths, ranks: ``[N]`` int64, of every node, depths from 0. queries:
    ``[Q]`` int64, the depth of the children of every row with some, the root first.
    """

    levels: list[Any]
    depths: Tensor
    ranks: Tensor
    queries: Tensor

    @classmethod
    def of(cls, tree: DraftTree, device: torch.device) -> BlockPlan:
        """The plan of ``tree``."""
        queries = [0, *(tree.depths[node] for node in sorted(set(tree.parents)) if node >= 0)]
        return cls(
            TreePlan.of(tree, 0, device).levels,
            torch.tensor(tree.depths, device=device) - 1,
            torch.tensor(tree.ranks, device=device),
            torch.tensor(queries, device=device),
        )


@dataclass(frozen=True)
class KeyValueCache:
    """Keys and values of one layer for one decoded row, ``[1, kv_heads, length, head_dim]`` each."""

    keys: Tensor
    values: Tensor

    def write(self, start: int, keys: Tensor, values: Tensor) -> None:
        """Stores ``[n, kv_heads, head_dim]`` at rows ``start .. start + n - 1``."""
        stop = start + keys.shape[0]
        self.keys[0, :, start:stop] = keys.transpose(0, 1)
        self.values[0, :, start:stop] = values.transpose(0, 1)

    def attend(self, query: Tensor, filled: int, causal: bool) -> Tensor:
        """``[m, heads, head_dim]`` over the first ``filled`` rows -> ``[m, heads * head_dim]``.

        causal: the queries are the last m of these rows, and each sees the rows up to its own.
        """
        count = query.shape[0]
        mask = None
        if causal and count > 1:
            rows = torch.arange(filled, device=query.device)
            mask = rows[None] <= rows[filled - count :, None]
        out = nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            self.keys[:, :, :filled],
            self.values[:, :, :filled],
            attn_mask=mask,
            enable_gqa=self.keys.shape[1] != query.shape[1],
        )
        return out[0].transpose(0, 1).reshape(count, -1)


class BlockState:
    """Decoding state of one row: the caches of the layers, the unembedding, and what is prepared per tree."""

    def __init__(self, caches: list[KeyValueCache], unembed: Unembedding) -> None:
        self.caches = caches
        self.unembed = unembed
        self._product = replace(unembed, scale=1.0, softcap=None)
        self._plans: dict[DraftTree, BlockPlan] = {}

    def raw(self, hidden: Tensor) -> Tensor:
        """``[m, H]`` -> products ``[m, D]`` with the lm_head, before scale and soft-cap."""
        return self._product(hidden)

    def plan(self, tree: DraftTree, device: torch.device) -> BlockPlan:
        """The prepared plan of ``tree``."""
        if tree not in self._plans:
            self._plans[tree] = BlockPlan.of(tree, device)
        return self._plans[tree]


class NormedLayer(nn.Module):
    """A decoder layer with its norm on the input: ``h + Attention(norm(h))``, then the MLP in the same way."""

    def __init__(self, spec: TargetSpec, config: DraftLayerConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.layer = DraftLayer(spec, config, spec.hidden_size)

    @torch.no_grad()
    def start_as_identity(self) -> None:
        """The branches add nothing at first, so that a layer put on top of others leaves what these say."""
        self.layer.o_proj.weight.zero_()
        self.layer.down_proj.weight.zero_()


class BlockAttention:
    """Attention of the slots of every anchor over the keys of the text up to the anchor and over the block's own keys.

    Args of the constructor:
        layout: of the N anchors.
        inner: ``[S, S]`` bool, True = the row's slot sees the column's slot.
        place: ``[R]`` int64, anchor * S + slot of every row that is there; None = all N * S of them, in this order. A slot
            that is there may see no slot that is not.
    """

    def __init__(self, layout: AnchorLayout, num_anchors: int, inner: Tensor, place: Tensor | None = None) -> None:
        self.layout, self.num_anchors, self.place = layout, num_anchors, place
        self.slots = inner.shape[0]
        bias = torch.zeros(layout.visible.shape, device=inner.device)
        self.outer = bias.masked_fill_(~layout.visible, float("-inf"))
        self.inner = torch.zeros(inner.shape, device=inner.device).masked_fill_(~inner, float("-inf"))

    def __call__(self, query: Tensor, own: tuple[Tensor, Tensor], text: tuple[Tensor, Tensor]) -> Tensor:
        """Queries ``[R, heads, d]``, own keys and values ``[R, kv, d]``, the text's ``[B*T, kv, d]`` -> ``[R, heads * d]``."""
        rows, width, length = self.layout.visible.shape
        heads, dim = query.shape[1:]
        kv_heads = own[0].shape[1]
        group, slots, count = heads // kv_heads, self.slots, self.num_anchors
        query, key, value = (self._whole(part) for part in (query * dim**-0.5, *own))
        query = query.view(count, slots, kv_heads, group, dim)
        key, value = key.view(count, slots, kv_heads, dim), value.view(count, slots, kv_heads, dim)
        text_keys = text[0].view(rows, length, kv_heads, dim).permute(0, 2, 3, 1)
        text_values = text[1].view(rows, length, kv_heads, dim).transpose(1, 2)

        grid = query.new_zeros(rows * width, slots, kv_heads, group, dim).index_copy(0, self.layout.flat, query)
        grid = grid.view(rows, width, slots, kv_heads, group, dim).permute(0, 3, 4, 1, 2, 5)
        grid = grid.reshape(rows, kv_heads, group * width * slots, dim)
        outer = torch.matmul(grid, text_keys).view(rows, kv_heads, group, width, slots, length).float()
        outer = outer + self.outer[:, None, None, :, None]
        inner = torch.einsum("nikgd,njkd->nkgij", query, key).float() + self.inner
        padded = inner.new_zeros(rows * width, kv_heads, group, slots, slots).index_copy(0, self.layout.flat, inner)
        padded = padded.view(rows, width, kv_heads, group, slots, slots).permute(0, 2, 3, 1, 4, 5)
        weights = torch.cat([outer, padded], -1).softmax(-1).to(text_values.dtype)

        seen = torch.matmul(
            weights[..., :length].reshape(rows, kv_heads, group * width * slots, length), text_values
        ).view(rows, kv_heads, group, width, slots, dim)
        seen = seen.permute(0, 3, 4, 1, 2, 5).reshape(rows * width, slots, kv_heads, group, dim)
        within = weights[..., length:].permute(0, 3, 1, 2, 4, 5).reshape(rows * width, kv_heads, group, slots, slots)
        within = torch.einsum("nkgij,njkd->nikgd", within.index_select(0, self.layout.flat), value)
        out = (seen.index_select(0, self.layout.flat) + within).reshape(count * slots, heads * dim)
        return out if self.place is None else out.index_select(0, self.place)

    def _whole(self, part: Tensor) -> Tensor:
        """Rows ``[R, ...]`` in their places among all ``[N * S, ...]``."""
        if self.place is None:
            return part
        return part.new_zeros(self.num_anchors * self.slots, *part.shape[1:]).index_copy(0, self.place, part)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def layout_of(batch: DraftBatch, chosen: Tensor | None) -> AnchorLayout:
    """The layout of the anchors ``chosen`` (``[n]`` int64 places among those of the batch; None = all)."""
    layout: AnchorLayout = AnchorLayout.of(batch if chosen is None else replace(batch, anchors=batch.anchors[chosen]))
    return layout


@torch.compiler.disable  # type: ignore[untyped-decorator]
def choose_anchors(batch: DraftBatch, most: int) -> tuple[Tensor, Tensor] | None:
    """At most ``most`` anchors of every row, drawn at random, and for how many each stands; None where all are kept."""
    real = batch.drafting.nonzero().flatten()  # one that only pads must not take the place of another
    row = batch.anchors[real] // batch.input_ids.shape[1]
    per_row = torch.bincount(row, minlength=batch.input_ids.shape[0])
    if not row.numel() or int(per_row.max()) <= most:
        return None
    # Sorted by row, then by a random number: the first of a row are a sample of it.
    order = (row.double() + torch.rand(row.shape[0], dtype=torch.float64, device=row.device)).argsort()
    first = per_row.cumsum(0) - per_row
    place = torch.arange(row.numel(), device=row.device) - first[row[order]]
    chosen = order[place < most].sort().values
    share = per_row.float() / per_row.clamp(min=1, max=most).float()
    return real[chosen], share[row[chosen]]
