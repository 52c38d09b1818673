"""Streams of batches, and what is left when a stream is closed between two steps: nothing but a cache to use again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from specdraft.core.errors import ConfigError, DataError
from specdraft.core.tree import DraftTree
from specdraft.decode._proposer_config import PromptLookupConfig, SuffixConfig
from specdraft.decode._sampling_config import SamplingConfig
from specdraft.decode.draft_model import DraftModelProposer
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.prompt_lookup import PromptLookupProposer
from specdraft.decode.proposers import HeadProposer, Proposer
from specdraft.decode.result import BatchError, DecodeResult, StepOutput
from specdraft.decode.suffix import SuffixProposer
from specdraft.targets.first_layers import first_layers
from specdraft.targets.hf import HFTarget
from tests.decode.oracle import VOCAB, prompt_ids
from tests.decode.probes import live_storages
from tests.support import make_head
from tests.tiny import tiny_target

TREE = DraftTree.from_paths([[0], [1], [0, 0], [1, 0]])
PROMPTS = [prompt_ids(length, seed=length) for length in (1, 7, 60, 25, 8)]
LENGTHS = [24, 9, 17, 30, 1]
PROPOSERS = ("none", "medusa", "eagle3", "draft_model", "prompt_lookup", "suffix")


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target("llama")


def decoder(target: HFTarget, name: str) -> SpeculativeDecoder:
    proposer: Proposer | None = None
    if name == "draft_model":
        proposer = DraftModelProposer(first_layers(target, 3), VOCAB, TREE)
    elif name == "prompt_lookup":
        proposer = PromptLookupProposer(PromptLookupConfig(max_matches=2), target.device)
    elif name == "suffix":
        proposer = SuffixProposer(SuffixConfig(), target.device)
    elif name != "none":
        proposer = HeadProposer(make_head(name, target.spec, num_draft_tokens=2).eval(), target, TREE)
    return SpeculativeDecoder(target, proposer)


def sizes() -> Counter[int]:
    """Bytes of every piece of memory that tensors hold, with how many there are of that size."""
    return Counter(live_storages().values())


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("size", [None, 2])
def test_stream_of_a_batch_gives_the_steps_of_its_rows(target: HFTarget, name: str, size: int | None) -> None:
    ours = decoder(target, name)
    wanted = ours.generate_batch(PROMPTS, LENGTHS, ignore_eos=True, max_batch_size=size)
    texts: list[list[int]] = [[] for _ in PROMPTS]
    accepted, steps = [0] * len(PROMPTS), [0] * len(PROMPTS)
    results: list[DecodeResult] = []
    for row, step in ours.stream_batch(PROMPTS, LENGTHS, ignore_eos=True, max_batch_size=size, results=results):
        texts[row] += step.tokens
        accepted[row] += step.num_accepted
        steps[row] += 1
    assert texts == [row.tokens for row in wanted] == [row.tokens for row in results]
    assert accepted == [row.accepted_tokens for row in wanted]
    assert steps == [row.num_steps + 1 for row in wanted]
    assert [row.finish_reason for row in results] == ["length"] * len(PROMPTS)


def test_rows_of_a_stream_come_together(target: HFTarget) -> None:
    """Not one row after the other: after the prompts, a step of every row in turn."""
    order = [row for row, _ in decoder(target, "none").stream_batch(PROMPTS[:3], 5, ignore_eos=True)]
    assert order[:3] == [0, 1, 2]
    assert all(sorted(order[i : i + 3]) == [0, 1, 2] for i in range(3, 15, 3))


@pytest.mark.usefixtures("fresh_memory")
@pytest.mark.parametrize("name", PROPOSERS)
def test_a_closed_stream_leaves_nothing_behind(target: HFTarget, name: str) -> None:
    ours = decoder(target, name)
    wanted = [ours.generate(p, n, ignore_eos=True) for p, n in zip(PROMPTS, LENGTHS, strict=True)]
    together = ours.generate_batch(PROMPTS, LENGTHS, ignore_eos=True)

    def streams(num_steps: int) -> Iterator[Any]:
        single = ours.stream(PROMPTS[2], 17, ignore_eos=True)
        batch = ours.stream_batch(PROMPTS, LENGTHS, ignore_eos=True)
        for stream in (single, batch):
            for _ in range(num_steps):
                next(stream)
            yield stream

    for num_steps in (4, 7, 9):
        for stream in streams(num_steps):
            stream.close()
    caches = ours._idle, ours._idle_batch
    assert None not in caches
    del stream
    before = sizes()
    for num_steps in (0, 1, 4, 7, 9):
        for stream in streams(num_steps):
            stream.close()
            assert (ours._idle, ours._idle_batch) == caches
        del stream
        assert sizes() == before, f"after {num_steps} steps"
    assert ours._idle_batch is not None
    assert ours._idle_batch.lengths == []
    for found in (
        [ours.generate(p, n, ignore_eos=True) for p, n in zip(PROMPTS, LENGTHS, strict=True)],
        ours.generate_batch(PROMPTS, LENGTHS, ignore_eos=True),
    ):
        assert [row.tokens for row in found] == [row.tokens for row in wanted]
    again = ours.generate_batch(PROMPTS, LENGTHS, ignore_eos=True)
    assert [row.accepted_per_depth for row in again] == [row.accepted_per_depth for row in together]


def test_a_dropped_stream_is_as_good_as_a_closed_one(target: HFTarget) -> None:
    ours = decoder(target, "medusa")
    stream = ours.stream_batch(PROMPTS, LENGTHS, ignore_eos=True)
    for _ in range(8):
        next(stream)
    assert ours._idle_batch is None
    del stream
    assert ours._idle_batch is not None


def test_streams_side_by_side_do_not_share_a_cache(target: HFTarget) -> None:
    ours = decoder(target, "medusa")
    wanted = [row.tokens for row in ours.generate_batch(PROMPTS, LENGTHS, ignore_eos=True)]
    texts: list[list[list[int]]] = [[[] for _ in PROMPTS] for _ in range(2)]
    pair = [ours.stream_batch(PROMPTS, LENGTHS, ignore_eos=True) for _ in range(2)]
    for steps in zip(*pair, strict=True):
        for text, (row, step) in zip(texts, steps, strict=True):
            text[row] += step.tokens
    assert texts == [wanted, wanted]


def test_sampled_rows_after_a_closed_stream_are_the_same(target: HFTarget) -> None:
    ours = decoder(target, "eagle3")
    sampling = SamplingConfig(temperature=1.0, seed=3)
    wanted = [row.tokens for row in ours.generate_batch(PROMPTS, 12, ignore_eos=True, sampling=sampling)]
    stream = ours.stream_batch(PROMPTS, 12, ignore_eos=True, sampling=sampling)
    for _ in range(9):
        next(stream)
    stream.close()
    assert [row.tokens for row in ours.generate_batch(PROMPTS, 12, ignore_eos=True, sampling=sampling)] == wanted


def consume(stream: Iterator[tuple[int, StepOutput]], seen: list[tuple[int, StepOutput]]) -> None:
    for item in stream:
        seen.append(item)


def test_what_a_stream_refuses_and_reports(target: HFTarget) -> None:
    ours = decoder(target, "none")
    with pytest.raises(DataError, match=r"prompts\[1\]: must hold at least one token, got none"):
        ours.stream_batch([[5], []], 5)
    with pytest.raises(ConfigError, match=r"max_batch_size: must be at least 1 or None, got 0"):
        ours.stream_batch([[5], [6]], 5, max_batch_size=0)
    assert list(ours.stream_batch([], 5)) == []
    everything = SamplingConfig(bad_words_ids=[[token] for token in range(VOCAB)])
    results: list[DecodeResult] = []
    stream = ours.stream_batch(
        PROMPTS[:2], 5, ignore_eos=True, sampling=[SamplingConfig(), everything], results=results
    )
    seen: list[tuple[int, StepOutput]] = []
    with pytest.raises(BatchError, match=r"row 1 of the batch: sampling: no token is left to choose"):
        consume(stream, seen)
    assert {row for row, _ in seen} == {0}
    tokens = [token for _, step in seen for token in step.tokens]
    assert tokens == results[0].tokens == ours.generate(PROMPTS[0], 5, ignore_eos=True).tokens
    assert [row.finish_reason for row in results] == ["length", ""]
