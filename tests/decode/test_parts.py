"""Cache, masks and acceptance, each against a slow version written out."""

from __future__ import annotations

import random

import pytest
import torch

from specdraft.core.tree import DraftTree
from specdraft.decode.cache import KVCache
from specdraft.decode.plan import TreePlan
from specdraft.decode.verify import accept_greedy

TREE = DraftTree.from_paths([[0], [1], [0, 0], [1, 0], [1, 1], [1, 1, 0]])
CPU = torch.device("cpu")


def write(cache: KVCache, count: int, layers: int, heads: int = 2, width: int = 4) -> list[torch.Tensor]:
    """Random keys and values of ``count`` rows into every layer; returns what went in, ``[1, heads, count, width]``."""
    states = []
    for layer in range(layers):
        keys, values = torch.randn(2, 1, heads, count, width).unbind(0)
        cache.update(keys, values, layer)
        states += [keys, values]
    return states


def test_cache_keeps_committed_rows_and_overwrites_the_others() -> None:
    cache = KVCache(3, 32)
    kept = write(cache, 5, 3)
    assert cache.length == cache.get_seq_length() == 0
    cache.commit(range(5))
    for count, rows in ((4, [0, 1]), (7, [0, 2, 5, 6]), (1, [0]), (3, [0, 2])):
        new = write(cache, count, 3)
        assert cache.get_mask_sizes(count, 0) == (cache.length + count, 0)
        assert cache.get_seq_length(2) == cache.length == cache.get_query_offset()
        cache.commit(rows, torch.tensor(rows) if count == 7 else None)
        kept = [torch.cat([old, state[:, :, rows]], dim=2) for old, state in zip(kept, new, strict=True)]
    assert cache.length == 5 + 2 + 4 + 1 + 2
    (tensor,) = cache.store.tensors.values()
    assert tensor.shape == (6, 1, 2, 32, 4)
    assert cache.num_bytes == tensor.numel() * 4
    for state, wanted in zip(tensor, kept, strict=True):
        assert state[:, :, : cache.length].equal(wanted)


def test_update_returns_views_and_a_chain_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache(1, 16)
    write(cache, 3, 1)
    cache.commit(range(3))
    (tensor,) = cache.store.tensors.values()
    keys = torch.randn(1, 2, 4, 4)
    found, _ = cache.update(keys, keys, 0)
    assert found.shape == (1, 2, 7, 4)
    assert found.data_ptr() == tensor.data_ptr()
    assert found[:, :, 3:].equal(keys)

    def fail(*args: object) -> None:
        raise AssertionError("rows were copied")

    monkeypatch.setattr(torch.Tensor, "index_select", fail)
    cache.commit([0, 1, 2])
    assert cache.length == 6


def test_layers_of_different_shapes() -> None:
    cache = KVCache(2, 16)
    shapes = [(2, 4, 4), (1, 8, 6)]
    first = [(torch.randn(1, h, 3, k), torch.randn(1, h, 3, v)) for h, k, v in shapes]
    for layer, (keys, values) in enumerate(first):
        cache.update(keys, values, layer)
    cache.commit(range(3))
    assert len(cache.store.tensors) == 3
    for layer, (keys, values) in enumerate(first):
        more = cache.update(keys[:, :, :2], values[:, :, :2], layer)
        assert more[0].equal(torch.cat([keys, keys[:, :, :2]], dim=2))
        assert more[1].equal(torch.cat([values, values[:, :, :2]], dim=2))


def test_cache_is_empty_after_reset_and_refuses_what_does_not_fit() -> None:
    cache = KVCache(1, 8)
    write(cache, 6, 1)
    cache.commit(range(6))
    with pytest.raises(ValueError, match="holds 8 rows, 9 are needed"):
        write(cache, 3, 1)
    cache.reset()
    assert cache.length == 0
    (keys, _) = write(cache, 8, 1)
    assert cache.store.write(0, keys, keys)[0].equal(keys)


@pytest.mark.parametrize(
    ("window", "has_full"), [(None, True), *((window, full) for window in (1, 3, 6, 40) for full in (True, False))]
)
@pytest.mark.parametrize("tree", [TREE, DraftTree.chain(3), DraftTree((), ())])
def test_masks_say_who_sees_whom(tree: DraftTree, window: int | None, has_full: bool) -> None:
    plan = TreePlan(tree, 20, window, has_full, CPU)
    depths = (0, *tree.depths)
    ancestors = tree.ancestor_mask()
    for length in range(1, 21):
        positions = [*range(length), *(length + depth for depth in depths)]
        assert plan.positions(length).tolist() == [positions[length:]]
        full, sliding = plan.masks(length)
        wanted_full = torch.cat([torch.ones(len(depths), length, dtype=torch.bool), ancestors], dim=1)
        if len(depths) == 1 and (window is None or length + 1 <= window):
            assert full is None
            assert sliding is None
            continue
        assert (full is not None) == has_full
        assert (sliding is not None) == (window is not None)
        if full is not None:
            assert full[0, 0].equal(wanted_full)
        if sliding is not None and window is not None:
            near = torch.tensor([[key > query - window for key in positions] for query in positions[length:]])
            assert sliding[0, 0].equal(wanted_full & near)


def walk(tree: DraftTree, tokens: list[int], choices: list[int]) -> int:
    """Accepted row, token by token: from each node to the child that holds its choice."""
    row = 0
    while True:
        children = [i + 1 for i, parent in enumerate(tree.parents) if parent == row - 1]
        following = [child for child in children if tokens[child] == choices[row]]
        if not following:
            return row
        (row,) = following


def test_acceptance_is_a_walk_down_the_tree() -> None:
    generator = random.Random(0)
    lengths = set()
    for _ in range(300):
        size = generator.randrange(1, 9)
        parents = sorted(generator.randrange(-1, i) if i else -1 for i in range(size))
        while any(parent >= i for i, parent in enumerate(parents)):
            parents = sorted(generator.randrange(-1, i) if i else -1 for i in range(size))
        ranks = [parents[:i].count(parent) for i, parent in enumerate(parents)]
        tree = DraftTree(tuple(parents), tuple(ranks))
        plan = TreePlan(tree, 4, None, True, CPU)
        # Siblings are distinct: their rank is part of the token.
        tokens = [generator.randrange(3), *ranks]
        choices = [generator.randrange(2) for _ in range(size + 1)]
        row = int(accept_greedy(plan, torch.tensor(tokens), torch.tensor(choices)))
        assert row == walk(tree, tokens, choices)
        assert plan.path_rows[row][-1] == row
        assert plan.path_rows[row][0] == 0
        lengths.add(len(plan.path_rows[row]))
    assert lengths >= {1, 2, 3, 4}


def test_the_cache_answers_old_and_new_releases_alike() -> None:
    """The first releases of transformers 5 ask for the capacity by another name and give positions, not their number."""
    layer = KVCache(2, 16).layers[0]
    assert layer.get_max_cache_shape() == layer.get_max_length() == 16
    assert layer.get_mask_sizes(torch.arange(3)) == layer.get_mask_sizes(3) == (3, 0)
