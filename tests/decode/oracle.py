"""Proposers that know the target's greedy text, so that a test knows how much is accepted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from specdraft.core.tree import DraftTree, Proposal
from specdraft.core.types import DraftContext, FeatureRequest
from specdraft.targets.hf import HFTarget

VOCAB = 97


@dataclass
class Oracle:
    """Drafts the known text down to depth ``right`` and wrong tokens below.

    The right token sits at rank ``rank`` of every node on the true path; all other nodes hold wrong ones.
    """

    answer: list[int]
    tree: DraftTree
    right: int
    rank: int = 0
    contexts: list[DraftContext] = field(default_factory=list)
    draws = False

    def features(self) -> FeatureRequest:
        return FeatureRequest()

    def begin(self, max_length: int) -> dict[str, int]:
        return {"max_length": max_length}

    def propose(self, state: dict[str, int], context: DraftContext, max_depth: int) -> Proposal | None:
        self.contexts.append(context)
        assert context.features.last_hidden.shape[1] == context.next_tokens.shape[1]
        prompt = state.setdefault("prompt", context.next_tokens.shape[1])
        root = context.start + context.next_tokens.shape[1] - prompt
        assert int(context.next_tokens[0, -1]) == self.answer[root]
        tree = self.tree.truncate(max_depth)
        tokens = []
        for path in tree.paths():
            known = self.answer[root + len(path)]
            good = len(path) <= self.right and set(path) == {self.rank}
            tokens.append(known if good else (known + 1 + path[-1]) % VOCAB)
        return Proposal(torch.tensor([tokens]), tree)


@dataclass
class Constant:
    """Always drafts one token."""

    token: int
    tree: DraftTree
    draws = False

    def features(self) -> FeatureRequest:
        return FeatureRequest()

    def begin(self, max_length: int) -> None:
        return None

    def propose(self, state: Any, context: DraftContext, max_depth: int) -> Proposal | None:
        tree = self.tree.truncate(max_depth)
        return Proposal(torch.full((1, len(tree)), self.token), tree)


def greedy(target: HFTarget, prompt: list[int], count: int, eos: list[int] | None = None) -> list[int]:
    """What transformers' own greedy generation writes: at most ``count`` tokens, to the first of ``eos``."""
    model = target.model
    model.generation_config.eos_token_id = eos
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    return [int(token) for token in out[0, len(prompt) :]]


def prompt_ids(length: int, seed: int = 0) -> list[int]:
    """Random tokens without the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()
