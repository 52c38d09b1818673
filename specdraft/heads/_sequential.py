"""Heads of one small predictor per depth, each given the tokens drafted so far: training on anchors, decoding by levels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdraft.core.tree import DraftTree, Proposal, TreeGrowth
from specdraft.core.types import DraftBatch, DraftContext, DraftStep, Embed, FeatureRequest, Unembedding
from specdraft.heads._dynamic import GrowingTree
from specdraft.heads._unroll_batch import choose, draft, extend
from specdraft.heads._unroll_state import TreePlan
from specdraft.heads.base import DraftHead, TokenPicker


class SequentialHead(DraftHead):
    """A state s per drafted path: s_0 from the target's features, s_{k+1} and a prediction from s_k and the next token.

    A kind supplies ``seed`` and ``begin`` (the same s_0 in training and in decoding), ``advance`` and ``unembedding``.
    Paths of a tree share nothing but s_0, so a level of a tree is a batch of rows. At depth k (from 0) the token that
    goes in is the one at offset k + 1 and the one predicted that at offset k + 2.
    """

    grows = True

    def features(self) -> FeatureRequest:
        """Only the last hidden state of the anchors themselves."""
        return FeatureRequest(last="anchors")

    @abstractmethod
    def seed(self, batch: DraftBatch) -> Tensor:
        """First states ``[N, ·]`` of the anchors."""

    @abstractmethod
    def begin(self, state: SequentialState, context: DraftContext) -> Tensor:
        """Takes in what was committed; the first state ``[1, ·]`` after its last position."""

    @abstractmethod
    def advance(self, depth: int, path: Tensor, tokens: Tensor, embed: Embed) -> tuple[Tensor, Tensor]:
        """States ``[M, ·]`` and next tokens ``[M]`` at ``depth`` (from 0) -> next states, hidden states to unembed."""

    @abstractmethod
    def unembedding(self, depth: int, unembed: Unembedding) -> Unembedding:
        """Hidden states of ``depth`` -> logits over the draft vocabulary, given the target's unembedding over it."""

    def forward(self, batch: DraftBatch, embed: Embed, unembed: Unembedding) -> list[DraftStep]:
        """See DraftHead: step k has offset k + 2. Past the end of a row the token is arbitrary; the loss leaves it out."""
        ids = batch.input_ids.flatten()
        last = ids.numel() - 1
        shared = self.draft_unembedding(unembed)
        path, steps = self.seed(batch), []
        for depth in range(self.config.num_draft_tokens):
            tokens = ids[(batch.anchors + depth + 1).clamp(max=last)]
            path, hidden = self.recomputed(self.advance, depth, path, tokens, embed)
            steps.append(DraftStep(hidden, depth + 2, self.unembedding(depth, shared)))
        return steps

    def init_state(self, max_length: int, tree: DraftTree, unembed: Unembedding) -> SequentialState:
        """The unembedding of every depth; nothing else outlives a step."""
        self.check_depth(tree)
        shared = self.draft_unembedding(unembed)
        return SequentialState([self.unembedding(depth, shared) for depth in range(self.config.num_draft_tokens)])

    def propose(self, state: Any, context: DraftContext, embed: Embed, tree: DraftTree) -> Proposal:
        """One row per path that goes on, level by level."""
        return self.propose_batch([state], [context], embed, tree)[0]

    def propose_batch(
        self, states: Sequence[Any], contexts: Sequence[DraftContext], embed: Embed, tree: DraftTree
    ) -> list[Proposal]:
        """See DraftHead: the paths of all rows go on together."""
        count = len(states)
        path, tokens = self._first(states, contexts)
        drafted: list[Tensor] = []
        pickers = [TokenPicker(self, context) for context in contexts]
        for depth, level in enumerate(states[0].plan(tree, tokens.device).levels):
            if depth:
                path = path.unflatten(0, (count, -1)).index_select(1, level.query_parents).flatten(0, 1)
                tokens = drafted[-1].index_select(1, level.query_tokens).flatten()
            path, hidden = self.advance(depth, path, tokens, embed)
            drafted.append(choose(pickers, states[0].unembeds[depth](hidden), level))
        found = torch.cat(drafted, dim=1)
        return [picker.proposal(own, tree) for picker, own in zip(pickers, found, strict=True)]

    def grow(self, state: Any, context: DraftContext, embed: Embed, growth: TreeGrowth) -> Proposal:
        """See DraftHead: each level is one row per node of the beam, at most ``top_k``."""
        return self.grow_batch([state], [context], embed, growth)[0]

    def grow_batch(
        self, states: Sequence[Any], contexts: Sequence[DraftContext], embed: Embed, growth: TreeGrowth
    ) -> list[Proposal]:
        """See DraftHead: the beams of all rows go on together."""
        path, tokens = self._first(states, contexts)
        trees = [GrowingTree(growth.top_k, tokens.device) for _ in states]
        for depth in range(growth.depth):
            if depth:
                rows = zip(path.chunk(len(trees)), trees, strict=True)
                path = torch.cat([own.index_select(0, tree.origin) for own, tree in rows])
                tokens = self.to_target_ids(torch.cat([tree.tokens for tree in trees]))
            path, hidden = self.advance(depth, path, tokens, embed)
            extend(trees, states[0].unembeds[depth](hidden), growth.top_k)
        return [draft(self, tree, growth) for tree in trees]

    def _first(self, states: Sequence[Any], contexts: Sequence[DraftContext]) -> tuple[Tensor, Tensor]:
        """Takes in what was committed: the first states ``[B, ·]`` and the tokens ``[B]`` after them."""
        path = torch.cat([self.begin(state, context) for state, context in zip(states, contexts, strict=True)])
        return path, torch.cat([context.next_tokens[0, -1:] for context in contexts])


class SequentialState:
    """Decoding state of one row: the unembedding per depth, and the levels of a tree, prepared once."""

    def __init__(self, unembeds: list[Unembedding]) -> None:
        self.unembeds = unembeds
        self._plans: dict[DraftTree, TreePlan] = {}

    def plan(self, tree: DraftTree, device: torch.device) -> TreePlan:
        """The prepared levels of ``tree``."""
        if tree not in self._plans:
            self._plans[tree] = TreePlan.of(tree, 0, device)
        return self._plans[tree]
