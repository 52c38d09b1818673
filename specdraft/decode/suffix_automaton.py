"""All substrings of growing texts with their numbers of occurrences, in memory proportional to the texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

ROOT = 0


@dataclass(slots=True)
class Cursor:
    """The end of one text in an automaton.

    last: state of the whole text, where it grows. match: length of the text's longest end, at most ``max_match + 1``,
    that is in the automaton; state: where that end is.
    """

    last: int = ROOT
    state: int = ROOT
    match: int = 0


@dataclass(frozen=True)
class Candidate:
    """A node that may be drafted. parent: place of its parent among the drafted ones, -1 for the root.

    probability: product of the estimates down to it; match: length of the end of the text and of the draft, this node
    included, that was found to occur.
    """

    token: int
    parent: int
    depth: int
    probability: float
    match: int
    state: int


class SuffixAutomaton:
    """A suffix automaton of several texts (Blumer et al. 1985) that counts occurrences as the texts grow.

    A state stands for strings that end at the same places; those of state s have lengths ``length[link[s]] + 1`` to
    ``length[s]``. Counts are exact for strings of at most ``max_match + 1`` tokens, a context and what follows it: a new
    token raises those of the states that hold the text's ends up to this length, whatever the length of the text.
    """

    def __init__(self, max_match: int) -> None:
        self.max_match = max_match
        self.size = 0
        """Tokens of all texts."""
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._count = [0]

    def extend(self, cursor: Cursor, tokens: Sequence[int]) -> None:
        """Appends ``tokens`` to the text of ``cursor``."""
        for token in tokens:
            cursor.last = self._append(cursor.last, token)
            self.follow(cursor, token)
            self.size += 1
            self._count[ROOT] += 1
            state = cursor.state
            while state != ROOT:
                self._count[state] += 1
                state = self._link[state]

    def follow(self, cursor: Cursor, token: int) -> None:
        """Moves ``cursor`` over ``token`` without adding it: its match becomes the longest end that is known."""
        state, match = self._settle(cursor.state, cursor.match), cursor.match
        while token not in self._next[state]:
            if state == ROOT:
                cursor.state, cursor.match = ROOT, 0
                return
            state = self._link[state]
            match = self._length[state]
        cursor.match = min(match + 1, self.max_match + 1)
        cursor.state = self._settle(self._next[state][token], cursor.match)

    def occurrences(self, string: Sequence[int]) -> int:
        """Occurrences of ``string`` of at most ``max_match + 1`` tokens; of the empty one, the number of tokens."""
        state = ROOT
        for token in string:
            if token not in self._next[state]:
                return 0
            state = self._next[state][token]
        return self._count[state]

    def _settle(self, state: int, match: int) -> int:
        """The state of the last ``match`` tokens of ``state``'s longest string: a split may have moved them."""
        while state != ROOT and self._length[self._link[state]] >= match:
            state = self._link[state]
        return state

    def _append(self, last: int, token: int) -> int:
        """The state of the text that ends in ``last``, with ``token`` after it; made where it does not exist."""
        if token in self._next[last]:
            return self._split(last, token)
        state = self._new(self._length[last] + 1, {}, 0, ROOT)
        while last >= 0 and token not in self._next[last]:
            self._next[last][token] = state
            last = self._link[last]
        if last >= 0:
            self._link[state] = self._split(last, token)
        return state

    def _split(self, state: int, token: int) -> int:
        """The state whose longest string is that of ``state`` with ``token``, taken out of a larger one if need be."""
        following = self._next[state][token]
        if self._length[following] == self._length[state] + 1:
            return following
        copy = self._new(
            self._length[state] + 1, dict(self._next[following]), self._count[following], self._link[following]
        )
        self._link[following] = copy
        while state >= 0 and self._next[state].get(token) == following:
            self._next[state][token] = copy
            state = self._link[state]
        return copy

    def _new(self, length: int, following: dict[int, int], count: int, link: int) -> int:
        self._next.append(following)
        self._length.append(length)
        self._count.append(count)
        self._link.append(link)
        return len(self._length) - 1

    def draft(
        self, cursor: Cursor, num_nodes: int, max_depth: int, min_probability: float, is_inside: bool
    ) -> list[Candidate]:
        """The most probable continuations of the text of ``cursor``, best first; so parents come before children.

        The estimate for a token after an end of length m that occurred n times before, c times of them followed by the
        token, is ``c / (n + 1 / m)``: the longer the end that is found again, the more it is trusted, and the deeper a
        draft goes until the product falls below ``min_probability``.

        Args:
            cursor: end of the text.
            num_nodes: nodes at most.
            max_depth: tokens of a path at most.
            min_probability: of the path down to a node.
            is_inside: the text itself is in the automaton (its own end, which nothing follows yet, does not count).
        """
        ends = self._ends(cursor) if is_inside else set()
        match, state = self._context(cursor.state, cursor.match)
        order = count()
        heap: list[tuple[float, int, Candidate]] = []
        nodes: list[Candidate] = []
        node = Candidate(-1, -1, 0, 1.0, match, state)
        while True:
            if node.depth < max_depth:
                for child in self._continue(node, len(nodes) - 1, ends, min_probability):
                    heappush(heap, (-child.probability, next(order), child))
            if not heap or len(nodes) == num_nodes:
                return nodes
            node = heappop(heap)[2]
            nodes.append(node)

    def _continue(self, node: Candidate, place: int, ends: set[int], min_probability: float) -> Iterator[Candidate]:
        """What may follow ``node``, the drafted node number ``place``."""
        if node.match == 0:
            return
        total = self._count[node.state] - (node.state in ends) + 1.0 / node.match
        least = min_probability * total / node.probability
        match = node.match + 1
        for token, following in self._next[node.state].items():
            state = self._settle(following, match)
            if self._count[state] >= least:
                probability = node.probability * self._count[state] / total
                yield Candidate(token, place, node.depth + 1, probability, *self._context(state, match))

    def _ends(self, cursor: Cursor) -> set[int]:
        """States that hold an end of the text of ``cursor``."""
        ends = set()
        state = self._settle(cursor.state, cursor.match)
        while state != ROOT:
            ends.add(state)
            state = self._link[state]
        return ends

    def _context(self, state: int, match: int) -> tuple[int, int]:
        """The longest end of a string, at most ``max_match``, after which something follows: its length and state."""
        match = min(match, self.max_match)
        state = self._settle(state, match)
        while not self._next[state] and state != ROOT:
            state = self._link[state]
            match = self._length[state]
        return match, state
