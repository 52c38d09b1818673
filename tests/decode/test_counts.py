"""An oracle wrong from depth j, for every j: the text stays the target's, and every count is known beforehand."""

from __future__ import annotations

import math

import pytest
import torch

from specdraft.core.tree import DraftTree
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.targets.hf import HFTarget
from tests.decode.conftest import LENGTH, PROMPT
from tests.decode.oracle import Constant, Oracle, greedy
from tests.tiny import tiny_target

K = 4
CHAIN = DraftTree.chain(K)
# The right token may stand at rank 1: nodes (1), (1, 1), ... with decoys before and behind each.
TREE = DraftTree.from_paths(
    [[0], [1], [2], [0, 0], [1, 0], [1, 1], [2, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]]
)


def played_by_hand(right: int, new_tokens: int, depth: int) -> tuple[int, list[int], list[int], int]:
    """Steps, accepted and reached per depth, and nodes of a chain drafted."""
    emitted, steps, drafted = 1, 0, 0
    accepted, reached = [0] * depth, [0] * depth
    while emitted < new_tokens:
        offered = min(depth, new_tokens - emitted - 1)
        good = min(right, offered)
        for k in range(good):
            accepted[k] += 1
        for k in range(min(good + 1, offered)):
            reached[k] += 1
        emitted, steps, drafted = emitted + good + 1, steps + 1, drafted + offered
    return steps, accepted, reached, drafted


@pytest.mark.parametrize(("tree", "rank"), [(CHAIN, 0), (TREE, 1)], ids=["chain", "tree"])
@pytest.mark.parametrize("right", range(K + 1))
def test_oracle_wrong_from_a_depth(llama: HFTarget, answer: list[int], tree: DraftTree, rank: int, right: int) -> None:
    result = SpeculativeDecoder(llama, Oracle(answer, tree, right, rank)).generate(PROMPT, LENGTH, ignore_eos=True)
    steps, accepted, reached, drafted = played_by_hand(right, LENGTH, K)
    assert result.tokens == answer[:LENGTH]
    assert result.finish_reason == "length"
    assert result.num_steps == steps == math.ceil((LENGTH - 1) / (right + 1))
    tested = min(right + 1, K)
    assert result.accepted_per_depth == accepted[:tested]
    assert result.reached_per_depth == reached[:tested]
    assert result.accepted_tokens == sum(accepted)
    assert result.acceptance_length == pytest.approx((LENGTH - 1) / steps)
    if tree is CHAIN:
        assert result.drafted_tokens == drafted
    assert set(result.time_ms) == {"prefill", "target", "draft", "verify", "other"}
    assert all(value >= 0 for value in result.time_ms.values())
    assert result.time_ms["target"] > 0


def test_perfect_and_useless_drafts_give_k_plus_one_and_one(llama: HFTarget, answer: list[int]) -> None:
    count = 1 + 5 * (K + 1)
    perfect = SpeculativeDecoder(llama, Oracle(answer, CHAIN, K)).generate(PROMPT, count, ignore_eos=True)
    useless = SpeculativeDecoder(llama, Oracle(answer, CHAIN, 0)).generate(PROMPT, count, ignore_eos=True)
    assert (perfect.acceptance_length, useless.acceptance_length) == (K + 1, 1)


def test_plain_decoding_counts_steps_and_no_drafts(llama: HFTarget, answer: list[int]) -> None:
    result = SpeculativeDecoder(llama).generate(PROMPT, LENGTH, ignore_eos=True)
    assert result.tokens == answer[:LENGTH]
    assert (result.num_steps, result.drafted_tokens, result.accepted_per_depth) == (LENGTH - 1, 0, [])


@pytest.mark.parametrize(("tree", "rank"), [(CHAIN, 0), (TREE, 1)], ids=["chain", "tree"])
@pytest.mark.parametrize("place", range(2 * K + 3))
def test_text_ends_at_the_first_eos(llama: HFTarget, answer: list[int], tree: DraftTree, rank: int, place: int) -> None:
    """The EOS is in turn the prefill's token, every accepted depth, and the bonus token."""
    eos = answer[place]
    stop = answer.index(eos)
    absent = next(token for token in range(97) if token not in answer)
    result = SpeculativeDecoder(llama, Oracle(answer, tree, K, rank)).generate(PROMPT, LENGTH, {eos, absent})
    assert result.tokens == answer[: stop + 1] == greedy(llama, PROMPT, LENGTH, [absent, eos])
    assert result.finish_reason == "eos"
    whole, rest = divmod(stop, K + 1)
    assert result.num_steps == whole + (rest > 0)
    assert result.accepted_tokens == whole * K + rest
    # Every draft is right, so what was put to the test was accepted; behind the EOS nothing was.
    assert result.reached_per_depth == result.accepted_per_depth
    assert result.accepted_per_depth == [whole + (k < rest) for k in range(K if whole else rest)]


def test_a_drafted_eos_is_only_a_proposal(llama: HFTarget, answer: list[int]) -> None:
    eos = next(token for token in range(97) if token not in answer)
    result = SpeculativeDecoder(llama, Constant(eos, CHAIN)).generate(PROMPT, LENGTH, [eos])
    assert result.tokens == answer[:LENGTH]
    assert (result.finish_reason, result.accepted_tokens) == ("length", 0)


def test_the_targets_own_eos_is_used_unless_ignored(answer: list[int]) -> None:
    target = tiny_target("llama", eos_token_id=[answer[4], answer[7]])
    assert {answer[4], answer[7]} <= set(target.spec.eos_token_ids)
    decoder = SpeculativeDecoder(target, Oracle(answer, CHAIN, K))
    stop = min(answer.index(token) for token in target.spec.eos_token_ids if token in answer)
    assert decoder.generate(PROMPT, LENGTH).tokens == answer[: stop + 1]
    assert decoder.generate(PROMPT, LENGTH, ignore_eos=True).tokens == answer[:LENGTH]


@pytest.mark.parametrize("count", range(1, K + 4))
@pytest.mark.parametrize("right", [0, 2, K])
def test_max_new_tokens_is_exact(llama: HFTarget, answer: list[int], count: int, right: int) -> None:
    result = SpeculativeDecoder(llama, Oracle(answer, CHAIN, right)).generate(PROMPT, count, ignore_eos=True)
    assert result.tokens == answer[:count]
    assert result.finish_reason == "length"
    assert result.num_steps == math.ceil((count - 1) / (right + 1))
    # One token of a step is the target's own, so the last token is never drafted.
    assert count > 2 or result.drafted_tokens == 0


def test_margins_are_those_of_the_targets_logits(llama: HFTarget, answer: list[int]) -> None:
    with torch.no_grad():
        logits = llama.model(input_ids=torch.tensor([PROMPT + answer[: LENGTH - 1]])).logits[0, len(PROMPT) - 1 :]
    best = logits.topk(2).values
    for proposer in (None, Oracle(answer, TREE, 2, 1)):
        result = SpeculativeDecoder(llama, proposer).generate(PROMPT, LENGTH, ignore_eos=True, trace=True)
        assert result.first_margins == pytest.approx((best[:, 0] - best[:, 1]).tolist(), abs=1e-3)
    cut = SpeculativeDecoder(llama, Oracle(answer, CHAIN, K)).generate(PROMPT, LENGTH, [answer[3]], trace=True)
    assert len(cut.first_margins) == len(cut.tokens)
    assert SpeculativeDecoder(llama).generate(PROMPT, 3).first_margins == []
