"""Rows of different lengths whose texts are known, and a proposer that knows them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from specdraft.core.tree import DraftTree, Proposal
from specdraft.core.types import DraftContext, FeatureRequest
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.result import DecodeResult
from specdraft.targets.hf import HFTarget
from tests.decode.oracle import VOCAB, prompt_ids
from tests.tiny import tiny_models

TREE = DraftTree.from_paths([[0], [1], [0, 0], [1, 0], [1, 1], [0, 0, 0], [1, 1, 0], [1, 1, 1]])

PROMPTS = [prompt_ids(length, seed=length) for length in (1, 7, 60, 25, 7)]

LENGTHS = [24, 9, 17, 30, 1]

COUNTS = ("tokens", "num_steps", "accepted_per_depth", "reached_per_depth", "drafted_tokens", "finish_reason")

UNTIED = {"gemma2", "gemma3"}

"""Random tied embeddings make these repeat one token, which would hide errors."""


@dataclass
class Knowing:
    """Drafts the known text of whichever row asks, right down to a depth that changes from step to step and by row.

    trees: taken in turn by the row's steps; None = nothing is drafted in that step. Wrong tokens stand everywhere else.
    """

    answers: dict[tuple[int, ...], list[int]]
    trees: list[DraftTree | None]
    tree: DraftTree = TREE
    accepted: set[int] = field(default_factory=set)
    draws = False

    def features(self) -> FeatureRequest:
        return FeatureRequest((2,))

    def begin(self, max_length: int) -> dict[str, Any]:
        return {"steps": 0}

    def propose(self, state: dict[str, Any], context: DraftContext, max_depth: int) -> Proposal | None:
        assert context.features.last_hidden.shape[:2] == context.next_tokens.shape
        assert context.features.aux_hidden is not None
        if "prompt" not in state:
            state["prompt"] = context.next_tokens.shape[1]
            state["answer"] = self.answers[tuple(context.new_ids[: state["prompt"]])]
        root = context.start + context.next_tokens.shape[1] - state["prompt"]
        answer = state["answer"]
        assert int(context.next_tokens[0, -1]) == answer[root]
        state["steps"] += 1
        turn = state["steps"] + state["prompt"]
        tree = self.trees[turn % len(self.trees)]
        if tree is None:
            return None
        tree = tree.truncate(max_depth)
        rank = max(tree.ranks) and turn % 2
        right = turn % (tree.max_depth + 1)
        tokens = []
        for path in tree.paths():
            known = answer[root + len(path)]
            good = len(path) <= right and set(path) == {rank}
            tokens.append(known if good else (known + 1 + path[-1]) % VOCAB)
        return Proposal(torch.tensor([tokens]), tree)


def family(kind: str) -> HFTarget:
    return HFTarget.from_model(tiny_models[kind](**({"tie_word_embeddings": False} if kind in UNTIED else {})))


def knowing(target: HFTarget, trees: list[DraftTree | None]) -> Knowing:
    plain = SpeculativeDecoder(target)
    answers = {tuple(p): plain.generate(p, 40, ignore_eos=True).tokens for p in PROMPTS}
    return Knowing(answers, trees)


def alone(decoder: SpeculativeDecoder, **options: Any) -> list[DecodeResult]:
    return [decoder.generate(p, n, **options) for p, n in zip(PROMPTS, LENGTHS, strict=True)]


def assert_same(found: list[DecodeResult], wanted: list[DecodeResult]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert {name: getattr(a, name) for name in COUNTS} == {name: getattr(b, name) for name in COUNTS}
