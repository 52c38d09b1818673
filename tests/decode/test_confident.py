"""Chains that a head cuts where it is not confident: what is written stays the target's, greedy and drawn."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from specdraft.core.errors import ConfigError
from specdraft.core.tree import DraftTree
from specdraft.decode._config import DecodeConfig
from specdraft.decode._sampling_config import SamplingConfig
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.proposers import HeadProposer
from specdraft.heads.base import DraftHead
from specdraft.targets.hf import HFTarget
from tests.decode.conftest import LENGTH
from tests.decode.oracle import greedy, prompt_ids
from tests.decode.test_sampled_engine import SMALL, START, law, pvalue, small  # noqa: F401
from tests.support import make_head

ROWS = 300


def confident(target: HFTarget) -> DraftHead:
    """A random head with the Markov and confidence heads of DSpark, whose confidence varies from token to token."""
    head = make_head(
        "dflash",
        target.spec,
        num_draft_tokens=3,
        num_layers=1,
        anchor_predicts=True,
        markov_rank=8,
        confidence_head=True,
    )
    return head.eval().requires_grad_(False)


@pytest.mark.parametrize("threshold", [0.05, 0.4, 0.999])
def test_greedy_text_is_unchanged(llama: HFTarget, threshold: float) -> None:
    decoder = SpeculativeDecoder(llama, HeadProposer(confident(llama), llama, None, threshold))
    prompts = [prompt_ids(7), prompt_ids(5, seed=1)]
    wanted = [greedy(llama, prompt, LENGTH) for prompt in prompts]
    assert [decoder.generate(prompt, LENGTH, ignore_eos=True).tokens for prompt in prompts] == wanted
    results = decoder.generate_batch(prompts, LENGTH, ignore_eos=True)
    assert [result.tokens for result in results] == wanted
    drafted = sum(result.drafted_tokens for result in results) / sum(result.num_steps for result in results)
    assert drafted == 0 if threshold == 0.999 else 0 < drafted < 3


@pytest.mark.parametrize("verifier", ["speculative_sampling", "block"])
def test_the_law_of_the_text_is_that_of_plain_sampling(small: HFTarget, verifier: str) -> None:  # noqa: F811
    """Where a chain ends depends on what was drawn, and only on what was drawn before."""
    settings: dict[str, Any] = {"temperature": 1.4, "verifier": verifier}
    decoder = SpeculativeDecoder(small, HeadProposer(confident(small), small, None, 0.3))
    wanted = law(small, SamplingConfig(**settings))
    counts: Counter[tuple[int, ...]] = Counter()
    lengths: Counter[int] = Counter()
    for seed in range(ROWS):
        result = decoder.generate(START, 3, sampling=SamplingConfig(seed=seed, **settings))
        counts[tuple(result.tokens[:2])] += 1
        lengths[result.drafted_tokens] += 1
    assert len(lengths) > 1
    observed = torch.tensor([counts[a, b] for a in range(SMALL) for b in range(SMALL)], dtype=torch.float64)
    assert pvalue(observed, wanted) > 0.005


def test_confidence_without_its_head_or_on_a_tree_is_refused(llama: HFTarget) -> None:
    with pytest.raises(ConfigError, match=r"^decode\.min_confidence: eagle3 heads without a confidence head"):
        HeadProposer(make_head("eagle3", llama.spec), llama, DraftTree.chain(2), 0.5)
    for fields in ({"tree": [[0], [1]]}, {"dynamic_total_tokens": 4}):
        with pytest.raises(ConfigError, match=r"^decode\.min_confidence: cuts chains alone, got 0\.5"):
            DecodeConfig(min_confidence=0.5, **fields)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^decode\.min_confidence: must lie between 0 and 1"):
        DecodeConfig(min_confidence=1.0)
