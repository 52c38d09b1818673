"""Heads that draft one token after another through a decoder layer: training unroll and decoding with the same attention."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specdraft.core.shapes import missing_rows
from specdraft.core.tree import DraftTree, Proposal, TreeGrowth
from specdraft.core.types import (
    DraftBatch,
    DraftContext,
    DraftStep,
    Embed,
    Features,
    TargetSpec,
    Unembedding,
)
from specdraft.heads._blocks import DraftLayer
from specdraft.heads._compiled import CompiledPass
from specdraft.heads._config import DraftLayerConfig
from specdraft.heads._dynamic import GrowingTree, likeliest
from specdraft.heads._sampled import sampled_anchors, share_of
from specdraft.heads._unroll_batch import grow_batch, propose_batch
from specdraft.heads._unroll_state import TreeLevel, UnrollState
from specdraft.heads.base import DraftHead, TokenPicker


class UnrolledHead(DraftHead):
    """The recurrence of EAGLE: hidden h and the next token's embedding e give the next hidden and a prediction.

    A kind supplies ``seed`` (the target's features -> first hidden), ``mix`` (h, e -> layer input and residual),
    ``readout`` (layer output -> what is unembedded) and, if it is not the output itself, ``feedback`` (layer output ->
    next hidden). ``detach_steps``: no gradient goes through a hidden state into the step before.

    At unroll step s the row of anchor t has position t + s, sees the step-0 keys of positions up to t and its own keys of
    steps 1..s, which is what it sees when decoding (EAGLE-3, figure 6; the embeddings are the text's tokens, the hidden
    states its own). ``keep_ratio``: in training step s goes on from a random share of keep_ratio ** s of the anchors.
    """

    layer: DraftLayer
    grows = True
    detach_steps = False
    keep_ratio = 1.0

    def __init__(self, config: DraftLayerConfig, spec: TargetSpec) -> None:
        super().__init__(config, spec)
        self.unroll_steps = config.trained_depths
        self.compiled_pass: CompiledPass | None = None

    @abstractmethod
    def seed(self, features: Features) -> Tensor:
        """Target features ``[B, T, ·]`` -> first hidden states ``[B*T, H]``."""

    @abstractmethod
    def mix(self, hidden: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden ``[M, H]`` at t, embeddings ``[M, H]`` of token t + 1 -> layer input ``[M, ·]``, residual ``[M, H]``."""

    @abstractmethod
    def readout(self, output: Tensor) -> Tensor:
        """Layer output ``[M, H]`` -> hidden states to unembed ``[M, H]``."""

    def feedback(self, output: Tensor) -> Tensor:
        """Layer output ``[M, H]`` -> the hidden states that the next step starts from ``[M, H]``."""
        return output

    @abstractmethod
    def unembedding(self, unembed: Unembedding) -> Unembedding:
        """Readout -> logits over the draft vocabulary, given the target's unembedding."""

    def forward(self, batch: DraftBatch, embed: Embed, unembed: Unembedding) -> list[DraftStep]:
        """See DraftHead: ``unroll_steps`` steps, step s has offset s + 2."""
        return self._unroll(batch, embed, unembed, self.unroll_steps, self.keep_ratio if self.training else 1.0)

    def draft_steps(self, batch: DraftBatch, embed: Embed, unembed: Unembedding) -> list[DraftStep]:
        """See DraftHead: the unroll to the depth of decoding."""
        return self._unroll(batch, embed, unembed, self.config.num_draft_tokens)

    def _unroll(
        self, batch: DraftBatch, embed: Embed, unembed: Unembedding, num_steps: int, keep_ratio: float = 1.0
    ) -> list[DraftStep]:
        ids = batch.input_ids.flatten()
        last = ids.numel() - 1
        self.layer.rotary.reserve(batch.input_ids.shape[1] + num_steps)
        positions = batch.position_ids.flatten()
        layout = AnchorLayout.of(batch)
        # The token after the end of a row is read from the next row; only keys no anchor sees come from it.
        x, residual = self.mix(self.seed(batch.features), self._embed(embed, ids.roll(-1)))
        keys, values = self.layer.keys_values(x, positions)
        anchors, anchor_positions = batch.anchors, positions[batch.anchors]
        query = self.layer.queries(x[anchors], anchor_positions)
        residual = residual[anchors]
        attention = AnchorAttention(keys, values, layout)
        output = self.recomputed(self._layer_output, attention.frozen(), query, residual)
        steps = [DraftStep(self.readout(output), 2, self.unembedding(unembed))]
        sampled = sampled_anchors(batch, num_steps, keep_ratio)
        for s in range(1, num_steps):
            chosen = sampled[s]
            if chosen is not None:
                before = sampled[s - 1]
                rows = chosen if before is None else torch.searchsorted(before, chosen)
                anchors, anchor_positions, output = anchors[rows], anchor_positions[rows], output[rows]
                attention = attention.of(rows, AnchorLayout.of(replace(batch, anchors=anchors)))
            tokens = ids[(anchors + 1 + s).clamp(max=last)]
            hidden = self.feedback(output.detach() if self.detach_steps else output)
            x, residual = self.mix(hidden, self._embed(embed, tokens))
            query, key, value = self.layer.project(x, anchor_positions + s)
            attention.append(key, value)
            output = self.recomputed(self._layer_output, attention.frozen(), query, residual)
            steps.append(
                DraftStep(self.readout(output), s + 2, self.unembedding(unembed), chosen, share_of(batch, chosen))
            )
        return steps

    def _layer_output(self, attention: AnchorAttention, query: Tensor, residual: Tensor) -> Tensor:
        """The layer behind its queries: ``[N, heads, head_dim]`` and the residual ``[N, H]`` -> ``[N, H]``."""
        return self.layer.finish(attention(query), residual)

    def _embed(self, embed: Embed, ids: Tensor) -> Tensor:
        """Embeddings without a graph, in the head's dtype: the target's table is frozen."""
        return embed(ids).detach().to(self.dtype)

    def init_state(self, max_length: int, tree: DraftTree, unembed: Unembedding) -> UnrollState:
        """A key-value cache for ``max_length`` positions and the drafted nodes behind them."""
        self.check_depth(tree)
        device = self.layer.qkv_proj.weight.device
        self.layer.rotary.reserve(max_length + tree.max_depth)
        shape = (1, self.layer.num_kv_heads, max_length + len(tree), self.layer.head_dim)
        # Zeros: a compiled pass multiplies what a mask hides, and what was never written may be NaN.
        empty = [torch.zeros(shape, dtype=self.dtype, device=device) for _ in range(2)]
        return UnrollState(empty[0], empty[1], self.unembedding(unembed), max_length)

    def propose(self, state: Any, context: DraftContext, embed: Embed, tree: DraftTree) -> Proposal:
        """Takes in what was committed, then drafts level by level: one pass of the layer each."""
        output, logits, position, length = self._take_in(state, context, embed)
        plan = state.plan(tree, position.device)
        picker = TokenPicker(self, context)
        drafted = [self._choose(logits, plan.levels[0], picker)]
        written = 0
        for depth, level in enumerate(plan.levels[1:], start=1):
            hidden = self.feedback(output.index_select(0, level.query_parents))
            embedded = self._embed(embed, drafted[-1].index_select(0, level.query_tokens))
            positions = position.expand(hidden.shape[0]) + depth
            output, logits = self.layer_pass(state, hidden, embedded, positions, length + written, level.mask)
            written += hidden.shape[0]
            drafted.append(self._choose(logits, level, picker))
        return picker.proposal(torch.cat(drafted), tree)

    def propose_batch(
        self, states: Sequence[Any], contexts: Sequence[DraftContext], embed: Embed, tree: DraftTree
    ) -> list[Proposal]:
        """See DraftHead: the rows share every product with a weight."""
        return propose_batch(self, states, contexts, embed, tree)

    def grow_batch(
        self, states: Sequence[Any], contexts: Sequence[DraftContext], embed: Embed, growth: TreeGrowth
    ) -> list[Proposal]:
        """See DraftHead: the rows share every product with a weight."""
        return grow_batch(self, states, contexts, embed, growth)

    def grow(self, state: Any, context: DraftContext, embed: Embed, growth: TreeGrowth) -> Proposal:
        """See DraftHead: each level is one pass of the layer over the ``top_k`` nodes of the beam."""
        output, logits, position, length = self._take_in(state, context, embed)
        tree = GrowingTree(growth.top_k, position.device)
        tree.extend(*likeliest(logits, growth.top_k))
        own = torch.eye(growth.top_k, dtype=torch.bool, device=position.device)
        ancestors = own
        for depth in range(1, growth.depth):
            hidden = self.feedback(output.index_select(0, tree.origin))
            embedded = self._embed(embed, self.to_target_ids(tree.tokens))
            filled = length + (depth - 1) * growth.top_k
            mask = torch.cat([own.new_ones(growth.top_k, length), ancestors], dim=1)
            positions = position.expand(growth.top_k) + depth
            output, logits = self.layer_pass(state, hidden, embedded, positions, filled, mask)
            tree.extend(*likeliest(logits, growth.top_k))
            ancestors = torch.cat([ancestors.index_select(0, tree.origin), own], dim=1)
        tokens, grown = tree.best(growth.total_tokens)
        return Proposal(self.to_target_ids(tokens)[None], grown, finite=tree.finite)

    def _take_in(self, state: UnrollState, context: DraftContext, embed: Embed) -> tuple[Tensor, Tensor, Tensor, int]:
        """Adds the keys of the committed positions, from target features, so that drafted ones are overwritten.

        Returns the layer's output ``[1, H]`` and logits ``[1, D]`` at the last of them, its position ``[1]``, and the
        number of rows filled.
        """
        start, count = context.start, context.next_tokens.shape[1]
        positions = torch.arange(start, start + count, device=context.next_tokens.device)
        hidden, embedded = self.seed(context.features), self._embed(embed, context.next_tokens[0])
        output, logits = self.layer_pass(state, hidden, embedded, positions, start, None, last_only=True)
        return output, logits, positions[-1:], start + count

    def compile_pass(self) -> None:
        """See DraftHead: the pass of the layer over one row's cache."""
        if self.compiled_pass is None:
            self.compiled_pass = CompiledPass(self)

    def layer_pass(
        self,
        state: UnrollState,
        hidden: Tensor,
        embedded: Tensor,
        positions: Tensor,
        start: int,
        mask: Tensor | None,
        last_only: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The layer over n rows whose keys and values are written at ``start`` of the cache.

        Args:
            state: whose cache.
            hidden: ``[n, H]``.
            embedded: ``[n, H]``, of the tokens after them.
            positions: ``[n]`` int64.
            start: rows filled before.
            mask: ``[n, ...]`` bool, its columns aligned to the right end of the filled rows; True = visible; None = each
                row sees all.
            last_only: the rows are only taken in, and but the last is asked; ``mask`` is None.

        Returns:
            The layer's output ``[n, H]`` and the logits ``[n, D]``; of one row with ``last_only``.
        """
        if self.compiled_pass is not None:
            found = self.compiled_pass(state, hidden, embedded, positions, start, mask, last_only)
            if found is not None:
                return found
        x, residual = self.mix(hidden, embedded)
        # One product for all three, though only the last row's query may be used: it goes through the packed weight.
        query, *both = self.layer.project(x, positions)
        state.write(start, *both)
        if last_only:
            query, residual = query[-1:], residual[-1:]
        output = self.layer.finish(state.attend(query, start + positions.numel(), mask), residual)
        return output, state.unembed(self.readout(output))

    def _choose(self, logits: Tensor, level: TreeLevel, picker: TokenPicker) -> Tensor:
        """Target ids ``[n]`` of a level's nodes: the tokens of their ranks after their parents' outputs."""
        return picker.ranked(logits, level.max_rank + 1)[level.rows, level.ranks]


@dataclass(frozen=True)
class AnchorLayout:
    """Where the N flat anchors stand in a padded grid of rows, and which step-0 keys each may see.

    flat: ``[N]`` int64, place of every anchor in the grid ``[B * M]``; M: most anchors of a row.
    visible: ``[B, M, T]`` bool, True = the anchor's row may attend the key (same document, not later).
    """

    flat: Tensor
    visible: Tensor

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def of(cls, batch: DraftBatch) -> AnchorLayout:
        """The layout of a batch; rows without anchors and padding of the grid see their own column 0 only.

        Its size depends on the data, so it stays outside what torch.compile compiles: a head makes it first.
        """
        rows, length = batch.input_ids.shape
        row, column = batch.anchors // length, batch.anchors % length
        per_row = torch.bincount(row, minlength=rows)
        width = max(int(per_row.max()), 1) if batch.anchors.numel() else 1
        width += missing_rows(width, row.device)
        first = per_row.cumsum(0) - per_row
        place = torch.arange(batch.anchors.numel(), device=row.device) - first[row]
        flat = row * width + place
        columns = torch.arange(length, device=row.device)
        document = batch.document_ids.flatten()[batch.anchors]
        seen = (columns[None] <= column[:, None]) & (batch.document_ids[row] == document[:, None])
        visible = torch.zeros(rows * width, length, dtype=torch.bool, device=row.device)
        visible[:, 0] = True  # a softmax over nothing would be NaN
        visible[flat] = seen
        return cls(flat, visible.view(rows, width, length))

    def bias(self) -> Tensor:
        """``[B, M, T]`` float32, 0 where the key is visible, else -inf."""
        return torch.zeros(self.visible.shape, device=self.visible.device).masked_fill_(~self.visible, float("-inf"))


class AnchorAttention:
    """Attention of anchors over step-0 keys (masked) and over their own later keys (one per step, the same row only)."""

    def __init__(self, keys: Tensor, values: Tensor, layout: AnchorLayout) -> None:
        rows, _, length = layout.visible.shape
        self.layout = layout
        self.keys = keys.view(rows, length, *keys.shape[1:]).permute(0, 2, 3, 1)  # [B, kv, d, T]
        self.values = values.view(rows, length, *values.shape[1:]).transpose(1, 2)  # [B, kv, T, d]
        self.bias = layout.bias()
        self.chain: list[tuple[Tensor, Tensor]] = []

    def append(self, key: Tensor, value: Tensor) -> None:
        """The anchors' own key and value of the next step, ``[N, kv_heads, head_dim]`` each."""
        self.chain.append((key, value))

    def of(self, rows: Tensor, layout: AnchorLayout) -> AnchorAttention:
        """The same attention of some of the anchors: their places ``[n]``, and the layout of them alone."""
        part = copy(self)
        part.layout, part.bias = layout, layout.bias()
        part.chain = [(key.index_select(0, rows), value.index_select(0, rows)) for key, value in self.chain]
        return part

    def frozen(self) -> AnchorAttention:
        """The same attention, which later calls of ``append`` do not reach."""
        frozen = copy(self)
        frozen.chain = list(self.chain)
        return frozen

    def __call__(self, query: Tensor) -> Tensor:
        """Queries ``[N, heads, head_dim]`` -> attended ``[N, heads * head_dim]``."""
        rows, width, length = self.layout.visible.shape
        count, heads, dim = query.shape
        kv_heads = self.keys.shape[1]
        group = heads // kv_heads
        query = query * dim**-0.5
        grid = query.new_zeros(rows * width, heads, dim).index_copy(0, self.layout.flat, query)
        # [B, M, kv, g, d] -> [B, kv, g*M, d]: grouped queries share a product with their keys, nothing is repeated
        grid = grid.view(rows, width, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
        grid = grid.reshape(rows, kv_heads, group * width, dim)
        scores = torch.matmul(grid, self.keys).view(rows, kv_heads, group, width, length).float()
        scores = scores + self.bias[:, None, None]
        own = [self._own_scores(query, key, group) for key, _ in self.chain]
        if own:
            extra = torch.stack(own, -1)  # [N, kv, g, s]
            padded = extra.new_zeros(rows * width, *extra.shape[1:]).index_copy(0, self.layout.flat, extra)
            padded = padded.view(rows, width, kv_heads, group, len(own)).permute(0, 2, 3, 1, 4)
            scores = torch.cat([scores, padded], -1)
        weights = scores.softmax(-1).to(self.values.dtype)
        base = weights[..., :length].reshape(rows, kv_heads, group * width, length)
        out = torch.matmul(base, self.values).view(rows, kv_heads, group, width, dim)
        flat = out.permute(0, 3, 1, 2, 4).reshape(rows * width, kv_heads, group, dim).index_select(0, self.layout.flat)
        if own:
            chained = weights[..., length:].permute(0, 3, 1, 2, 4).reshape(rows * width, kv_heads, group, len(own))
            chained = chained.index_select(0, self.layout.flat)
            for i, (_, value) in enumerate(self.chain):
                flat = flat + chained[..., i : i + 1] * value[:, :, None]
        return flat.reshape(count, heads * dim)

    @staticmethod
    def _own_scores(query: Tensor, key: Tensor, group: int) -> Tensor:
        """``[N, kv, g]`` float32 products of every anchor's scaled query with its own key."""
        grouped = query.view(query.shape[0], key.shape[1], group, query.shape[-1])
        return (grouped.float() * key[:, :, None].float()).sum(-1)
