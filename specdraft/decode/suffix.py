"""Drafts what frequently followed the end of the text: in the text itself and, if asked to, in earlier outputs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specdraft.core.tree import DraftTree, Proposal
from specdraft.core.types import DraftContext, FeatureRequest
from specdraft.decode._proposer_config import SuffixConfig
from specdraft.decode.suffix_automaton import Candidate, Cursor, SuffixAutomaton


@dataclass
class _Output:
    """Tokens that one row has written, and how many of them the earlier outputs hold."""

    tokens: list[int] = field(default_factory=list)
    num_added: int = 0
    cursor: Cursor = field(default_factory=Cursor)


@dataclass(eq=False)
class SuffixRow:
    """State of one row: its text, its output, and where its end is in the earlier outputs."""

    automaton: SuffixAutomaton
    output: _Output = field(default_factory=_Output)
    cursor: Cursor = field(default_factory=Cursor)
    earlier: Cursor = field(default_factory=Cursor)
    version: int = -1
    """Of the earlier outputs that ``earlier`` points into."""


class EarlierOutputs:
    """An automaton of what other rows have written, the newest ``max_tokens`` at most.

    Outputs enter when the next row begins. An automaton cannot forget: when it is full it is made anew from the newer
    half of its tokens.
    """

    def __init__(self, max_match: int, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.automaton = SuffixAutomaton(max_match)
        self.version = 0
        """Changes when the automaton is made anew."""
        self._outputs: list[_Output] = []
        self._open: list[tuple[weakref.ref[SuffixRow], _Output]] = []

    def open(self, row: SuffixRow) -> None:
        """Takes in what was written so far, then registers ``row``, whose output enters later."""
        for _, output in self._open:
            self._add(output)
        self._open = [(reference, output) for reference, output in self._open if reference() is not None]
        self._open.append((weakref.ref(row), row.output))
        self._outputs.append(row.output)

    def _add(self, output: _Output) -> None:
        new = output.tokens[output.num_added :]
        if self.automaton.size + len(new) > self.max_tokens:
            self._forget(max(min(self.max_tokens // 2, self.max_tokens - len(new)), 0))
            if not any(known is output for known in self._outputs):
                self._outputs.append(output)
        if len(new) > self.max_tokens:
            new, output.cursor = new[len(new) - self.max_tokens :], Cursor()
        self.automaton.extend(output.cursor, new)
        output.num_added = len(output.tokens)

    def _forget(self, num_kept: int) -> None:
        """Makes the automaton anew from the newest ``num_kept`` tokens that were in it."""
        self.automaton = SuffixAutomaton(self.automaton.max_match)
        self.version += 1
        kept: list[tuple[_Output, list[int]]] = []
        for output in reversed(self._outputs):
            output.cursor = Cursor()
            added = output.tokens[: output.num_added]
            part = added[len(added) - min(num_kept, len(added)) :]
            num_kept -= len(part)
            if part or output.num_added == 0:
                kept.append((output, part))
        self._outputs = [output for output, _ in reversed(kept)]
        for output, part in reversed(kept):
            self.automaton.extend(output.cursor, part)

    def follow(self, row: SuffixRow, new_ids: Sequence[int]) -> Cursor:
        """Where the end of the text of ``row``, whose text and output have grown by ``new_ids``, is in the automaton."""
        ids = new_ids
        if row.version != self.version:
            ids = new_ids if row.version < 0 else row.output.tokens[-self.automaton.max_match :]
            row.earlier, row.version = Cursor(), self.version
        for token in ids:
            self.automaton.follow(row.earlier, token)
        return row.earlier


class SuffixProposer:
    """Drafts the continuations that were most frequent after the longest end of the text that occurred before.

    Source: Oliaro et al. 2024, SuffixDecoding, with a suffix automaton in place of the suffix tree. A draft is as long
    as its estimated probability allows, so that a long match gives a long draft, and a tree where several continuations
    are likely. Drafted tokens are certain: each node has probability 1 for the verifier. Needs no model and nothing from
    the device.
    """

    draws = False

    def __init__(self, config: SuffixConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        depth = min(config.num_draft_tokens, config.num_nodes)
        paths = [[0] * below for below in range(1, depth + 1)] + [[i] for i in range(1, config.num_nodes - depth + 1)]
        self.tree = DraftTree.from_paths(paths)
        self.earlier = (
            EarlierOutputs(config.max_match, config.max_earlier_tokens) if config.max_earlier_tokens else None
        )

    def features(self) -> FeatureRequest:
        """Nothing."""
        return FeatureRequest()

    def begin(self, max_length: int) -> SuffixRow:
        """A row without text."""
        row = SuffixRow(SuffixAutomaton(self.config.max_match))
        if self.earlier is not None:
            self.earlier.open(row)
        return row

    def propose(self, state: SuffixRow, context: DraftContext, max_depth: int) -> Proposal | None:
        """The likely continuations, from the row's own text or from the earlier outputs, whichever promises more."""
        config, ids = self.config, context.new_ids
        is_first = state.automaton.size == 0
        state.automaton.extend(state.cursor, ids)
        depth = min(max_depth, config.num_draft_tokens)
        nodes = state.automaton.draft(state.cursor, config.num_nodes, depth, config.min_probability, is_inside=True)
        if self.earlier is not None:
            state.output.tokens += ids[-1:] if is_first else ids
            cursor = self.earlier.follow(state, ids[-config.max_match :])
            others = self.earlier.automaton.draft(
                cursor, config.num_nodes, depth, config.min_probability, is_inside=False
            )
            if _promise(others) > _promise(nodes):
                nodes = others
        if not nodes:
            return None
        tree, tokens = arrange(nodes)
        return Proposal(torch.tensor([tokens], device=self.device), tree)

    def finish(self, state: SuffixRow, tokens: Sequence[int]) -> None:
        """The last step, after which no draft was asked for, enters the earlier outputs too."""
        if self.earlier is not None:
            state.output.tokens += tokens[len(state.output.tokens) :]


def _promise(nodes: Sequence[Candidate]) -> float:
    """Tokens that a draft is expected to have accepted."""
    return sum(node.probability for node in nodes)


def arrange(nodes: Sequence[Candidate]) -> tuple[DraftTree, list[int]]:
    """The tree of ``nodes``, in which parents come before children, and its tokens, both in breadth-first order."""
    order = sorted(range(len(nodes)), key=lambda i: nodes[i].depth)
    places = {-1: -1} | {i: place for place, i in enumerate(order)}
    parents = [places[nodes[i].parent] for i in order]
    ranks = [parents[:place].count(parent) for place, parent in enumerate(parents)]
    return DraftTree(tuple(parents), tuple(ranks)), [nodes[i].token for i in order]
