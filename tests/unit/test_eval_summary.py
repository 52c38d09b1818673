"""Pooled figures and their intervals, on counts made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from specdraft.decode.result import DecodeResult
from specdraft.eval.speed import Pair, TimedRun
from specdraft.eval.summary import Bootstrap, Measurement, summarize

BOOTSTRAP = Bootstrap(samples=500, seed=0)


def result(steps: list[int], depth: int = 2, finish: str = "length", prefill: float = 10.0) -> DecodeResult:
    """A result of the prefill's token and steps that accepted so many of ``depth`` drafted tokens."""
    made = DecodeResult(tokens=[5], finish_reason=finish)
    for accepted in steps:
        made.tokens += [5] * (accepted + 1)
        made.count_step(depth, accepted, min(accepted + 1, depth))
    made.time_ms |= {
        "prefill": prefill,
        "target": 8.0 * len(steps),
        "draft": 1.0 * len(steps),
        "verify": 0.5 * len(steps),
    }
    return made


def measurement(
    prompt: int, steps: list[int], category: str = "", plain_ms: float = 100.0, spec_ms: float = 50.0
) -> Measurement:
    speculative = result(steps)
    plain = result([0] * (len(speculative.tokens) - 1), depth=0)
    return Measurement(prompt, category, Pair(TimedRun(plain, plain_ms), TimedRun(speculative, spec_ms)))


def test_known_table() -> None:
    """Four steps that accept 2, 0, 1, 2 of two drafted tokens: both kinds of rate, with their counts."""
    figures = summarize([measurement(0, [2, 0, 1, 2])], 2, BOOTSTRAP)
    assert figures["num_steps"] == 4
    assert figures["num_tokens"] == 1 + 9
    assert figures["acceptance_length"] == {"value": 9 / 4, "ci95": None}
    assert figures["accepted_per_step"] == 5 / 4
    assert figures["reached_per_depth"] == [4, 3]
    assert figures["accepted_per_depth"] == [3, 2]
    assert figures["acceptance_rate"] == [3 / 4, 2 / 3]
    assert figures["survival"] == [3 / 4, 2 / 4]
    assert figures["acceptance_length"]["value"] == 1 + sum(figures["survival"])
    assert [figures["drafted_tokens"], figures["accepted_tokens"]] == [8, 5]
    assert figures["finish_reasons"] == {"length": 1}
    assert figures["time_ms_per_step"] == {"target": 8.0, "draft": 1.0, "verify": 0.5, "other": 0.0}


@pytest.mark.parametrize(("accepted", "per_step", "length"), [(2, 2.0, 3.0), (0, 0.0, 1.0)])
def test_perfect_and_useless_draft(accepted: int, per_step: float, length: float) -> None:
    figures = summarize([measurement(0, [accepted] * 3)], 2, BOOTSTRAP)
    assert figures["accepted_per_step"] == per_step
    assert figures["acceptance_length"]["value"] == length


def test_pooled_not_a_mean_of_means() -> None:
    """One step of 3 tokens and nine of 1: 12 tokens in 10 steps, while the mean of the two prompts would be 2."""
    figures = summarize([measurement(0, [2]), measurement(1, [0] * 9)], 2, BOOTSTRAP)
    assert figures["acceptance_length"]["value"] == 12 / 10


def test_speed_is_total_tokens_over_total_time() -> None:
    rows = [measurement(0, [2], plain_ms=60, spec_ms=20), measurement(1, [0] * 9, plain_ms=100, spec_ms=120)]
    figures = summarize(rows, 2, BOOTSTRAP)
    assert figures["tokens_per_s"] == pytest.approx({"speculative": 14 / 0.14, "autoregressive": 14 / 0.16})
    assert figures["speedup"]["value"] == pytest.approx(16 / 14)
    without = figures["without_prefill"]
    assert without["tokens_per_s"]["speculative"] == pytest.approx(12 / 0.12)
    assert without["tokens_per_s"]["autoregressive"] == pytest.approx(12 / 0.14)
    assert figures["autoregressive_ms_per_step"] == pytest.approx(140 / 12)
    assert figures["prefill_ms"] == {"speculative": 10.0, "autoregressive": 10.0}


def test_nothing_to_divide_by_is_null() -> None:
    """Every answer is its first token: there is no step."""
    figures = summarize([measurement(0, []), measurement(1, [])], 2, BOOTSTRAP)
    assert figures["acceptance_length"] == {"value": None, "ci95": None}
    assert figures["acceptance_rate"] == [None, None]
    assert figures["survival"] == [None, None]
    assert figures["without_prefill"]["speedup"]["value"] is None
    assert figures["speedup"]["value"] == pytest.approx(2.0)


def test_turns_of_a_prompt_are_drawn_together() -> None:
    """Two prompts of two turns each give the interval of the two prompts with their turns joined."""
    turns = [measurement(0, [2]), measurement(0, [1]), measurement(4, [0] * 5), measurement(4, [2])]
    joined = [measurement(0, [2, 1]), measurement(1, [0] * 5 + [2])]
    split = summarize(turns, 2, BOOTSTRAP)
    assert split["acceptance_length"] == summarize(joined, 2, BOOTSTRAP)["acceptance_length"]
    assert [split["num_prompts"], split["num_turns"]] == [2, 4]


def test_identity_counts_prompts() -> None:
    rows = [measurement(0, [1]), measurement(0, [2]), measurement(1, [1])]
    rows[1] = Measurement(0, "", rows[1].pair, {"position": 3})
    figures = summarize(rows, 2, BOOTSTRAP)
    assert figures["identical_outputs"] == 1
    assert figures["first_divergences"] == [{"position": 3}]


def test_interval_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    generator = np.random.default_rng(3)
    steps = generator.integers(5, 60, 80).astype(float)
    tokens = steps * generator.uniform(1.2, 3.0, 80)
    own = Bootstrap(samples=4000, seed=1).ratio(tokens, steps)
    wanted = stats.bootstrap(
        (tokens, steps),
        lambda a, b, axis=-1: a.sum(axis) / b.sum(axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=4000,
        rng=generator,
    ).confidence_interval
    assert own["value"] == pytest.approx(tokens.sum() / steps.sum())
    assert own["ci95"] == pytest.approx([wanted.low, wanted.high], abs=0.015)
    assert Bootstrap(4000, 1).ratio(tokens, steps) == own


def test_speedup_is_paired() -> None:
    """Prompts differ a hundredfold in length, but each is exactly twice as fast: paired draws see no spread."""
    seconds = np.geomspace(1, 100, 12)
    tokens = seconds * np.linspace(10, 30, 12)
    estimate = BOOTSTRAP.ratio_of_ratios(tokens, seconds / 2, tokens, seconds)
    assert estimate["value"] == pytest.approx(2.0)
    assert estimate["ci95"] == pytest.approx([2.0, 2.0])
