"""What trees grown at every step would have accepted: one pass over the answers with wide trees, replayed for narrower ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specdraft.core.tree import GrownTree, Proposal, TreeGrowth
from specdraft.core.types import DraftContext, FeatureRequest, Features, TokenBatch
from specdraft.decode.proposers import HeadProposer
from specdraft.eval.accuracies import Replay, count_steps
from specdraft.heads.base import DraftHead
from specdraft.targets.hf import HFTarget

TOP_KS = (2, 4, 8)
TOTALS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)
Places = tuple[tuple[int, ...], ...]
"""[d - 1][j]: how many nodes of a tree of d levels are likelier than the one that holds the answer's token at depth j + 1.
A node is drafted when this is below the number of nodes."""


@dataclass(frozen=True)
class GrownText:
    """An answer, and for each width (``top_k``) and each of its positions the ``Places`` in the tree grown there."""

    places: dict[int, list[Places]]


def growths(depth: int, max_nodes: int) -> list[TreeGrowth]:
    """The shapes that are compared: 2 to ``depth`` levels of 2, 4 or 8, and up to ``max_nodes`` nodes."""
    return [
        TreeGrowth(levels, top_k, total)
        for levels in range(2, depth + 1)
        for top_k in TOP_KS
        for total in TOTALS
        if top_k <= total <= min(max_nodes, top_k + (levels - 1) * top_k**2)
    ]


@torch.inference_mode()
def grow_text(target: HFTarget, head: DraftHead, prompt: list[int], answer: list[int], vocab_size: int) -> GrownText:
    """Grows the widest trees at every position of an answer.

    Args:
        target: the model that wrote ``answer``.
        head: of a kind that grows trees.
        prompt: at least one token.
        answer: the target's greedy tokens, the first one included.
        vocab_size: D, no tree is wider.
    """
    places: dict[int, list[Places]] = {}
    if len(answer) < 2:
        return GrownText({top_k: [] for top_k in TOP_KS if top_k <= vocab_size})
    ids = torch.tensor([prompt + answer], device=target.device)
    features = _capture(target, ids[:, :-1], head.features())
    depth, start = head.config.num_draft_tokens, len(prompt)
    for top_k in TOP_KS:
        if top_k > vocab_size:
            continue
        widest = TreeGrowth(depth, top_k, 1).pool_size
        growth = TreeGrowth(depth, top_k, widest)
        proposer = HeadProposer(head, target, growth)
        state = proposer.begin(ids.shape[1])
        found = places[top_k] = []
        begin = 0
        for position in range(len(answer) - 1):
            end = start + position
            rows = torch.arange(begin, end, device=ids.device)
            context = DraftContext(ids[:, begin + 1 : end + 1], features.select(rows), begin)
            proposal = head.grow(state, context, target.embed, growth)
            found.append(_places(proposal, answer[position + 1 :], depth))
            begin = end
    return GrownText(places)


def _capture(target: HFTarget, ids: torch.Tensor, request: FeatureRequest) -> Features:
    columns = torch.arange(ids.shape[1], device=ids.device)[None]
    present = torch.ones_like(ids, dtype=torch.bool)
    return target.capture(TokenBatch(ids, present, present, columns, columns * 0, columns[:, 0]), request)


def _places(proposal: Proposal, following: Sequence[int], depth: int) -> Places:
    """Where the answer's tokens stand in a grown tree that holds all of its nodes."""
    tree = proposal.tree
    assert isinstance(tree, GrownTree)
    assert tree.scores is not None
    parents = tree.rows[1:].cpu().numpy() - 1
    tokens = proposal.tokens[0].cpu().numpy()
    order = np.argsort(-tree.scores.cpu().numpy(), kind="stable")
    standing = np.empty_like(order)
    standing[order] = np.arange(len(order))
    depths = np.ones_like(parents)
    for node, parent in enumerate(parents):
        if parent >= 0:
            depths[node] = depths[parent] + 1
    path: list[int] = []
    above = -1
    for token in following[:depth]:
        matching = np.flatnonzero((parents == above) & (tokens == token))
        if not len(matching):
            break
        above = int(matching[0])
        path.append(above)
    return tuple(
        tuple(int(((standing < standing[node]) & (depths <= levels)).sum()) for node in path[:levels])
        for levels in range(1, depth + 1)
    )


def replay_grown(texts: Sequence[GrownText], growth: TreeGrowth) -> Replay:
    """Decodes the answers again on paper with trees that are grown."""

    def accepted(rows: list[Places]) -> Callable[[int], int]:
        def count(position: int) -> int:
            number = 0
            for place in rows[position][growth.depth - 1]:
                if place >= growth.total_tokens:
                    break
                number += 1
            return number

        return count

    return count_steps([(len(rows), accepted(rows)) for rows in (text.places[growth.top_k] for text in texts)])
