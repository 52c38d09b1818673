"""Trees from accuracies, against every tree there is and against values worked out by hand."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice, pairwise

import pytest

from specdraft.core.errors import ConfigError
from specdraft.core.tree import DraftTree
from specdraft.core.tree_search import SequoiaTable, expected_length, greedy_paths, greedy_tree, node_probabilities

Path = tuple[int, ...]
SMALL = [[0.6, 0.2, 0.1], [0.5, 0.25, 0.05], [0.3, 0.3, 0.1]]


def all_trees(size: int, width: int, depth: int) -> Iterator[frozenset[Path]]:
    """Every set of ``size`` paths that holds the beginning of each."""
    seen: set[frozenset[Path]] = {frozenset()}
    for _ in range(size):
        seen = {
            tree | {(*base, rank)}
            for tree in seen
            for base in [(), *tree]
            if len(base) < depth
            for rank in range(width)
            if (*base, rank) not in tree
        }
    yield from seen


def best_by_force(accuracies: list[list[float]], size: int, depth: int) -> float:
    trees = all_trees(size, len(accuracies[0]), depth)
    return max(expected_length(DraftTree.from_paths([list(p) for p in tree]), accuracies) for tree in trees)


def random_accuracies(seed: int, falling: bool) -> list[list[float]]:
    generator = random.Random(seed)
    rows = []
    for _ in range(3):
        row = [generator.random() for _ in range(3)]
        total = sum(row) + generator.random()
        rows.append([value / total for value in (sorted(row, reverse=True) if falling else row)])
    return rows


def test_expected_length_is_the_sum_over_paths() -> None:
    tree = DraftTree.from_paths([[0], [1], [0, 0], [0, 1], [1, 2], [0, 0, 1]])
    # breadth-first order: 0, 1, 00, 01, 12, 001
    expected = [0.6, 0.2, 0.6 * 0.5, 0.6 * 0.25, 0.2 * 0.05, 0.6 * 0.5 * 0.3]
    assert node_probabilities(tree, SMALL) == pytest.approx(expected)
    assert expected_length(tree, SMALL) == pytest.approx(1 + sum(expected))
    assert expected_length(DraftTree.chain(3), SMALL) == pytest.approx(1 + 0.6 + 0.3 + 0.09)
    assert expected_length(DraftTree((), ()), SMALL) == 1.0
    assert expected_length(DraftTree.chain(5), SMALL) == expected_length(DraftTree.chain(3), SMALL)


def test_expected_length_is_the_mean_of_drawn_walks() -> None:
    tree = greedy_tree(SMALL, 9)
    known = {tuple(path) for path in tree.paths()}
    generator = random.Random(0)
    total, draws = 0, 40_000
    for _ in range(draws):
        path: Path = ()
        for row in SMALL:
            rank = generator.choices([*range(3), 9], [*row, 1 - sum(row)])[0]
            if (*path, rank) not in known:
                break
            path = (*path, rank)
        total += 1 + len(path)
    assert total / draws == pytest.approx(expected_length(tree, SMALL), abs=0.02)


@pytest.mark.parametrize("falling", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_greedy_and_programme_equal_brute_force(seed: int, falling: bool) -> None:
    accuracies = random_accuracies(seed, falling)
    table = SequoiaTable(accuracies, 4)
    for depth in (1, 2, 3):
        for size in (1, 2, 3, 4):
            if size > 3 and depth == 1:
                continue  # there are but three nodes
            best = best_by_force(accuracies, size, depth)
            assert expected_length(greedy_tree(accuracies, size, depth), accuracies) == pytest.approx(best)
            tree = table.tree(size, depth)
            assert len(tree) == size
            assert tree.max_depth <= depth
            assert expected_length(tree, accuracies) == pytest.approx(best)
            assert table.value(size, depth) == pytest.approx(best)


def test_programme_equals_greedy_on_large_trees() -> None:
    accuracies = [[0.62, 0.12, 0.06, 0.03], [0.5, 0.15, 0.05, 0.02], [0.4, 0.1, 0.05, 0.01], [0.3, 0.1, 0.04, 0.01]]
    table = SequoiaTable(accuracies, 40)
    lengths = []
    for size in range(1, 41):
        for depth in (2, 4):
            if depth == 2 and size > 20:
                continue
            tree = table.tree(size, depth)
            assert expected_length(tree, accuracies) == pytest.approx(
                expected_length(greedy_tree(accuracies, size, depth), accuracies)
            )
            assert len(tree) == size
        lengths.append(table.value(size))
    gains = [b - a for a, b in pairwise(lengths)]
    assert gains == pytest.approx(sorted(gains, reverse=True))


def test_known_trees() -> None:
    assert list(islice(greedy_paths(SMALL), 6)) == [(0,), (0, 0), (1,), (0, 1), (2,), (1, 0)]
    chain = [[0.9, 0.01]] * 4
    assert greedy_tree(chain, 4) == SequoiaTable(chain, 4).tree(4) == DraftTree.chain(4)
    # Equally good ranks are taken from 0 on.
    even = [[0.25] * 4, [0.25] * 4]
    assert SequoiaTable(even, 3).tree(3) == greedy_tree(even, 3) == DraftTree.from_paths([[0], [1], [2]])
    star = [[0.3, 0.3, 0.3], [0.01, 0.01, 0.01]]
    assert greedy_tree(star, 3) == SequoiaTable(star, 3).tree(3) == DraftTree.from_paths([[0], [1], [2]])
    # The second choice is right more often: the tree holds it alone.
    assert greedy_tree([[0.2, 0.5]], 1) == SequoiaTable([[0.2, 0.5]], 1).tree(1) == DraftTree.from_paths([[1]])


def test_nodes_without_a_chance_are_left_out() -> None:
    accuracies = [[0.5, 0.0], [0.5, 0.0]]
    assert greedy_tree(accuracies, 6) == SequoiaTable(accuracies, 6).tree(6) == DraftTree.chain(2)
    assert len(SequoiaTable([[0.0]], 3).tree(3)) == 0
    with pytest.raises(ConfigError, match="no drafted token was ever right"):
        greedy_tree([[0.0, 0.0]], 3)


@pytest.mark.parametrize("accuracies", [[[0.7, 0.4]], [[0.5], []], [[-0.1]]])
def test_impossible_accuracies_are_refused(accuracies: list[list[float]]) -> None:
    with pytest.raises(ConfigError, match=r"^accuracies: depth \d must hold probabilities"):
        SequoiaTable(accuracies, 3)
    with pytest.raises(ConfigError, match=r"^accuracies: depth \d must hold probabilities"):
        greedy_tree(accuracies, 3)


def test_bounds_are_checked() -> None:
    table = SequoiaTable(SMALL, 4, max_depth=2)
    for size, depth in ((5, 2), (2, 3), (0, 2)):
        with pytest.raises(ConfigError, match="the table reaches 4 nodes and depth 2"):
            table.tree(size, depth)
    with pytest.raises(ConfigError, match="max_nodes: must be at least 1, got 0"):
        SequoiaTable(SMALL, 0)
    with pytest.raises(ConfigError, match="num_nodes: must be at least 1, got 0"):
        greedy_tree(SMALL, 0)
