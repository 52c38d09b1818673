"""Short and long prompts together, many rows, and memory that does not grow with the text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdraft.core.tree import DraftTree
from specdraft.core.types import Features
from specdraft.decode._proposer_config import PromptLookupConfig
from specdraft.decode.draft_model import DraftModelProposer
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.prompt_lookup import PromptLookupProposer
from specdraft.decode.proposers import HeadProposer, Proposer
from specdraft.targets.first_layers import first_layers
from specdraft.targets.hf import HFTarget
from tests.decode.oracle import VOCAB, greedy, prompt_ids
from tests.decode.probes import live_storages
from tests.support import make_head
from tests.tiny import tiny_target

TREE = DraftTree.from_paths([[0], [1], [0, 0], [1, 0]])
LONG = 3000


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target("llama", max_position_embeddings=4096)


def make(target: HFTarget, name: str) -> Proposer | None:
    if name == "draft_model":
        return DraftModelProposer(first_layers(target, 3), VOCAB, TREE)
    if name == "prompt_lookup":
        return PromptLookupProposer(PromptLookupConfig(), target.device)
    if name == "none":
        return None
    return HeadProposer(make_head(name, target.spec, num_draft_tokens=2).eval(), target, TREE)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_prompts_of_one_and_of_3000_tokens_together(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides: dict[str, Any] = {"tie_word_embeddings": False} if kind == "gemma3" else {}
    target = tiny_target(kind, max_position_embeddings=4096, **overrides)
    prompts = [prompt_ids(length, seed=length) for length in (1, LONG, 17)]
    wanted = [greedy(target, prompt, 12) for prompt in prompts]
    decoder = SpeculativeDecoder(target, make(target, "eagle3"), prefill_chunk=512)
    sizes: list[int] = []
    forward = target.forward_cached

    def spy(input_ids: torch.Tensor, *args: Any) -> Features:
        sizes.append(input_ids.numel())
        return forward(input_ids, *args)

    monkeypatch.setattr(target, "forward_cached", spy)
    found = decoder.generate_batch(prompts, 12, ignore_eos=True)
    assert [row.tokens for row in found] == wanted
    assert sorted(sizes)[-6:] == [LONG % 512, *[512] * 5]
    assert decoder.generate(prompts[1], 12, ignore_eos=True).tokens == wanted[1]


@pytest.mark.parametrize("name", ["eagle3", "prompt_lookup"])
def test_sixteen_rows_that_leave_at_different_times(target: HFTarget, name: str) -> None:
    prompts = [prompt_ids(1 + 5 * (row * 7 % 16), seed=row) for row in range(16)]
    lengths = [1 + 3 * (row * 5 % 16) for row in range(16)]
    decoder = SpeculativeDecoder(target, make(target, name))
    alone = [decoder.generate(p, n, ignore_eos=True) for p, n in zip(prompts, lengths, strict=True)]
    plain = SpeculativeDecoder(target)
    widths: list[int] = []
    results: list[Any] = []
    for _ in decoder.stream_batch(prompts, lengths, ignore_eos=True, results=results):
        widths.append(sum(not row.finish_reason for row in results))
    assert len(set(widths)) > 10, "rows leave at different times"
    for size in (None, 16, 5):
        found = decoder.generate_batch(prompts, lengths, ignore_eos=True, max_batch_size=size)
        for a, b in zip(found, alone, strict=True):
            assert (a.tokens, a.num_steps, a.accepted_per_depth) == (b.tokens, b.num_steps, b.accepted_per_depth)
    texts = plain.generate_batch(prompts, lengths, ignore_eos=True)
    assert [row.tokens for row in texts] == [row.tokens for row in alone]


def live_bytes() -> int:
    """Of the storages of all tensors that are alive."""
    return sum(live_storages().values())


@pytest.mark.usefixtures("fresh_memory")
@pytest.mark.parametrize(
    ("name", "length"),
    [("none", 2000), ("eagle3", 600), ("medusa", 600), ("draft_model", 400), ("prompt_lookup", 600)],
)
def test_memory_is_flat_over_many_tokens(target: HFTarget, name: str, length: int) -> None:
    """Caches are made for the whole length before the first step; nothing a step makes outlives the next one."""
    decoder = SpeculativeDecoder(target, make(target, name))
    marks: list[int] = []
    count = 0
    for step in decoder.stream(prompt_ids(9), length, ignore_eos=True):
        count += len(step.tokens)
        if count >= length * (2 + len(marks)) / 8 and count < length - 10:
            marks.append(live_bytes())
    assert count == length
    assert len(marks) == 6
    # A step's own tensors differ a little with what was accepted.
    assert max(marks) - min(marks) < 10_000
    cache = decoder._idle
    assert cache is not None
    columns = -(-(9 + length + (len(decoder.proposer.tree) if decoder.proposer else 0)) // 256) * 256
    assert cache.capacity == columns
    assert marks[0] > cache.num_bytes == columns * 2 * 4 * 2 * 8 * 4, "columns, states, layers, heads, width, bytes"


@pytest.mark.usefixtures("fresh_memory")
def test_memory_of_a_batch_is_flat(target: HFTarget) -> None:
    decoder = SpeculativeDecoder(target, make(target, "eagle3"))
    marks: list[int] = []
    steps = decoder.stream_batch([prompt_ids(9), prompt_ids(40), prompt_ids(2)], 300, ignore_eos=True)
    for i, _ in enumerate(steps):
        if i and i % 100 == 0:
            marks.append(live_bytes())
    assert len(marks) >= 3
    assert max(marks[:3]) - min(marks[:3]) < 10_000
