"""The loop around the counts: limits, streams, buffers, contexts, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdraft.core.errors import ConfigError, DataError
from specdraft.core.tree import DraftTree, Proposal, TreeGrowth
from specdraft.core.types import DraftContext, FeatureRequest
from specdraft.decode._config import DecodeConfig
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.proposers import HeadProposer, draft_tree
from specdraft.heads.base import head_kinds
from specdraft.targets.check import token_batch
from specdraft.targets.hf import HFTarget
from tests.decode.conftest import LENGTH, PROMPT
from tests.decode.oracle import Oracle, greedy, prompt_ids
from tests.decode.probes import count_reads
from tests.support import make_head
from tests.tiny import tiny_target

CHAIN = DraftTree.chain(4)
TREE = DraftTree.from_paths([[0], [1], [0, 0], [1, 0], [1, 1], [1, 1, 0]])


def test_context_limit() -> None:
    target = tiny_target("llama", max_position_embeddings=32)
    positions: list[int] = []
    inner = target.forward_cached

    def spy(input_ids: torch.Tensor, position_ids: torch.Tensor, *args: Any) -> Any:
        positions.append(int(position_ids.max()))
        return inner(input_ids, position_ids, *args)

    target.forward_cached = spy  # type: ignore[method-assign]
    for length, room in ((28, 4), (24, 8), (31, 1)):
        prompt = prompt_ids(length)
        answer = greedy(target, prompt, 12)
        for right in (0, 3, 6):
            positions.clear()
            result = SpeculativeDecoder(target, Oracle(answer, DraftTree.chain(6), right)).generate(
                prompt, 100, ignore_eos=True
            )
            assert result.tokens == answer[:room]
            assert result.finish_reason == "context"
            assert result.num_steps == -(-(room - 1) // (right + 1))
            assert max(positions) < 32
        exact = SpeculativeDecoder(target).generate(prompt, room, ignore_eos=True)
        assert (exact.tokens, exact.finish_reason) == (answer[:room], "length")
    with pytest.raises(DataError, match=r"prompt: leaves no room in a context of 32 tokens, got 32"):
        SpeculativeDecoder(target).generate(prompt_ids(32), 1)


def test_stream_gives_the_steps_of_generate(llama: HFTarget, answer: list[int]) -> None:
    decoder = SpeculativeDecoder(llama, Oracle(answer, TREE, 2, 1))
    result = decoder.generate(PROMPT, LENGTH, ignore_eos=True)
    steps = list(decoder.stream(PROMPT, LENGTH, ignore_eos=True))
    assert [token for step in steps for token in step.tokens] == result.tokens
    assert len(steps) == result.num_steps + 1
    assert (len(steps[0].tokens), steps[0].num_accepted) == (1, 0)
    assert sum(step.num_accepted for step in steps) == result.accepted_tokens
    assert all(len(step.tokens) == step.num_accepted + 1 for step in steps)


def test_stream_ends_at_an_accepted_eos(llama: HFTarget, answer: list[int]) -> None:
    stop = answer.index(answer[3])
    steps = list(SpeculativeDecoder(llama, Oracle(answer, CHAIN, 4)).stream(PROMPT, LENGTH, [answer[3]]))
    assert steps[-1].tokens == answer[1 : stop + 1]
    assert steps[-1].num_accepted == len(steps[-1].tokens)


def test_stream_leaves_the_callers_grad_mode_alone(llama: HFTarget, answer: list[int]) -> None:
    stream = SpeculativeDecoder(llama, Oracle(answer, CHAIN, 4)).stream(PROMPT, LENGTH)
    next(stream)
    next(stream)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_closed_and_interleaved_streams_leave_nothing_behind(llama: HFTarget, answer: list[int]) -> None:
    decoder = SpeculativeDecoder(llama, Oracle(answer, TREE, 2, 1))
    closed = decoder.stream(PROMPT, LENGTH, ignore_eos=True)
    next(closed)
    next(closed)
    closed.close()
    assert decoder.generate(PROMPT, LENGTH, ignore_eos=True).tokens == answer[:LENGTH]
    pair = [decoder.stream(PROMPT, LENGTH, ignore_eos=True) for _ in range(2)]
    texts: list[list[int]] = [[], []]
    for steps in zip(*pair, strict=True):
        for text, step in zip(texts, steps, strict=True):
            text += step.tokens
    assert texts == [answer[:LENGTH]] * 2


def test_buffers_are_used_again(llama: HFTarget, answer: list[int]) -> None:
    decoder = SpeculativeDecoder(llama, Oracle(answer, TREE, 2, 1))
    decoder.generate(PROMPT, LENGTH, ignore_eos=True)
    cache = decoder._idle
    assert cache is not None
    assert cache.length == 0
    places = [tensor.data_ptr() for tensor in cache.store.tensors.values()]
    assert decoder.generate(PROMPT, 8, ignore_eos=True).tokens == answer[:8]
    assert decoder._idle is cache
    assert [tensor.data_ptr() for tensor in cache.store.tensors.values()] == places
    plain = SpeculativeDecoder(llama)
    plain.generate(PROMPT, 4)
    small = plain._idle
    long = prompt_ids(240)
    assert plain.generate(long, 15, ignore_eos=True).tokens == greedy(llama, long, 15)
    assert plain._idle is small
    target = tiny_target("llama", max_position_embeddings=600)
    plain = SpeculativeDecoder(target)
    plain.generate(PROMPT, 4)
    small = plain._idle
    plain.generate(prompt_ids(400), 4)
    assert plain._idle is not small


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_contexts_carry_every_committed_token_once_with_its_states(kind: str, tree: DraftTree) -> None:
    target = tiny_target(kind)
    answer = greedy(target, PROMPT, LENGTH + 8)
    oracle = Oracle(answer, tree, 2, 0 if tree is CHAIN else 1)
    result = SpeculativeDecoder(target, oracle).generate(PROMPT, LENGTH, ignore_eos=True)
    assert result.accepted_tokens > 0
    covered = 0
    for context in oracle.contexts:
        assert context.start == covered
        covered += context.next_tokens.shape[1]
    text = torch.tensor([PROMPT + answer])
    found = torch.cat([context.next_tokens for context in oracle.contexts], dim=1)
    assert found.equal(text[:, 1 : covered + 1])
    states = target.capture(token_batch(text)).last_hidden[:, :covered]
    found_states = torch.cat([context.features.last_hidden for context in oracle.contexts], dim=1)
    torch.testing.assert_close(found_states, states, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", list(head_kinds()))
@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_heads_leave_the_text_unchanged(kind: str, tree: DraftTree | None) -> None:
    target = tiny_target("llama")
    head = make_head(kind, target.spec, num_draft_tokens=3).eval()
    proposer = HeadProposer(head, target, tree)
    decoder = SpeculativeDecoder(target, proposer)
    for seed in (0, 1):
        prompt = prompt_ids(7, seed)
        result = decoder.generate(prompt, LENGTH, ignore_eos=True)
        assert result.tokens == greedy(target, prompt, LENGTH)
        assert result.drafted_tokens > result.num_steps
        again = decoder.generate(prompt, LENGTH, ignore_eos=True)
        assert again.accepted_per_depth == result.accepted_per_depth


def test_one_copy_to_the_host_a_step(llama: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head("medusa", llama.spec, num_draft_tokens=3).eval()
    decoder = SpeculativeDecoder(llama, HeadProposer(head, llama, TREE))
    # The first run makes the tables of the trees.
    steps = decoder.generate(PROMPT, LENGTH, ignore_eos=True).num_steps
    counts = count_reads(monkeypatch)
    decoder.generate(PROMPT, LENGTH, ignore_eos=True)
    monkeypatch.undo()
    # The prompt, the first token, and one a step.
    assert counts.pop("tolist") == steps + 2
    assert not any(counts.values()), counts


class Deep:
    """Drafts deeper than it was asked to."""

    tree = CHAIN

    draws = False

    def features(self) -> FeatureRequest:
        return FeatureRequest()

    def begin(self, max_length: int) -> None:
        return None

    def propose(self, state: Any, context: DraftContext, max_depth: int) -> Proposal | None:
        return Proposal(torch.zeros(1, 4, dtype=torch.int64), CHAIN)


class Silent(Deep):
    """Never drafts."""

    def propose(self, state: Any, context: DraftContext, max_depth: int) -> Proposal | None:
        return None


def test_a_proposer_may_draft_nothing_but_not_too_deep(llama: HFTarget, answer: list[int]) -> None:
    result = SpeculativeDecoder(llama, Silent()).generate(PROMPT, LENGTH, ignore_eos=True)
    assert (result.tokens, result.num_steps) == (answer[:LENGTH], LENGTH - 1)
    with pytest.raises(ValueError, match="4 deep where 1 to 3"):
        SpeculativeDecoder(llama, Deep()).generate(PROMPT, 5, ignore_eos=True)


def test_bad_input_is_refused_at_once(llama: HFTarget) -> None:
    decoder = SpeculativeDecoder(llama)
    with pytest.raises(DataError, match=r"prompt: must hold at least one token, got none"):
        decoder.stream([], 5)
    with pytest.raises(DataError, match=r"one row is decoded at a time, got 2"):
        decoder.generate(torch.ones(2, 3, dtype=torch.int64), 5)
    with pytest.raises(ConfigError, match=r"decode.max_new_tokens: must be at least 1, got 0"):
        decoder.stream(PROMPT, 0)
    for token in (97, -1):
        with pytest.raises(
            DataError, match=rf"prompt: token ids must lie in 0..96, got {token}; use the target's tokenizer"
        ):
            decoder.stream([5, token, 200], 5)
        with pytest.raises(DataError, match=rf"prompts\[1\]: token ids must lie in 0..96, got {token}"):
            decoder.generate_batch([[5], [token]], 5)


def test_head_proposer_checks_the_tree_and_cuts_it(llama: HFTarget) -> None:
    head = make_head("medusa", llama.spec, num_draft_tokens=2).eval()
    with pytest.raises(ConfigError, match=r"decode.num_draft_tokens: deeper than the head drafts \(2\), got depth 4"):
        HeadProposer(head, llama, CHAIN)
    with pytest.raises(ConfigError, match=r"decode.tree: deeper than the head drafts \(2\), got depth 3"):
        HeadProposer(head, llama, DraftTree.from_paths([[0], [1], [0, 0], [0, 0, 0]]))
    with pytest.raises(ConfigError, match=r"decode.dynamic_depth: deeper than the head drafts \(2\), got depth 3"):
        HeadProposer(head, llama, TreeGrowth(3, 2, 4))
    with pytest.raises(ConfigError, match=r"decode.dynamic_top_k: rank beyond the draft vocabulary of"):
        HeadProposer(head, llama, TreeGrowth(2, llama.spec.vocab_size + 1, 4))
    assert HeadProposer(head, llama).tree == DraftTree.chain(2)


def test_decode_settings() -> None:
    assert draft_tree(DecodeConfig(), 3) == DraftTree.chain(3)
    assert draft_tree(DecodeConfig(num_draft_tokens=2), 3) == DraftTree.chain(2)
    assert draft_tree(DecodeConfig(tree=[[0, 0], [0], [1]]), 3).paths() == [[0], [1], [0, 0]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_draft_tokens": 0}, r"decode.num_draft_tokens: must lie in 1..32, got 0"),
        ({"max_new_tokens": 0}, r"decode.max_new_tokens: must be at least 1, got 0"),
        ({"tree": [[0]], "num_draft_tokens": 3}, r"decode.num_draft_tokens: contradicts decode.tree, got 3"),
        ({"tree": []}, r"decode.tree: needs 1 to 512 paths, got 0"),
        ({"tree": [[0], [0]]}, r"decode.tree: a path is given twice"),
        ({"tree": [[0], []]}, r"decode.tree: a path is a non-empty list of ranks from 0, got \[\]"),
        ({"tree": [[-1]]}, r"decode.tree: a path is a non-empty list of ranks from 0, got \[-1\]"),
        ({"tree": [[0], [1, 0]]}, r"decode.tree: the path \[1, 0\] lacks its beginning"),
    ],
)
def test_bad_decode_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DecodeConfig(**settings)
