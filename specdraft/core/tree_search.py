"""The best fixed draft trees for measured accuracies. Pure functions of numbers; no model, no clock, no torch.

**accuracies**, in all of them: ``accuracies[k][r]`` is the probability that the continuation of rank r (0 = the head's
most likely token) at depth k + 1 is the target's choice, given that the node before it was accepted. A row sums to at
most 1; the trees hold no node deeper than the number of rows or of a rank beyond its row. Under this model a node is
accepted with the product of the accuracies along its path, and the expected tokens of a step are 1 (the target's own)
plus the sum of these products over all nodes (Cai et al. 2024, Medusa, section 2.3.3; Chen et al. 2024, Sequoia,
proposition 3.4).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specdraft.core.errors import ConfigError
from specdraft.core.tree import DraftTree

Accuracies = Sequence[Sequence[float]]


def check_accuracies(accuracies: Accuracies) -> None:
    """Raises ConfigError unless every row holds probabilities of events that exclude each other."""
    for k, row in enumerate(accuracies):
        if not row or min(row) < 0 or sum(row) > 1 + 1e-6:
            raise ConfigError(
                f"accuracies: depth {k + 1} must hold probabilities that sum to at most 1, got {list(row)}; measure again"
            )


def node_probabilities(tree: DraftTree, accuracies: Accuracies) -> list[float]:
    """The probability that each node is accepted, in node order; 0 where nothing was measured."""
    probabilities: list[float] = []
    for parent, rank, depth in zip(tree.parents, tree.ranks, tree.depths, strict=True):
        row = accuracies[depth - 1] if depth <= len(accuracies) else ()
        own = row[rank] if rank < len(row) else 0.0
        probabilities.append(own * (probabilities[parent] if parent >= 0 else 1.0))
    return probabilities


def expected_length(tree: DraftTree, accuracies: Accuracies) -> float:
    """Expected tokens of a step, the target's own included."""
    return 1.0 + sum(node_probabilities(tree, accuracies))


def greedy_paths(accuracies: Accuracies, max_depth: int | None = None) -> Iterator[tuple[int, ...]]:
    """Paths of ranks in the order in which they are worth adding to a tree: by falling probability, parents first.

    Each next path is the best continuation of the tree so far, a next sibling or a first child, so the first N paths
    are the tree of the Medusa search; no tree of N nodes has a larger expected length, as a child is never likelier
    than its parent. Paths of probability 0 do not come. Source: Medusa, section 2.3.3; best-first over parallel heads
    as in DDTree.
    """
    check_accuracies(accuracies)
    depth_limit = len(accuracies) if max_depth is None else min(max_depth, len(accuracies))
    if depth_limit < 1:
        return
    # Ranks by falling accuracy: a head's second choice may be right more often than its first.
    order = [sorted(range(len(row)), key=lambda r, row=row: -row[r]) for row in accuracies]  # type: ignore[misc]

    def entry(above: float, path: tuple[int, ...], place: int) -> tuple[float, int, tuple[int, ...], int, float] | None:
        """A heap entry for the ``place``-th best rank below ``path``; ties go to the shallower, then smaller path."""
        depth = len(path)
        if place >= len(order[depth]):
            return None
        rank = order[depth][place]
        probability = above * accuracies[depth][rank]
        return (-probability, depth + 1, (*path, rank), place, above) if probability > 0 else None

    heap = [item for item in [entry(1.0, (), 0)] if item is not None]
    while heap:
        negative, depth, path, place, above = heapq.heappop(heap)
        yield path
        following = [entry(above, path[:-1], place + 1)]
        if depth < depth_limit:
            following.append(entry(-negative, path, 0))
        for item in following:
            if item is not None:
                heapq.heappush(heap, item)


def greedy_tree(accuracies: Accuracies, num_nodes: int, max_depth: int | None = None) -> DraftTree:
    """The best tree of at most ``num_nodes`` nodes, fewer when no others have a chance.

    Raises:
        ConfigError: no node is asked for, or none has a chance.
    """
    if num_nodes < 1:
        raise ConfigError(f"num_nodes: must be at least 1, got {num_nodes}; ask for one node or more")
    paths = [list(path) for _, path in zip(range(num_nodes), greedy_paths(accuracies, max_depth), strict=False)]
    if not paths:
        raise ConfigError("accuracies: no drafted token was ever right, got only zeros; train the head further")
    return DraftTree.from_paths(paths)


