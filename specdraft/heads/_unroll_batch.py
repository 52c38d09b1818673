"""Drafts of several rows at once: one product with every weight a level, what belongs to a row row by row."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdraft.core.tree import DraftTree, Proposal, TreeGrowth
from specdraft.core.types import DraftContext, Embed, Features
from specdraft.heads._dynamic import GrowingTree, likeliest
from specdraft.heads.base import DraftHead, TokenPicker

if TYPE_CHECKING:
    from specdraft.heads._unroll import UnrolledHead
    from specdraft.heads._unroll_state import TreeLevel, UnrollState


def propose_batch(
    head: UnrolledHead,
    states: Sequence[UnrollState],
    contexts: Sequence[DraftContext],
    embed: Embed,
    tree: DraftTree,
) -> list[Proposal]:
    """What ``head.propose`` gives for each state and context, all of which draft ``tree``."""
    count = len(states)
    output, positions, lengths = _take_in(head, states, contexts, embed)
    plans = [state.plan(tree, positions.device) for state in states]
    pickers = [TokenPicker(head, context) for context in contexts]
    drafted = [choose(pickers, states[0].unembed(head.readout(output)), plans[0].levels[0])]
    written = 0
    for depth, level in enumerate(plans[0].levels[1:], start=1):
        size = level.query_parents.numel()
        parents = output.unflatten(0, (count, -1)).index_select(1, level.query_parents)
        tokens = drafted[-1].index_select(1, level.query_tokens)
        x, residual = head.mix(head.feedback(parents.flatten(0, 1)), _embed(head, embed, tokens.flatten()))
        projected = head.layer.project(x, (positions + depth).repeat_interleave(size))
        attended = []
        for state, plan, length, *own in zip(
            states, plans, lengths, *(part.split(size) for part in projected), strict=True
        ):
            query, key, value = own
            state.write(length + written, key, value)
            attended.append(state.attend(query, length + written + size, plan.levels[depth].mask))
        written += size
        output = head.layer.finish(torch.cat(attended), residual)
        drafted.append(choose(pickers, states[0].unembed(head.readout(output)), level))
    found = torch.cat(drafted, dim=1)
    return [picker.proposal(own, tree) for picker, own in zip(pickers, found, strict=True)]


def _take_in(
    head: UnrolledHead, states: Sequence[UnrollState], contexts: Sequence[DraftContext], embed: Embed
) -> tuple[Tensor, Tensor, list[int]]:
    """Adds the keys of the committed positions of every row.

    Returns the layer's outputs ``[B, H]`` at the last positions, these positions ``[B]``, and the rows filled in each cache.
    """
    device = contexts[0].next_tokens.device
    counts = [context.next_tokens.shape[1] for context in contexts]
    ends = [context.start + count for context, count in zip(contexts, counts, strict=True)]
    positions = torch.cat(
        [torch.arange(end - count, end, device=device) for end, count in zip(ends, counts, strict=True)]
    )
    tokens = torch.cat([context.next_tokens[0] for context in contexts])
    features = Features.concatenate([context.features for context in contexts])
    x, residual = head.mix(head.seed(features), _embed(head, embed, tokens))
    query, keys, values = head.layer.project(x, positions)
    last = torch.tensor(list(accumulate(counts)), device=device) - 1
    attended = []
    for state, end, key, value, own in zip(
        states, ends, keys.split(counts), values.split(counts), query.index_select(0, last).split(1), strict=True
    ):
        state.write(end - key.shape[0], key, value)
        attended.append(state.attend(own, end, None))
    output = head.layer.finish(torch.cat(attended), residual.index_select(0, last))
    return output, positions.index_select(0, last), ends


def _embed(head: UnrolledHead, embed: Embed, ids: Tensor) -> Tensor:
    """Embeddings without a graph, in the head's dtype."""
    return embed(ids).detach().to(head.dtype)


def choose(pickers: Sequence[TokenPicker], logits: Tensor, level: TreeLevel) -> Tensor:
    """Target ids ``[B, n]`` of a level's nodes, from the logits ``[B * m, D]`` of its queries, row after row."""
    chosen = [
        picker.ranked(own, level.max_rank + 1)[level.rows, level.ranks]
        for picker, own in zip(pickers, logits.chunk(len(pickers)), strict=True)
    ]
    return torch.stack(chosen)


def grow_batch(
    head: UnrolledHead,
    states: Sequence[UnrollState],
    contexts: Sequence[DraftContext],
    embed: Embed,
    growth: TreeGrowth,
) -> list[Proposal]:
    """What ``head.grow`` gives for each state and context."""
    output, positions, lengths = _take_in(head, states, contexts, embed)
    trees = [GrowingTree(growth.top_k, positions.device) for _ in states]
    extend(trees, states[0].unembed(head.readout(output)), growth.top_k)
    own = torch.eye(growth.top_k, dtype=torch.bool, device=positions.device)
    ancestors = [own] * len(states)
    for depth in range(1, growth.depth):
        rows = zip(output.chunk(len(trees)), trees, strict=True)
        parents = torch.cat([part.index_select(0, tree.origin) for part, tree in rows])
        tokens = head.to_target_ids(torch.cat([tree.tokens for tree in trees]))
        x, residual = head.mix(head.feedback(parents), _embed(head, embed, tokens))
        projected = head.layer.project(x, (positions + depth).repeat_interleave(growth.top_k))
        attended = []
        for row, (query, key, value) in enumerate(zip(*(part.split(growth.top_k) for part in projected), strict=True)):
            filled = lengths[row] + depth * growth.top_k
            states[row].write(filled - growth.top_k, key, value)
            mask = torch.cat([own.new_ones(growth.top_k, lengths[row]), ancestors[row]], dim=1)
            attended.append(states[row].attend(query, filled, mask))
        output = head.layer.finish(torch.cat(attended), residual)
        extend(trees, states[0].unembed(head.readout(output)), growth.top_k)
        ancestors = [
            torch.cat([seen.index_select(0, tree.origin), own], dim=1)
            for seen, tree in zip(ancestors, trees, strict=True)
        ]
    return [draft(head, tree, growth) for tree in trees]


def extend(trees: Sequence[GrowingTree], logits: Tensor, count: int) -> None:
    """Continues the beams of all rows by the ``count`` likeliest tokens of ``logits`` ``[B * w, D]``, row after row."""
    found = likeliest(logits, count)
    for tree, ids, scores in zip(trees, *(part.chunk(len(trees)) for part in found), strict=True):
        tree.extend(ids, scores)


def draft(head: DraftHead, tree: GrowingTree, growth: TreeGrowth) -> Proposal:
    """The best nodes of a grown tree."""
    tokens, grown = tree.best(growth.total_tokens)
    return Proposal(head.to_target_ids(tokens)[None], grown, finite=tree.finite)
