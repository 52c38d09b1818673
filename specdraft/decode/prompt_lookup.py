"""Drafts by looking up: what followed the last tokens when they stood in the text before."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdraft.core.tree import DraftTree, Proposal
from specdraft.core.types import DraftContext, FeatureRequest
from specdraft.decode._proposer_config import PromptLookupConfig


class NGramIndex:
    """Where each n-gram of a growing text was followed by which token last. Appending and looking up never rescan.

    Args:
        min_ngram: length of the shortest n-grams kept.
        max_ngram: length of the longest.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self.text: list[int] = []
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        self._follows: dict[tuple[int, ...], dict[int, int]] = {}
        """n-gram -> {the token after it: where that token stands}, the most recent one last."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends ``tokens`` to the text."""
        text = self.text
        for token in tokens:
            place = len(text)
            for length in self._lengths:
                if length <= place:
                    follows = self._follows.setdefault(tuple(text[place - length :]), {})
                    follows.pop(token, None)
                    follows[token] = place
            text.append(token)

    def continuations(self, count: int, max_matches: int) -> list[list[int]]:
        """At most ``max_matches`` continuations of the text of ``count`` tokens each, with distinct first tokens.

        Those after the longest n-gram come first and, of one length, the most recent ones. A continuation that reaches
        the end of the text goes on with itself, as a text in a loop does.
        """
        starts: dict[int, int] = {}
        for length in self._lengths:
            if length > len(self.text):
                continue
            follows = self._follows.get(tuple(self.text[len(self.text) - length :]), {})
            for token in reversed(follows):
                starts.setdefault(token, follows[token])
                if len(starts) == max_matches:
                    return [self._read(start, count) for start in starts.values()]
        return [self._read(start, count) for start in starts.values()]

    def _read(self, start: int, count: int) -> list[int]:
        found = self.text[start : start + count]
        period = len(found)
        return found + [found[i % period] for i in range(period, count)]


class PromptLookupProposer:
    """Drafts what followed the last occurrence of the text's last n-gram (Saxena 2023, prompt lookup decoding).

    Drafts are chains, or with ``max_matches`` above 1 trees of as many chains that part at the root. They are certain of
    their tokens: each node has probability 1. Needs no model and nothing from the device.
    """

    draws = False

    def __init__(self, config: PromptLookupConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.tree = _chains(config.max_matches, config.num_draft_tokens)
        self._trees: dict[tuple[int, int], DraftTree] = {}

    def features(self) -> FeatureRequest:
        """Nothing."""
        return FeatureRequest()

    def begin(self, max_length: int) -> NGramIndex:
        """An empty index."""
        return NGramIndex(self.config.min_ngram, self.config.max_ngram)

    def propose(self, state: NGramIndex, context: DraftContext, max_depth: int) -> Proposal | None:
        """The continuations found, cut to ``max_depth``; None when no n-gram has occurred before."""
        state.extend(context.new_ids)
        depth = min(max_depth, self.config.num_draft_tokens)
        found = state.continuations(depth, self.config.max_matches)
        if not found:
            return None
        shape = (len(found), depth)
        tree = self._trees.get(shape)
        if tree is None:
            tree = self._trees[shape] = _chains(*shape)
        tokens = [found[chain][level] for level in range(depth) for chain in range(len(found))]
        return Proposal(torch.tensor([tokens], device=self.device), tree)


def _chains(count: int, depth: int) -> DraftTree:
    """``count`` chains of ``depth`` nodes that part at the root, level by level."""
    parents = [-1] * count + list(range(count * (depth - 1)))
    return DraftTree(tuple(parents), (*range(count), *[0] * (count * (depth - 1))))
