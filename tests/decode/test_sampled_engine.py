"""Sampling through the engine: the law of the text, seeds, processors, stop texts, and what ends a row with an error."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from specdraft.core.errors import ConfigError, DecodeError
from specdraft.core.tree import DraftTree, Proposal, TreeGrowth
from specdraft.core.types import DraftContext
from specdraft.decode._proposer_config import PromptLookupConfig
from specdraft.decode._sampling_config import SamplingConfig
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.prompt_lookup import PromptLookupProposer
from specdraft.decode.proposers import HeadProposer
from specdraft.heads.base import head_kinds
from specdraft.targets.hf import HFTarget
from tests.decode.conftest import LENGTH, PROMPT
from tests.decode.oracle import Oracle, prompt_ids
from tests.support import make_head
from tests.tiny import tiny_models, tiny_tokenizer

SMALL = 6
START = [1, 4, 3]
CHAIN = DraftTree.chain(3)
TREE = DraftTree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0]])
GROWN = TreeGrowth(2, 2, 4)
ROWS = 300


@pytest.fixture(scope="module")
def small() -> HFTarget:
    """A target of six tokens, none of which ends the text."""
    return HFTarget.from_model(
        tiny_models["llama"](
            vocab_size=SMALL, initializer_range=0.15, bos_token_id=None, eos_token_id=None, pad_token_id=None
        )
    )


def law(target: HFTarget, config: SamplingConfig) -> torch.Tensor:
    """``[V * V]``: the exact law of the first two tokens, through transformers' processors."""
    from tests.decode.test_sampling import warp

    def after(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = target.model(input_ids=torch.tensor([ids])).logits[:, -1]
        seen = torch.zeros(SMALL, dtype=torch.bool).index_fill(0, torch.tensor(ids), True)
        penalty = config.repetition_penalty
        logits = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
        return warp(config, torch.tensor([ids]), logits).softmax(-1)[0].double()

    first = after(START)
    return torch.cat([first[token] * after([*START, token]) for token in range(SMALL)])


@pytest.mark.parametrize(
    ("kind", "shape", "settings"),
    [
        ("eagle3", CHAIN, {"verifier": "speculative_sampling"}),
        ("eagle3", CHAIN, {"verifier": "block", "top_p": 0.9, "repetition_penalty": 1.3}),
        ("eagle3", TREE, {"verifier": "speculative_sampling", "repetition_penalty": 1.3}),
        ("medusa", TREE, {"verifier": "speculative_sampling", "top_k": 4}),
        ("medusa", GROWN, {"verifier": "point_mass", "min_p": 0.1}),
    ],
    ids=["chain", "block", "tree", "shared-levels", "grown"],
)
def test_the_law_of_the_text_is_that_of_plain_sampling(
    small: HFTarget, kind: str, shape: DraftTree | TreeGrowth, settings: dict[str, Any]
) -> None:
    head = make_head(kind, small.spec, num_draft_tokens=3).eval()
    decoder = SpeculativeDecoder(small, HeadProposer(head, small, shape))
    wanted = law(small, SamplingConfig(temperature=1.4, **settings))
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for seed in range(ROWS):
        # Two tokens are asked for and a third, so that the second may be drafted.
        result = decoder.generate(START, 3, sampling=SamplingConfig(temperature=1.4, seed=seed, **settings))
        counts[tuple(result.tokens[:2])] += 1
        accepted += result.accepted_tokens
    assert ROWS / 10 < accepted < ROWS
    observed = torch.tensor([counts[a, b] for a in range(SMALL) for b in range(SMALL)], dtype=torch.float64)
    assert pvalue(observed, wanted) > 0.005


def pvalue(observed: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of the chi-square test; what is expected fewer than five times is counted together."""
    assert observed[wanted == 0].sum() == 0
    expected = wanted / wanted.sum() * observed.sum()
    rare = expected < 5
    parts = [torch.cat([part[~rare], part[rare].sum()[None]]) for part in (observed, expected)]
    if parts[1][-1] < 1:
        parts = [part[:-1] for part in parts]
    assert len(parts[0]) > 5
    return float(chisquare(parts[0].numpy(), (parts[1] * parts[0].sum() / parts[1].sum()).numpy()).pvalue)


def test_a_wrong_law_is_found_out_with_as_many_rows(small: HFTarget) -> None:
    """Typical acceptance with a low threshold, through the same counts."""
    settings = {"temperature": 1.4, "verifier": "typical", "typical_epsilon": 0.01}
    head = make_head("eagle3", small.spec, num_draft_tokens=3).eval()
    decoder = SpeculativeDecoder(small, HeadProposer(head, small, CHAIN))
    wanted = law(small, SamplingConfig(temperature=1.4))
    observed = torch.zeros(SMALL * SMALL, dtype=torch.float64)
    for seed in range(ROWS // 2):
        result = decoder.generate(START, 3, sampling=SamplingConfig(seed=seed, **settings))
        observed[result.tokens[0] * SMALL + result.tokens[1]] += 1
        assert not result.lossless
        assert result.verifier == "typical"
    assert pvalue(observed, wanted) < 1e-6


@pytest.mark.parametrize("kind", list(head_kinds()))
@pytest.mark.parametrize("verifier", ["speculative_sampling", "block", "point_mass", "typical"])
def test_a_seed_gives_its_text_whatever_else_is_decoded(llama: HFTarget, kind: str, verifier: str) -> None:
    head = make_head(kind, llama.spec, num_draft_tokens=3).eval()
    decoder = SpeculativeDecoder(llama, HeadProposer(head, llama, None if verifier == "block" else TREE))

    def config(seed: int) -> SamplingConfig:
        return SamplingConfig(temperature=1.0, verifier=verifier, seed=seed)

    first = decoder.generate(PROMPT, LENGTH, ignore_eos=True, sampling=config(5)).tokens
    torch.manual_seed(123)
    streams = [decoder.stream(PROMPT, LENGTH, ignore_eos=True, sampling=config(seed)) for seed in (6, 5)]
    texts: list[list[int]] = [[], []]
    for _ in range(LENGTH):
        for text, stream in zip(texts, streams, strict=True):
            text += [token for step in [next(stream, None)] if step is not None for token in step.tokens]
    assert texts[1] == first
    assert texts[0] != first


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 20, "top_p": 0.8, "repetition_penalty": 1.2, "min_new_tokens": 9},
        {"presence_penalty": 1.0, "bad_words_ids": [[5], [7, 8]], "logit_bias": [[9, 3.0]]},
    ],
    ids=["plain", "nucleus", "words"],
)
def test_fixed_drafts_write_the_text_of_plain_sampling(llama: HFTarget, settings: dict[str, Any]) -> None:
    """Token by token with the same seed, since every position is drawn with its own number."""
    for seed in range(4):
        config = SamplingConfig(temperature=0.9, verifier="point_mass", seed=seed, **settings)
        plain = SpeculativeDecoder(llama).generate(PROMPT, LENGTH, sampling=config)
        right = Oracle((plain.tokens + [0] * LENGTH)[: LENGTH + 8], DraftTree.chain(4), 3)
        for proposer in (
            HeadProposer(make_head("eagle3", llama.spec, num_draft_tokens=3).eval(), llama, TREE),
            HeadProposer(make_head("medusa", llama.spec, num_draft_tokens=3).eval(), llama, TreeGrowth(3, 4, 12)),
            right,
        ):
            result = SpeculativeDecoder(llama, proposer).generate(PROMPT, LENGTH, sampling=config)
            assert (result.tokens, result.finish_reason) == (plain.tokens, plain.finish_reason)
            assert result.lossless
        assert result.accepted_tokens > LENGTH / 2 or plain.finish_reason == "eos"
        assert plain.verifier is None


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.8},
        {"bad_words_ids": [[3], [4, 5], [6, 7, 8]]},
        {"min_new_tokens": 25},
        {"logit_bias": [[5, 9.0], [6, -3.0]], "repetition_penalty": 0.8},
    ],
    ids=["penalty", "words", "length", "bias"],
)
@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
def test_greedy_with_rules_is_that_of_transformers(
    llama: HFTarget, answer: list[int], settings: dict[str, Any], tree: DraftTree
) -> None:
    eos = answer[20]
    assert eos not in answer[:20]
    if "bad_words_ids" in settings:
        # The numbers are places in the answer.
        settings = {"bad_words_ids": [[answer[place] for place in word] for word in settings["bad_words_ids"]]}
    theirs = {key: value for key, value in settings.items() if key != "logit_bias"}
    if "logit_bias" in settings:
        theirs["sequence_bias"] = [[[int(token)], bias] for token, bias in settings["logit_bias"]]
    for seed in (0, 3):
        prompt = PROMPT if seed == 0 else prompt_ids(7, seed)
        out = llama.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=LENGTH,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=eos,
            **theirs,
        )
        wanted = out[0, len(prompt) :].tolist()
        for right in (0, 2):
            oracle = Oracle(wanted + [0] * 40, tree, right)
            result = SpeculativeDecoder(llama, oracle).generate(
                prompt, LENGTH, [eos], sampling=SamplingConfig(**settings)
            )
            assert result.tokens == wanted
            assert (result.accepted_tokens > 0) == (right > 0)
        if seed == 0:
            plain = SpeculativeDecoder(llama).generate(prompt, LENGTH, [eos]).tokens
            assert plain != wanted


@pytest.mark.parametrize("sampled", [False, True])
def test_stop_texts_end_a_row_inside_a_step(llama: HFTarget, sampled: bool) -> None:
    tokenizer = tiny_tokenizer()
    config = SamplingConfig(temperature=0.8, seed=2) if sampled else SamplingConfig()
    plain = SpeculativeDecoder(llama).generate(PROMPT, LENGTH, ignore_eos=True, sampling=config).tokens
    place = 7
    stop = tokenizer.decode(plain[place - 2 : place + 1])
    text = [tokenizer.decode(plain[: i + 1]) for i in range(LENGTH)]
    end = next(i for i, part in enumerate(text) if stop in part)
    settings = {"stop": ["never", stop], **({"temperature": 0.8, "seed": 2} if sampled else {})}
    decoder = SpeculativeDecoder(llama, Oracle(plain + [0] * 9, DraftTree.chain(4), 4), tokenizer)
    config = SamplingConfig(verifier="point_mass" if sampled else "auto", **settings)
    result = decoder.generate(PROMPT, LENGTH, ignore_eos=True, sampling=config)
    assert result.tokens == plain[: end + 1]
    assert result.finish_reason == "stop"
    assert result.accepted_tokens == end - end // 5
    steps = list(decoder.stream(PROMPT, LENGTH, ignore_eos=True, sampling=config))
    assert [token for step in steps for token in step.tokens] == result.tokens


class Failing(HFTarget):
    """Its logits are NaN from a call on."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        logits = super().logits(hidden)
        if self.calls > 3:
            logits[-1, 7] = torch.nan
        return logits


@pytest.mark.parametrize("config", [None, SamplingConfig(temperature=1.0), SamplingConfig(repetition_penalty=1.2)])
@pytest.mark.parametrize("drafted", [False, True])
def test_nan_of_the_target_ends_the_row(llama: HFTarget, config: SamplingConfig | None, drafted: bool) -> None:
    target = Failing(llama.model, llama.layout, llama.spec)
    head = make_head("eagle3", llama.spec, num_draft_tokens=3).eval()
    decoder = SpeculativeDecoder(target, HeadProposer(head, target) if drafted else None)
    with pytest.raises(DecodeError, match=r"^target: its logits are not finite, got NaN or infinity in step 3; "):
        decoder.generate(PROMPT, LENGTH, ignore_eos=True, sampling=config)
    assert decoder._idle is not None
    assert decoder._idle.length == 0


@pytest.mark.parametrize("kind", list(head_kinds()))
@pytest.mark.parametrize("shape", [CHAIN, TREE, TreeGrowth(2, 3, 6)], ids=["chain", "tree", "grown"])
@pytest.mark.parametrize("config", [None, SamplingConfig(temperature=1.0)], ids=["greedy", "sampled"])
def test_nan_of_the_head_ends_the_row(
    llama: HFTarget, kind: str, shape: DraftTree | TreeGrowth, config: SamplingConfig | None
) -> None:
    head = make_head(kind, llama.spec, num_draft_tokens=3).eval()
    if isinstance(shape, TreeGrowth) and not head.grows:
        pytest.skip("drafts fixed trees only")
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.fill_(torch.nan)
    with pytest.raises(DecodeError, match=r"^head: what it drafts from is not finite, got NaN or infinity in step 1; "):
        SpeculativeDecoder(llama, HeadProposer(head, llama, shape)).generate(PROMPT, LENGTH, sampling=config)


def test_nothing_left_to_choose_ends_the_row(llama: HFTarget) -> None:
    everything = [[token] for token in range(97)]
    for config in (SamplingConfig(bad_words_ids=everything), SamplingConfig(bad_words_ids=everything, temperature=1.0)):
        with pytest.raises(
            DecodeError, match=r"^sampling: no token is left to choose, got all of them forbidden in step 0"
        ):
            SpeculativeDecoder(llama).generate(PROMPT, 4, sampling=config)


def test_what_does_not_fit_is_refused_at_once(llama: HFTarget) -> None:
    head = make_head("medusa", llama.spec, num_draft_tokens=3).eval()
    decoder = SpeculativeDecoder(llama, HeadProposer(head, llama, TREE))
    for settings, message in (
        ({"temperature": 1.0, "verifier": "block"}, r"sampling.verifier: block takes a chain, got block for a tree"),
        ({"logit_bias": [[97, 1.0]]}, r"sampling.logit_bias: the target has 97 tokens, got 97"),
        ({"bad_words_ids": [[4, 200]]}, r"sampling.bad_words: the target has 97 tokens, got 200"),
        ({"stop": ["x"]}, r"sampling.stop: needs a tokenizer"),
        ({"bad_words": ["x"]}, r"sampling.bad_words: needs a tokenizer"),
    ):
        with pytest.raises(ConfigError, match=message):
            decoder.stream(PROMPT, 5, sampling=SamplingConfig(**settings))
    with pytest.raises(
        ConfigError, match=r"sampling.min_new_tokens: has no effect where no token ends the text, got 3"
    ):
        decoder.stream(PROMPT, 5, ignore_eos=True, sampling=SamplingConfig(min_new_tokens=3))
    gaps = HeadProposer(head, llama, DraftTree.from_paths([[1], [0], [1, 1]]))
    with pytest.raises(
        ConfigError, match=r"decode.tree: the ranks of siblings must be 0, 1, 2, ... .*got 1 in place of 0"
    ):
        SpeculativeDecoder(llama, gaps).stream(PROMPT, LENGTH, sampling=SamplingConfig(temperature=1.0))
    for settings in ({}, {"temperature": 1.0, "verifier": "point_mass"}):
        SpeculativeDecoder(llama, gaps).stream(PROMPT, LENGTH, sampling=SamplingConfig(**settings))


def test_results_name_the_rule_that_was_used(llama: HFTarget) -> None:
    """Drafts that are not drawn count as certain, whatever the settings would do with drawn ones."""
    head = make_head("medusa", llama.spec, num_draft_tokens=3).eval()
    drawn = HeadProposer(head, llama, TREE)
    grown = HeadProposer(head, llama, GROWN)
    looked_up = PromptLookupProposer(PromptLookupConfig(), llama.device)
    sampled = SamplingConfig(temperature=1.0)
    typical = SamplingConfig(temperature=1.0, verifier="typical")
    for proposer, sampling, rule in (
        (None, sampled, None),
        (drawn, SamplingConfig(), "greedy"),
        (looked_up, SamplingConfig(), "greedy"),
        (drawn, sampled, "speculative_sampling"),
        (grown, sampled, "point_mass"),
        (looked_up, sampled, "point_mass"),
        (looked_up, typical, "typical"),
        (drawn, SamplingConfig(temperature=1.0, verifier="point_mass"), "point_mass"),
    ):
        decoder = SpeculativeDecoder(llama, proposer)
        assert decoder.generate(PROMPT, 4, sampling=sampling).verifier == rule
        assert decoder.generate_batch([PROMPT] * 2, 4, sampling=sampling)[1].verifier == rule


class Unasked(Oracle):
    """Keeps the samplers it is given."""

    def propose(self, state: dict[str, int], context: DraftContext, max_depth: int) -> Proposal | None:
        assert context.sampler is None
        return super().propose(state, context, max_depth)


def test_only_rules_for_drawn_drafts_ask_for_them(llama: HFTarget, answer: list[int]) -> None:
    decoder = SpeculativeDecoder(llama, Unasked(answer, CHAIN, 2))
    assert decoder.generate(PROMPT, LENGTH, ignore_eos=True).verifier == "greedy"
    config = SamplingConfig(temperature=1.0)
    assert config.samples_drafts
    with pytest.raises(AssertionError):
        decoder.generate(PROMPT, LENGTH, ignore_eos=True, sampling=config)