@dataclass(frozen=True)
class _Choice:
    """Best forest below a node: its value, and for its first member the size of the subtree (0 = not taken)."""

    value: float
    taken: int


class SequoiaTable:
    """The best tree of every size up to ``max_nodes`` for every bound on the depth: a dynamic programme.

    ``G[d][k][r][n]``: the largest expected number of accepted nodes of a forest of n nodes, all of them below one node
    of depth k, that uses ranks r and above there and reaches at most depth d. The continuation of rank r is left out, or
    it takes m of the n nodes: ``accuracies[k][r] * (1 + G[k+1][0][m-1]) + G[k][r+1][n-m]``. Only the levels that remain
    matter, so the table is filled from the deepest level up, once for each bound.
    Source: Chen et al. 2024 (Sequoia), section 3.1 and appendix B, with accuracies that differ by depth.

    Args:
        accuracies: see the module.
        max_nodes: largest tree.
        max_depth: largest bound on the depth; None = the number of rows.
    """

    def __init__(self, accuracies: Accuracies, max_nodes: int, max_depth: int | None = None) -> None:
        check_accuracies(accuracies)
        if max_nodes < 1:
            raise ConfigError(f"max_nodes: must be at least 1, got {max_nodes}; ask for one node or more")
        self.accuracies = accuracies
        self.max_nodes = max_nodes
        self.max_depth = len(accuracies) if max_depth is None else min(max_depth, len(accuracies))
        self._tables = {depth: self._fill(depth) for depth in range(1, self.max_depth + 1)}

    def _fill(self, bound: int) -> list[list[list[_Choice]]]:
        """``table[k][r][n]`` for trees of depth at most ``bound``."""
        nothing = [_Choice(0.0, 0)] * (self.max_nodes + 1)
        levels: list[list[list[_Choice]]] = [[nothing]]  # below the deepest level there is nothing
        for k in reversed(range(bound)):
            row = self.accuracies[k]
            below = levels[0][0]
            ranks = [nothing]
            for r in reversed(range(len(row))):
                ranks.insert(0, [self._best(row[r], below, ranks[0], n) for n in range(self.max_nodes + 1)])
            levels.insert(0, ranks)
        return levels

    @staticmethod
    def _best(accuracy: float, below: list[_Choice], beside: list[_Choice], count: int) -> _Choice:
        best = _Choice(beside[count].value, 0)
        for size in range(1, count + 1):
            value = accuracy * (1.0 + below[size - 1].value) + beside[count - size].value
            # Among equals the likelier rank is taken, with as few nodes as do.
            if value > best.value or (value == best.value > 0 and not best.taken):
                best = _Choice(value, size)
        return best

    def value(self, num_nodes: int, max_depth: int | None = None) -> float:
        """Expected tokens of a step with the best tree of at most ``num_nodes`` nodes and depth ``max_depth``."""
        return 1.0 + self._tables[max_depth or self.max_depth][0][0][num_nodes].value

    def tree(self, num_nodes: int, max_depth: int | None = None) -> DraftTree:
        """That tree; it is smaller where further nodes have no chance, and empty where none has.

        Raises:
            ConfigError: larger or deeper than the table.
        """
        bound = max_depth or self.max_depth
        if not 1 <= num_nodes <= self.max_nodes or bound not in self._tables:
            raise ConfigError(
                f"tree: the table reaches {self.max_nodes} nodes and depth {self.max_depth}, got {num_nodes} and {bound}; "
                "make a larger table"
            )
        paths: list[list[int]] = []
        self._collect(self._tables[bound], [], num_nodes, paths)
        return DraftTree.from_paths(paths)

    def _collect(self, table: list[list[list[_Choice]]], prefix: list[int], count: int, paths: list[list[int]]) -> None:
        """Appends the paths of the best forest of ``count`` nodes below ``prefix``."""
        ranks = table[len(prefix)]
        for r in range(len(ranks) - 1):
            size = ranks[r][count].taken
            if size:
                path = [*prefix, r]
                paths.append(path)
                self._collect(table, path, size - 1, paths)
                count -= size
