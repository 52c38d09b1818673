"""Accuracies, prices, and the shape that follows from them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from specdraft.core.errors import ConfigError, DataError
from specdraft.core.tree import DraftTree, TreeGrowth
from specdraft.core.tree_search import expected_length
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.proposers import HeadProposer
from specdraft.eval._config import TuneConfig
from specdraft.eval.accuracies import BEYOND, RankedText, accuracies, rank_text, replay
from specdraft.eval.costs import CostProbe, CostTable, interpolate, sizes_up_to, timed, wide_tree
from specdraft.eval.shapes import PLAIN, describe, is_chain, shape_json
from specdraft.eval.tune import Candidate, Tuner, _Run, candidate_trees, choose, finalists, predict
from specdraft.heads.base import DraftHead, head_kinds
from specdraft.targets.hf import HFTarget
from tests.support import make_head
from tests.tiny import tiny_target

CHAIN = DraftTree.chain(3)
TREE = DraftTree.from_paths([[0], [1], [0, 0], [1, 0], [0, 0, 0]])
WIDE = DraftTree.from_paths([[r] for r in range(30)] + [[r, s] for r in range(30) for s in range(4)])
KINDS = list(head_kinds())


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target("llama")


def drawn_texts(seed: int = 0, length: int = 4000) -> list[RankedText]:
    """Ranks of three depths: 0 with 60 %, 1 with 20 %, else 5; independent of each other."""
    generator = random.Random(seed)
    drawn = [generator.choices([0, 1, 5], [6, 2, 2])[0] for _ in range(length)]
    rows = [tuple([*drawn[i : i + 3], BEYOND, BEYOND][:3]) for i in range(length)]
    return [RankedText(10, rows)]


def costs(target: dict[int, float], draft: float = 1.0, level: float = 0.0) -> CostTable:
    return CostTable(target, {1: draft, 2: 2 * draft, 3: 3 * draft}, {1: level, 4: level}, 0.0, 0.0)


def test_replay_and_accuracies_by_hand() -> None:
    text = RankedText(3, [(0, 0, 9), (0, 9, 0), (9, 0, 1), (0, 1, BEYOND), (1, BEYOND, BEYOND)])
    # Five positions: 0 accepts two and the target's own follows; 3 accepts one, and its own is the last token.
    assert (replay([text], CHAIN).num_steps, replay([text], CHAIN).num_tokens) == (2, 5)
    # From position 3 the tree would go on with rank 1, which it does not hold below rank 0.
    assert replay([text], TREE) == replay([text], CHAIN)
    # 0 accepts one, 2 nothing, 3 both.
    assert replay([text], DraftTree.from_paths([[0], [1], [0, 1]])).num_steps == 3
    assert replay([text], PLAIN).num_steps == replay([text], DraftTree.from_paths([[5]])).num_steps == 5
    assert replay([], CHAIN).acceptance_length == 1.0
    table = accuracies([text], 2)
    assert table[0] == pytest.approx([3 / 5, 1 / 5])
    # depth 2, of the rows whose first rank is 0 or 1 and whose text goes on: (0, 0), (0, 9), (0, 1)
    assert table[1] == pytest.approx([1 / 3, 1 / 3])
    assert table[2] == pytest.approx([0.0, 0.0])


def test_replay_of_independent_ranks_is_the_expected_length() -> None:
    texts = drawn_texts(length=20_000)
    table = accuracies(texts, 2)
    assert table[0] == pytest.approx([0.6, 0.2], abs=0.02)
    for tree in (CHAIN, TREE):
        assert replay(texts, tree).acceptance_length == pytest.approx(expected_length(tree, table), rel=0.03)


def head_of(kind: str, target: HFTarget, size: int | None) -> DraftHead:
    return make_head(kind, target.spec, num_draft_tokens=3, draft_vocab_size=size).eval()


@pytest.mark.parametrize("size", [None, 60])
@pytest.mark.parametrize("kind", KINDS)
def test_replay_counts_what_decoding_counts(kind: str, size: int | None, target: HFTarget) -> None:
    """A head that was trained for one depth is ranked to the depth of decoding, too (eagle)."""
    head = head_of(kind, target, size)
    plain = SpeculativeDecoder(target)
    accepted = 0
    for prompt in ([5], list(range(20, 50))):
        answer = plain.generate(prompt, 30, ignore_eos=True).tokens
        text = rank_text(target, head, prompt, answer, 97)
        assert len(text.ranks) == 29
        assert text.ranks[-1][1:] == (BEYOND, BEYOND)
        for tree in (WIDE, DraftTree.from_paths([[r] for r in range(60 if size else 90)]), CHAIN):
            result = SpeculativeDecoder(target, HeadProposer(head, target, tree)).generate(prompt, 30, ignore_eos=True)
            found = replay([text], tree)
            assert (found.num_steps, found.num_tokens) == (result.num_steps, result.step_tokens)
            accepted += result.accepted_tokens
    assert accepted > 25
    assert rank_text(target, head, [5], [6], 8).ranks == []


def test_ranks_are_those_of_the_trees(target: HFTarget) -> None:
    head = head_of("medusa", target, None)
    answer = SpeculativeDecoder(target).generate([5, 6, 7], 30, ignore_eos=True).tokens
    text = rank_text(target, head, [5, 6, 7], answer, 97)
    limited = rank_text(target, head, [5, 6, 7], answer, 8)
    for row, short in zip(text.ranks, limited.ranks, strict=True):
        assert tuple(min(rank, 8) for rank in row) == short


def test_prices_of_trees() -> None:
    table = CostTable({1: 10.0, 4: 13.0, 8: 21.0}, {1: 1.0, 2: 3.0}, {1: 0.5, 3: 1.5}, 0.25, 0.125)
    assert [interpolate(table.target_ms, size) for size in (1, 2, 4, 6, 10)] == pytest.approx([10, 11, 13, 17, 25])
    assert table.plain == 10.125
    assert table.draft(DraftTree.chain(2)) == 3.0
    # two levels of several nodes; two queries at the second
    tree = DraftTree.from_paths([[0], [1], [0, 0], [1, 0]])
    assert table.draft(tree) == pytest.approx(3.0 + 0.5 + 1.0)
    assert table.step(tree) == pytest.approx(interpolate(table.target_ms, 5) + 4.5 + 0.25)
    # one query with two continuations
    assert table.draft(DraftTree.from_paths([[0], [0, 0], [0, 1]])) == pytest.approx(3.5)
    assert table.as_json()["target_ms"] == {"1": 10.0, "4": 13.0, "8": 21.0}


def test_measured_sizes_and_wide_trees() -> None:
    assert sizes_up_to(1) == [1]
    assert sizes_up_to(13) == [*range(1, 10), 12, 13]
    assert sizes_up_to(25)[-3:] == [20, 24, 25]
    assert sizes_up_to(600)[-1] == 600
    for count in (1, 3):
        tree = wide_tree(count, 3)
        with_children = set(tree.parents)
        assert [sum(node in with_children for node in level) for level in tree.levels] == [count, count, 0]
        assert all(len(level) > 1 for level in tree.levels)
    assert wide_tree(4, 1).max_depth == 1


def test_parts_are_timed_in_turns() -> None:
    order: list[int] = []
    parts = {("part", i): (lambda i=i: order.append(i)) for i in range(3)}
    times = timed(parts, 2, 0, torch.device("cpu"))
    assert set(times) == set(parts)
    assert all(ms >= 0 for ms in times.values())
    assert [sorted(order[i : i + 3]) for i in (0, 3, 6)] == [[0, 1, 2]] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_probe_leaves_the_cache_and_prices_every_part(kind: str, target: HFTarget) -> None:
    probe = CostProbe(target, head_of(kind, target, None), [3, 4, 5, 6, 7, 8], 12)
    measured = probe.measure(4, 2)
    assert probe.cache.length == 6
    assert list(measured["target_ms"]) == sizes_up_to(13)
    assert list(measured["chain_ms"]) == [1, 2, 3]
    assert list(measured["level_ms"]) == [1, 2, 4]
    assert min(*measured["target_ms"].values(), *measured["chain_ms"].values()) > 0


def test_probe_stays_inside_the_context() -> None:
    target = tiny_target("gpt2", n_positions=32, max_position_embeddings=32)
    limit = target.spec.max_position_embeddings
    positions: list[int] = []
    inner = target.forward_cached

    def spy(input_ids: torch.Tensor, position_ids: torch.Tensor, *args: Any) -> Any:
        positions.append(int(position_ids.max()))
        return inner(input_ids, position_ids, *args)

    target.forward_cached = spy  # type: ignore[method-assign]
    head = head_of("medusa", target, None)
    CostProbe(target, head, [3 + i % 50 for i in range(30)], 12).measure(4, 1)
    assert max(positions) == limit - 1
    with pytest.raises(ConfigError, match=rf"tune.max_nodes: leaves no room in a context of {limit} tokens, got 28"):
        CostProbe(target, head, [3, 4, 5, 6, 7], 28)


def test_candidates_are_plain_chains_and_best_trees() -> None:
    table = accuracies(drawn_texts(), 2)
    trees = candidate_trees(table, 6)
    assert trees[:4] == [PLAIN, *(DraftTree.chain(k) for k in (1, 2, 3))]
    assert len(set(trees)) == len(trees)
    assert {len(tree) for tree in trees} == set(range(7))
    assert candidate_trees([[0.0, 0.0]] * 3, 6) == trees[:4]
    for tree in candidate_trees([[0.2, 0.4, 0.1, 0.3], [0.1, 0.0, 0.5, 0.1]], 12):
        for node in range(-1, len(tree)):
            ranks = sorted(rank for parent, rank in zip(tree.parents, tree.ranks, strict=True) if parent == node)
            assert ranks == list(range(len(ranks)))


@pytest.mark.parametrize(
    ("table", "chosen"),
    [
        # Tokens cost nothing: the largest tree there is of ranks 0 and 1.
        (costs({1: 10.0, 100: 10.0}, draft=0.01), lambda tree: len(tree) == 14),
        # A second token is free, a third is dear.
        (costs({1: 10.0, 2: 10.0, 3: 30.0}, draft=0.1), lambda tree: tree == DraftTree.chain(1)),
        # Drafts cost more than they give.
        (costs({1: 10.0, 2: 10.0, 100: 10.0}, draft=30.0), lambda tree: tree == PLAIN),
        # Verification does.
        (costs({1: 10.0, 2: 19.0, 100: 900.0}, draft=0.1), lambda tree: tree == PLAIN),
        # Depth is dear, width is not: one level.
        (costs({1: 10.0, 100: 10.0}, draft=7.0), lambda tree: (tree.max_depth, len(tree)) == (1, 2)),
        # Width is dear: a chain.
        (costs({1: 10.0, 100: 10.0}, draft=0.1, level=9.0), lambda tree: tree == CHAIN),
    ],
)
def test_choice_follows_the_costs(table: CostTable, chosen: Any) -> None:
    candidates = predict(drawn_texts(), table, 14, 2)
    assert chosen(candidates[0].shape), candidates[0]
    speeds = [candidate.tokens_per_s for candidate in candidates]
    assert speeds == sorted(speeds, reverse=True)
    assert candidates[0].tokens_per_s == pytest.approx(
        1e3 * replay(drawn_texts(), candidates[0].shape).acceptance_length / table.step(candidates[0].shape)
    )
    found = finalists(candidates, 2)
    assert found[0].shape == PLAIN
    assert any(is_chain(candidate.shape) for candidate in found)
    assert len({candidate.shape for candidate in found}) == len(found)
    depths = {candidate.shape.max_depth for candidate in candidates if candidate.tokens_per_s > 0.8 * speeds[0]}
    assert {candidate.shape.max_depth for candidate in found} >= depths


def speeds(*shapes: tuple[DraftTree, float]) -> list[Candidate]:
    """Candidates of one token a step at so many tokens/s."""
    return [Candidate(shape, 1.0, 1e3 / speed) for shape, speed in shapes]


def test_a_small_shape_that_is_nearly_as_fast_is_measured_too() -> None:
    wide, small, slow = DraftTree.from_paths([[i] for i in range(9)]), DraftTree.chain(1), DraftTree.chain(2)
    candidates = speeds((wide, 20.0), (small, 19.5), (slow, 15.0), (PLAIN, 10.0))
    assert [candidate.shape for candidate in finalists(candidates, 1)] == [PLAIN, wide, small]
    candidates = speeds((wide, 20.0), (slow, 15.0), (small, 14.0), (PLAIN, 10.0))
    assert [candidate.shape for candidate in finalists(candidates, 1)] == [PLAIN, wide, slow]


def test_the_best_of_every_depth_is_measured_unless_it_is_far_behind() -> None:
    flat = DraftTree.from_paths([[0], [1], [2]])
    middle, other = DraftTree.from_paths([[0], [1], [0, 0], [1, 0]]), DraftTree.from_paths([[0], [1], [0, 0]])
    deep, chain = DraftTree.from_paths([[0], [1], [0, 0], [0, 0, 0]]), DraftTree.chain(4)
    candidates = speeds((deep, 20.0), (middle, 17.0), (other, 16.9), (flat, 16.5), (chain, 15.0), (PLAIN, 10.0))
    # The chain is there as the best chain; its depth is too far behind.
    assert [candidate.shape for candidate in finalists(candidates, 1)] == [PLAIN, deep, flat, middle, chain]


@pytest.mark.parametrize(
    ("measured", "chosen"),
    [
        ({"wide": 20.0, "small": 19.2, "plain": 10.0}, "small"),
        ({"wide": 20.0, "small": 18.8, "plain": 10.0}, "wide"),
        # Plain decoding is chosen where nothing is faster, not where something is hardly faster.
        ({"wide": 10.2, "small": 9.0, "plain": 10.0}, "wide"),
        ({"wide": 9.9, "small": 9.8, "plain": 10.0}, "plain"),
    ],
)
def test_of_shapes_that_are_equally_fast_the_smallest_is_chosen(
    measured: dict[str, float], chosen: str, target: HFTarget
) -> None:
    shapes = {"wide": DraftTree.from_paths([[i] for i in range(9)]), "small": DraftTree.chain(1), "plain": PLAIN}
    decoder = SpeculativeDecoder(target)
    runs = [
        _Run(Candidate(shapes[name], 1.0, 1.0), decoder, tokens=1000, steps=1000, ms=1e6 / speed)
        for name, speed in measured.items()
    ]
    assert choose(runs).candidate.shape == shapes[chosen]


class FixedCosts(Tuner):
    """A tuner on a machine of given costs."""

    table: CostTable

    def measure_costs(self, texts: Any) -> CostTable:
        return self.table


def tuner(target: HFTarget, table: CostTable, said: list[str]) -> FixedCosts:
    config = TuneConfig(max_new_tokens=24, max_nodes=8, num_ranks=4, rounds=1, dynamic=False)
    found = FixedCosts(target, head_of("medusa", target, None), [[5, 6], [7, 8, 9]], config, said.append)
    found.table = table
    return found


def test_the_measurement_decides(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    clock = {"now": 0.0}
    monkeypatch.setattr("specdraft.eval.tune.perf_counter", lambda: clock["now"])
    inner = SpeculativeDecoder.generate

    def generate(self: SpeculativeDecoder, *args: Any, **kwargs: Any) -> Any:
        result = inner(self, *args, **kwargs)
        result.time_ms["prefill"] = 0.0
        step = 1.0 if self.proposer is None else 4.0 if is_chain(self.proposer.tree) else 0.5
        clock["now"] += step * result.num_steps
        return result

    monkeypatch.setattr(SpeculativeDecoder, "generate", generate)
    body = tuner(target, costs({1: 10.0, 2: 10.0, 3: 90.0}, draft=0.001), said).run()
    # Predicted best is the likeliest token alone; by the clock, everything else is faster.
    assert shape_json(DraftTree.chain(1)).items() <= body["candidates"][0].items()
    assert body["shape"]["plain"] is False, body["verified"]
    assert body["shape"]["num_draft_tokens"] != 1
    assert body["measured"]["speedup"] > 1.9
    assert body["measured"]["efficiency"] == pytest.approx(
        body["measured"]["speedup"] / body["measured"]["acceptance_length"]
    )
    assert [run["plain"] for run in body["verified"]].count(True) == 1
    assert all(run["identical_outputs"] == 2 for run in body["verified"])
    assert any(line.startswith("measured: plain decoding") for line in said)


def test_plain_decoding_can_be_the_best(target: HFTarget) -> None:
    body = tuner(target, costs({1: 10.0, 2: 900.0}, draft=50.0), []).run()
    assert body["candidates"][0]["plain"]
    # A random head is right about never, so the clock agrees.
    assert body["shape"] == shape_json(PLAIN)
    assert body["measured"]["speedup"] == 1.0


def test_answers_of_one_token_cannot_be_tuned_on(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TuneConfig(max_new_tokens=8)
    one = Tuner(target, head_of("medusa", target, None), [[5]], config, lambda line: None)
    monkeypatch.setattr(config, "max_new_tokens", 1)
    with pytest.raises(DataError, match=r"tune.prompts: every answer ends at its first token"):
        one.run()


def test_a_single_second_choice_is_no_chain() -> None:
    assert shape_json(DraftTree.from_paths([[1]])).items() >= {"num_draft_tokens": None, "tree": [[1]]}.items()
    assert shape_json(DraftTree.chain(2)).items() >= {"plain": False, "num_draft_tokens": 2, "tree": None}.items()
    grown = shape_json(TreeGrowth(3, 2, 5))
    assert {key: value for key, value in grown.items() if value} == {
        "dynamic_total_tokens": 5,
        "dynamic_depth": 3,
        "dynamic_top_k": 2,
    }
    assert [describe(shape) for shape in (PLAIN, DraftTree.chain(2), TREE, TreeGrowth(3, 2, 5))] == [
        "plain decoding",
        "a chain of 2",
        "a tree of 5 nodes and depth 3",
        "a grown tree of 5 nodes, 3 levels of 2",
    ]
    assert not is_chain(PLAIN)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, r"tune.batch_size: must be at least 1, got 0"),
        ({"prompts": []}, r"tune.prompts: must name at least one set"),
        ({"rounds": 0}, r"tune.rounds: must be at least 1, got 0"),
        ({"max_nodes": 129}, r"tune.max_nodes: must lie in 1..128, got 129"),
        ({"head_dtype": "int8"}, r"tune.head_dtype: unknown dtype, got 'int8'"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TuneConfig(**settings)
