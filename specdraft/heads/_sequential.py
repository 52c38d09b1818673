"""Heads of one small predictor per depth, each given the tokens drafted so far: training on anchors, decoding by levels."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from specdraft.core.tree import DraftTree, Proposal, TreeGrowth
from specdraft.core.types import DraftBatch, DraftContext, DraftStep, Embed, FeatureRequest, Unembedding
from specdraft.heads._dynamic import GrowingTree, likeliest
from specdraft.heads._unroll import TreePlan
from specdraft.heads.base import DraftHead, TokenPicker


class SequentialHead(DraftHead):
    """A state s per drafted path: s_0 from the target's features, s_{k+1} and a prediction from s_k and the next token.

    A kind supplies ``seed`` and ``begin`` (the same s_0 in training and in decoding), ``advance`` and ``unembedding``.
    Paths of a tree share nothing but s_0, so a level of a tree is a batch of rows. At depth k (from 0) the token that
    goes in is the one at offset k + 1 and the one predicted that at offset k + 2.
    """

    grows = True

    def features(self) -> FeatureRequest:
        """Only the last hidden state."""
        return FeatureRequest()

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
            path, hidden = self.advance(depth, path, tokens, embed)
            steps.append(DraftStep(hidden, depth + 2, self.unembedding(depth, shared)))
        return steps

    def init_state(self, max_length: int, tree: DraftTree, unembed: Unembedding) -> SequentialState:
        """The unembedding of every depth; nothing else outlives a step."""
        self.check_depth(tree)
        shared = self.draft_unembedding(unembed)
        return SequentialState([self.unembedding(depth, shared) for depth in range(self.config.num_draft_tokens)])

    def propose(self, state: Any, context: DraftContext, embed: Embed, tree: DraftTree) -> Proposal:
        """One row per path that goes on, level by level."""
        path, tokens = self.begin(state, context), context.next_tokens[0, -1:]
        drafted: list[Tensor] = []
        picker = TokenPicker(self, context)
        for depth, level in enumerate(state.plan(tree, tokens.device).levels):
            if depth:
                path = path.index_select(0, level.query_parents)
                tokens = drafted[-1].index_select(0, level.query_tokens)
            path, hidden = self.advance(depth, path, tokens, embed)
            ranked = picker.ranked(state.unembeds[depth](hidden), level.max_rank + 1)
            drafted.append(ranked[level.rows, level.ranks])
        return picker.proposal(torch.cat(drafted), tree)

    def grow(self, state: Any, context: DraftContext, embed: Embed, growth: TreeGrowth) -> Proposal:
        """See DraftHead: each level is one row per node of the beam, at most ``top_k``."""
        path, tokens = self.begin(state, context), context.next_tokens[0, -1:]
        tree = GrowingTree(growth.top_k, tokens.device)
        for depth in range(growth.depth):
            if depth:
                path, tokens = path.index_select(0, tree.origin), self.to_target_ids(tree.tokens)
            path, hidden = self.advance(depth, path, tokens, embed)
            tree.extend(*likeliest(state.unembeds[depth](hidden), growth.top_k))
        drafted, grown = tree.best(growth.total_tokens)
        return Proposal(self.to_target_ids(drafted)[None], grown, finite=tree.finite)


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
