"""Logits rules against transformers' own processors on the same prefixes, truncation, draws, and refused settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdraft.core.errors import ConfigError
from specdraft.core.tree import DraftTree
from specdraft.decode._sampling_config import SamplingConfig
from specdraft.decode.plan import TreePlan
from specdraft.decode.sampling import NUCLEUS_TRIES, LogitsRules, RowRandom, WarpedSampler, draw, truncate
from specdraft.decode.words import StopFinder, bad_word_ids
from tests.tiny import tiny_tokenizer

VOCAB = 11
EOS = 2
CPU = torch.device("cpu")
TREE = DraftTree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
BAD_WORDS = [[4], [3, 5], [6, 3, 5], [9, 9], [1, 2, 3, 4, 7]]
RULES: dict[str, Any] = {
    "repetition_penalty": 1.7,
    "presence_penalty": 0.6,
    "frequency_penalty": -0.4,
    "logit_bias": [[3, 1.5], [8, -2.0]],
    "bad_words_ids": BAD_WORDS,
    "min_new_tokens": 6,
}


def by_transformers(config: SamplingConfig, prompt: list[int], text: list[int], logits: Tensor) -> Tensor:
    """What generate() makes of the logits ``[V]`` after ``prompt`` and ``text``."""
    ids, scores = torch.tensor([prompt + text]), logits[None]
    steps = LogitsProcessorList()
    if config.logit_bias:
        steps.append(SequenceBiasLogitsProcessor({(int(token),): bias for token, bias in config.logit_bias}))
    if config.repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
    scores = steps(ids, scores)
    for token in range(VOCAB):
        count = text.count(token)
        scores[0, token] -= config.frequency_penalty * count + config.presence_penalty * (count > 0)
    steps = LogitsProcessorList()
    if config.bad_words_ids:
        steps.append(NoBadWordsLogitsProcessor(config.bad_words_ids, eos_token_id=[]))
    if config.min_new_tokens:
        steps.append(MinNewTokensLengthLogitsProcessor(len(prompt), config.min_new_tokens, [EOS], "cpu"))
    return warp(config, ids, steps(ids, scores))[0]


def warp(config: SamplingConfig, ids: Tensor, scores: Tensor) -> Tensor:
    steps = LogitsProcessorList()
    if not config.is_greedy and config.temperature != 1.0:
        steps.append(TemperatureLogitsWarper(config.temperature))
    if config.top_k is not None:
        steps.append(TopKLogitsWarper(config.top_k))
    if config.top_p is not None and config.top_p < 1:
        steps.append(TopPLogitsWarper(config.top_p))
    if config.min_p is not None:
        steps.append(MinPLogitsWarper(config.min_p))
    return steps(ids, scores)


@pytest.mark.parametrize("only", [None, *RULES])
@pytest.mark.parametrize("warping", [{}, {"temperature": 0.7, "top_k": 6, "top_p": 0.8, "min_p": 0.1}])
def test_every_node_is_shaped_by_its_own_prefix(only: str | None, warping: dict[str, Any]) -> None:
    rules = RULES if only is None else {only: RULES[only]}
    config = SamplingConfig(**rules, **warping)
    plan = TreePlan(TREE, 8, None, True, CPU)
    generator = torch.Generator().manual_seed(1)
    hits = 0
    for trial in range(40):
        prompt = torch.randint(0, VOCAB, (5 + trial % 6,), generator=generator).tolist()
        text: list[int] = []
        shape = LogitsRules(config, config.bad_words_ids, VOCAB, frozenset({EOS}), torch.tensor(prompt))
        for emitted in ([], [3], [6, 3], [1, 2, 3, 4], [9]):
            if emitted:
                text += emitted
                shape.extend(torch.tensor(emitted))
            drafted = torch.randint(0, VOCAB, (len(TREE),), generator=generator)
            drafted[: trial % 4] = torch.tensor([3, 9, 5])[: trial % 4]
            tokens = torch.cat([torch.tensor([(prompt + text)[-1]]), drafted])
            logits = torch.randn(plan.size, VOCAB, generator=generator) * 2
            found = shape(logits, tokens, plan)
            if not config.is_greedy:
                found = truncate(found, config)
            for row, path in enumerate(plan.path_rows):
                own = text + tokens[path[1:]].tolist()
                wanted = by_transformers(config, prompt, own, logits[row].clone())
                torch.testing.assert_close(found[row], wanted)
                hits += int((wanted != logits[row]).any())
    assert hits > 100


def test_plain_steps_and_prefixes_shorter_than_a_bad_word() -> None:
    config = SamplingConfig(bad_words_ids=BAD_WORDS)
    plan = TreePlan(DraftTree((), ()), 8, None, True, CPU)
    shape = LogitsRules(config, BAD_WORDS, VOCAB, frozenset(), torch.tensor([3]))
    found = shape(torch.zeros(1, VOCAB), torch.tensor([3]), plan)
    assert (found == -torch.inf).nonzero()[:, 1].tolist() == [4, 5]


def test_logits_are_left_alone_where_nothing_is_asked() -> None:
    logits = torch.randn(1, VOCAB)
    before = logits.clone()
    plan = TreePlan(DraftTree((), ()), 8, None, True, CPU)
    config = SamplingConfig(**RULES)
    shape = LogitsRules(config, BAD_WORDS, VOCAB, frozenset({EOS}), torch.tensor([3]))
    assert not shape(logits, torch.tensor([3]), plan).equal(before)
    assert logits.equal(before)


@pytest.mark.parametrize("scale", [0.02, 1.0, 6.0], ids=["flat", "usual", "sharp"])
@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": 0.9},
        {"top_p": 0.3, "temperature": 1.7},
        {"top_k": 50},
        {"top_k": 700, "top_p": 0.95},
        {"min_p": 0.05, "top_p": 0.999},
        {"top_k": 1},
        {"top_p": 1e-6},
        {"top_k": 10_000, "top_p": 1.0, "min_p": 1.0},
    ],
    ids=str,
)
def test_truncation_is_that_of_transformers(settings: dict[str, Any], scale: float) -> None:
    """A vocabulary in which the nucleus is found among the likeliest tokens, or is not and needs a full sort."""
    config = SamplingConfig(**{"temperature": 1.0, **settings})
    logits = torch.randn(4, 3 * NUCLEUS_TRIES[1], generator=torch.Generator().manual_seed(0)) * scale
    found = truncate(logits, config)
    wanted = warp(config, torch.zeros(4, 1, dtype=torch.int64), logits.clone())
    kept, meant = found.isfinite(), wanted.isfinite()
    # At the edge of the nucleus the two sums may round to different sides.
    assert (kept != meant).sum(-1).max() <= (1 if config.top_p else 0)
    both = kept & meant
    torch.testing.assert_close(found[both], wanted[both])
    assert kept.any(-1).all()


def test_every_row_has_its_nucleus_wherever_it_is_found() -> None:
    """Rows whose nucleus is found at once, at a later try, and by sorting, in one call."""
    logits = torch.randn(5, 16 * NUCLEUS_TRIES[-1], generator=torch.Generator().manual_seed(0))
    logits *= torch.tensor([8.0, 1.0, 3.0, 0.01, 2.0])[:, None]
    config = SamplingConfig(temperature=1.0, top_p=0.9)
    found = truncate(logits, config)
    sizes = found.isfinite().sum(-1).tolist()
    first, last = NUCLEUS_TRIES
    assert sizes[0] < first < sizes[2] < last < min(sizes[1], sizes[3], sizes[4])
    for row, alone in zip(logits, found, strict=True):
        values, tokens = row.double().softmax(-1).sort(descending=True)
        wanted = tokens[values.cumsum(0) - values < 0.9].tolist()
        kept = alone.isfinite().nonzero()[:, 0].tolist()
        assert len(set(kept) ^ set(wanted)) <= 2, "at the edge two sums may round to different sides"
        assert torch.equal(alone[kept], row[kept])


def test_ties_at_the_kth_token_all_stay() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    assert truncate(logits, SamplingConfig(temperature=1.0, top_k=2)).isfinite().tolist() == [
        [False, True, True, True, False]
    ]


def test_draws_follow_the_weights() -> None:
    weights = torch.tensor([[0.0, 2.0, 0.0, 6.0, 0.0]])
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    drawn = draw(weights.expand(1000, -1), grid)
    assert torch.bincount(drawn, minlength=5).tolist() == [0, 250, 0, 750, 0]
    assert draw(weights, torch.zeros(1, dtype=torch.float64)).tolist() == [1]
    assert draw(weights, torch.full((1,), 1 - 2**-53, dtype=torch.float64)).tolist() == [3]
    assert draw(torch.zeros(1, 5), torch.zeros(1, dtype=torch.float64)).tolist() == [4]


def test_numbers_of_positions_stay_until_they_are_used() -> None:
    random, other = RowRandom(3, CPU), RowRandom(3, CPU)
    numbers = other.ahead(9)
    assert random.ahead(2).equal(numbers[:2])
    assert random.ahead(4).equal(numbers[:4])
    random.consume(3)
    assert random.ahead(6).equal(numbers[3:9])
    torch.manual_seed(99)
    assert not RowRandom(4, CPU).ahead(9).equal(numbers)
    assert not set(random.fresh(5).tolist()) & set(numbers.tolist())


def test_drafts_are_drawn_without_replacement_from_what_is_reported() -> None:
    config = SamplingConfig(temperature=2.0, top_k=4)
    logits = torch.randn(1, 6, generator=torch.Generator().manual_seed(0))
    sampler = WarpedSampler(config, RowRandom(0, CPU))
    counts = torch.zeros(6, 6)
    for _ in range(4000):
        ids, probs = sampler(logits, 2)
        counts[ids[0, 0], ids[0, 1]] += 1
    torch.testing.assert_close(probs, truncate(logits, config).softmax(-1))
    q = probs[0]
    wanted = q[:, None] * q[None] / (1 - q[:, None])
    wanted.fill_diagonal_(0)
    assert (counts / 4000 - wanted).abs().max() < 0.025
    assert counts[wanted == 0].sum() == 0


def test_bad_words_are_found_in_both_places() -> None:
    tokenizer = tiny_tokenizer()
    ids = bad_word_ids(SamplingConfig(bad_words=["ab"], bad_words_ids=[[5]]), tokenizer)
    assert [tokenizer.decode(word) for word in ids[1:]] == ["ab", " ab"]
    assert ids[0] == [5]
    with pytest.raises(ConfigError, match=r"sampling.bad_words: needs a tokenizer, got \['ab'\] without one"):
        bad_word_ids(SamplingConfig(bad_words=["ab"]), None)


def test_stop_texts_span_tokens_and_steps() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("so it ends. here", add_special_tokens=False)["input_ids"]
    finder = StopFinder(["ends.", "never"], tokenizer)
    assert finder.find(ids[:7]) is None
    assert finder.find(ids[7:9]) is None
    assert finder.find(ids[9:]) == 1
    long = StopFinder(["xyz"], tokenizer)
    for token in ids * 20:
        assert long.find([token]) is None
    assert long.find(tokenizer("xyz", add_special_tokens=False)["input_ids"]) == 2
    with pytest.raises(ConfigError, match=r"sampling.stop: needs a tokenizer, got \['x'\] without one"):
        StopFinder(["x"], None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, r"sampling.temperature: must lie in 0..100, got -1.0"),
        ({"temperature": float("nan")}, r"sampling.temperature: must lie in 0..100, got nan"),
        ({"temperature": 1e-5}, r"sampling.temperature: too small to divide by, got 1e-05; use 0"),
        ({"top_k": 5}, r"sampling.top_k: has no effect at temperature 0, got 5"),
        ({"temperature": 1.0, "top_k": 0}, r"sampling.top_k: must be at least 1, got 0"),
        ({"temperature": 1.0, "top_p": 0.0}, r"sampling.top_p: must lie above 0 and at most 1, got 0.0"),
        ({"temperature": 1.0, "min_p": 1.5}, r"sampling.min_p: must lie above 0 and at most 1, got 1.5"),
        ({"repetition_penalty": 0.0}, r"sampling.repetition_penalty: must lie above 0 and at most 100, got 0.0"),
        ({"presence_penalty": 2.5}, r"sampling.presence_penalty: must lie in -2..2, got 2.5"),
        ({"frequency_penalty": -3.0}, r"sampling.frequency_penalty: must lie in -2..2, got -3.0"),
        ({"logit_bias": [[1.5, 2.0]]}, r"sampling.logit_bias: needs pairs of token id and finite bias, got \[1.5"),
        ({"logit_bias": [["a", 2.0]]}, r"sampling.logit_bias: needs pairs of token id and finite bias, got \['a'"),
        ({"logit_bias": [[1, 2.0], [1, 3.0]]}, r"sampling.logit_bias: a token is given twice"),
        ({"bad_words": [""]}, r"sampling.bad_words: a text must not be empty"),
        ({"bad_words_ids": [[]]}, r"sampling.bad_words_ids: a word is a non-empty list of token ids, got \[\]"),
        ({"min_new_tokens": -1}, r"sampling.min_new_tokens: must not be negative, got -1"),
        ({"stop": [""]}, r"sampling.stop: a text must not be empty"),
        ({"stop": ["x"] * 65}, r"sampling.stop: at most 64 texts, got 65"),
        ({"seed": -1}, r"sampling.seed: must lie in 0..2\^63-1, got -1"),
        ({"verifier": "lucky"}, r"sampling.verifier: unknown, got 'lucky'; use one of auto, greedy"),
        ({"verifier": "greedy", "temperature": 1.0}, r"sampling.verifier: greedy needs temperature 0"),
        ({"verifier": "block"}, r"sampling.verifier: needs a temperature above 0, got block at temperature 0"),
        ({"typical_epsilon": 0.2}, r"sampling.typical_epsilon: has no effect with verifier auto, got 0.2"),
        ({"verifier": "typical", "temperature": 1.0, "typical_delta": 0.0}, r"sampling.typical_delta: must be above 0"),
        ({"verifier": "typical", "temperature": 1.0, "typical_epsilon": 1.0}, r"typical_epsilon: must lie between 0"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingConfig(**settings)
