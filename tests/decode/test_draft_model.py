"""Drafts drawn from a draft model: the law of the text, enumerated, and its pace."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch

from specdraft.core.errors import DecodeError
from specdraft.core.tree import DraftTree, Proposal
from specdraft.core.types import DraftContext, Features
from specdraft.decode._sampling_config import SamplingConfig
from specdraft.decode.draft_model import DraftModelProposer
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.verify import block_odds, sibling_odds, siblings_of
from specdraft.targets.first_layers import first_layers
from specdraft.targets.hf import HFTarget
from tests.decode.exact import (
    CPU,
    Model,
    block_outcomes,
    error,
    mean_emitted,
    node_texts,
    plan_of,
    sibling_outcomes,
)
from tests.decode.oracle import prompt_ids
from tests.tiny import tiny_models, tiny_target

SMALL = 4
CHAIN = DraftTree.chain(2)
TREE = DraftTree.from_paths([[0], [1], [0, 0]])
Emitted = list[tuple[tuple[int, ...], float]]


def small(seed_scale: float, vocab_size: int = SMALL) -> HFTarget:
    settings = {"initializer_range": seed_scale, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return HFTarget.from_model(tiny_models["llama"](vocab_size=vocab_size, **settings))


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return small(0.3)


def law_of(model: HFTarget) -> Model:
    @cache
    def after(prefix: tuple[int, ...]) -> torch.Tensor:
        with torch.no_grad():
            return model.model(input_ids=torch.tensor([prefix])).logits[0, -1].double().softmax(-1)

    return after


def every_draft(proposer: DraftModelProposer, prefix: tuple[int, ...]) -> list[tuple[Proposal, float]]:
    """All drafts that can be drawn after ``prefix``, each with its probability."""
    found: dict[tuple[int, ...], tuple[Proposal, float]] = {}
    for draws in itertools.product(range(SMALL), repeat=4):
        weight, taken = 1.0, 0

        def sampler(
            logits: torch.Tensor, count: int, draws: tuple[int, ...] = draws
        ) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal weight, taken
            probs = logits.double().softmax(-1)
            rows = []
            for own in probs:
                left = own.clone()
                for token in draws[taken : taken + count]:
                    weight *= float(left[token] / left.sum().clamp_min(1e-30))
                    left[token] = 0.0
                rows.append(draws[taken : taken + count])
                taken += count
            return torch.tensor(rows), probs

        nothing = Features(torch.empty(1, 0, 1), None)
        context = DraftContext(torch.tensor([prefix[1:]]), nothing, 0, list(prefix), sampler)
        with torch.inference_mode():
            proposal = proposer.propose(proposer.begin(20), context, 9)
        assert proposal is not None
        if weight > 0:
            found[draws[:taken]] = (proposal, weight)
    assert sum(weight for _, weight in found.values()) == pytest.approx(1.0)
    return list(found.values())


def step_of(proposer: DraftModelProposer, target: Model, rule: str) -> object:
    @cache
    def step(prefix: tuple[int, ...]) -> Emitted:
        emitted: Emitted = []
        for proposal, weight in every_draft(proposer, prefix):
            tree = proposal.tree
            assert isinstance(tree, DraftTree)
            assert proposal.probs is not None
            tokens = tuple(proposal.tokens[0].tolist())
            texts = node_texts(tree, tokens)
            rows = torch.tensor([0, *tokens])
            probs = torch.stack([target(prefix + text) for text in texts])
            siblings = siblings_of(tree, CPU)
            drafted = proposal.probs.double()
            if rule == "block":
                odds = block_odds(rows, probs, drafted)
                outcomes = block_outcomes(odds)
            else:
                odds = sibling_odds(siblings, rows, probs, drafted)
                outcomes = sibling_outcomes(plan_of(tree), odds)
            for row, chance in outcomes:
                rest = odds.rest(torch.tensor([row]))[0]
                for token, p in enumerate((rest / rest.sum()).tolist()):
                    if p > 0:
                        emitted.append(((*texts[row], token), weight * chance * p))
        return emitted

    return step


@pytest.mark.parametrize(
    ("tree", "rule", "least"),
    [
        (CHAIN, "siblings", 0.0),
        (CHAIN, "siblings", 0.3),
        (CHAIN, "block", 0.0),
        (CHAIN, "block", 0.3),
        (TREE, "siblings", 0.0),
    ],
)
def test_drawn_drafts_leave_the_law_alone(target: HFTarget, tree: DraftTree, rule: str, least: float) -> None:
    """Also where a chain ends behind an unlikely token, so that its length depends on what was drawn."""
    law = law_of(target)
    step = step_of(DraftModelProposer(small(0.2), SMALL, tree, least), law, rule)
    if least:
        lengths = {
            len(proposal.tree)
            for proposal, _ in every_draft(DraftModelProposer(small(0.2), SMALL, tree, least), (0, 1))
        }
        assert lengths == {1, 2}
    assert error(step, law, num_steps=1, length=3) < 1e-5  # type: ignore[arg-type]
    assert 1.3 < mean_emitted(step) < 2.9  # type: ignore[arg-type]


def test_a_smaller_vocabulary_draws_nothing_beyond_it() -> None:
    target, model = small(0.3, 6), small(0.2)
    proposer = DraftModelProposer(model, SMALL, CHAIN, target_vocab_size=6)
    decoder = SpeculativeDecoder(target, proposer)
    found = [decoder.generate([1, 2], 12, sampling=SamplingConfig(temperature=1.0, seed=seed)) for seed in range(20)]
    assert max(token for row in found for token in row.tokens) >= SMALL
    assert sum(row.accepted_tokens for row in found) > 20


def test_where_nothing_pays_little_is_drafted() -> None:
    target = tiny_target("llama")
    stranger = HFTarget.from_model(tiny_models["llama"](initializer_range=0.5))
    plain = SpeculativeDecoder(target).generate(prompt_ids(7), 120, ignore_eos=True)
    fixed = SpeculativeDecoder(target, DraftModelProposer(stranger, 97, DraftTree.chain(4)))
    paced = SpeculativeDecoder(target, DraftModelProposer(stranger, 97, DraftTree.chain(4), cost=0.7))
    counts = []
    for decoder in (fixed, paced):
        result = decoder.generate(prompt_ids(7), 120, ignore_eos=True)
        assert result.tokens == plain.tokens
        counts.append(result.drafted_tokens)
    assert counts[1] < 40 < 300 < counts[0]
    # The agreeing model goes as deep as it may.
    same = SpeculativeDecoder(target, DraftModelProposer(first_layers(target, 4), 97, DraftTree.chain(4), cost=0.7))
    assert same.generate(prompt_ids(7), 120, ignore_eos=True).num_steps < 60


@pytest.mark.parametrize("config", [SamplingConfig(), SamplingConfig(temperature=1.0)], ids=["greedy", "sampled"])
def test_nan_of_the_draft_model_ends_the_row(config: SamplingConfig) -> None:
    target = tiny_target("llama")
    broken = HFTarget.from_model(tiny_models["llama"]())
    with torch.no_grad():
        for parameter in broken.model.parameters():
            parameter.fill_(torch.nan)
    decoder = SpeculativeDecoder(target, DraftModelProposer(broken, 97, CHAIN))
    with pytest.raises(DecodeError, match="not finite, got NaN or infinity in step 1"):
        decoder.generate(prompt_ids(7), 20, sampling=config)
