"""From decoded pairs to the numbers of results.json: pooled ratios, and their intervals by resampling prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdraft.eval.speed import Pair, TimedRun

STEP_PARTS = ("target", "draft", "verify", "other")
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Measurement:
    """One turn of a prompt, decoded both ways. prompt: the prompt's place in its set; divergence: None if identical."""

    prompt: int
    category: str
    pair: Pair
    divergence: dict[str, Any] | None = None


@dataclass(frozen=True)
class Bootstrap:
    """Percentile bootstrap over prompts, 95 %: the prompts of a set are drawn anew ``samples`` times."""

    samples: int
    seed: int

    def ratio(self, numerator: Floats, denominator: Floats) -> dict[str, Any]:
        """``sum(numerator) / sum(denominator)`` of per-prompt amounts ``[P]``, with its interval."""
        ones = np.ones_like(numerator)
        return self.ratio_of_ratios(numerator, denominator, ones, ones)

    def ratio_of_ratios(self, a: Floats, b: Floats, c: Floats, d: Floats) -> dict[str, Any]:
        """``(sum a / sum b) / (sum c / sum d)``; all four belong to the same prompts and are drawn together.

        value is None without steps or time to divide by; ci95 is None for fewer than two prompts.
        """
        if not (b.sum() and c.sum() and d.sum()):
            return {"value": None, "ci95": None}
        value = float(a.sum() / b.sum() / (c.sum() / d.sum()))
        if len(a) < 2:
            return {"value": value, "ci95": None}
        drawn = np.random.default_rng(self.seed).integers(0, len(a), (self.samples, len(a)))
        sums = [amount[drawn].sum(axis=1) for amount in (a, b, c, d)]
        usable = (sums[1] > 0) & (sums[2] > 0)
        values = (sums[0] * sums[3])[usable] / (sums[1] * sums[2])[usable]
        low, high = np.percentile(values, [2.5, 97.5])
        return {"value": value, "ci95": [float(low), float(high)]}


def summarize(measurements: Sequence[Measurement], max_depth: int, bootstrap: Bootstrap) -> dict[str, Any]:
    """The figures of a set or a category. Everything is pooled: sums over steps, never means of per-prompt means.

    ``max_depth``: drafted depths that are listed. ``DecodeResult`` defines the counts; survival at depth k is
    accepted_per_depth[k] / num_steps, the conditional rate accepted_per_depth[k] / reached_per_depth[k].
    """
    runs = [m.pair.speculative for m in measurements]
    results = [run.result for run in runs]
    accepted = _per_depth([r.accepted_per_depth for r in results], max_depth)
    reached = _per_depth([r.reached_per_depth for r in results], max_depth)
    num_steps = sum(r.num_steps for r in results)
    accepted_tokens = sum(r.accepted_tokens for r in results)
    step_tokens = _per_prompt(measurements, [r.step_tokens for r in results])
    steps = _per_prompt(measurements, [r.num_steps for r in results])
    diverged = [m.divergence for m in measurements if m.divergence is not None]
    prompts = {m.prompt for m in measurements}
    return {
        "num_prompts": len(prompts),
        "num_turns": len(measurements),
        "num_tokens": sum(len(r.tokens) for r in results),
        "num_steps": num_steps,
        "acceptance_length": bootstrap.ratio(step_tokens, steps),
        "accepted_per_step": accepted_tokens / num_steps if num_steps else None,
        "acceptance_rate": [a / r if r else None for a, r in zip(accepted, reached, strict=True)],
        "survival": [a / num_steps if num_steps else None for a in accepted],
        "accepted_per_depth": accepted,
        "reached_per_depth": reached,
        "drafted_tokens": sum(r.drafted_tokens for r in results),
        "accepted_tokens": accepted_tokens,
        "identical_outputs": len(prompts - {m.prompt for m in measurements if m.divergence is not None}),
        "first_divergences": diverged,
        **_speed(measurements, bootstrap),
        "time_ms_per_step": {
            part: sum(r.time_ms[part] for r in results) / num_steps if num_steps else None for part in STEP_PARTS
        },
        "finish_reasons": dict(Counter(r.finish_reason for r in results).most_common()),
    }


def _speed(measurements: Sequence[Measurement], bootstrap: Bootstrap) -> dict[str, Any]:
    """Tokens per second both ways and their ratio: total tokens / total time, with the prefill and without it."""
    plain = [m.pair.plain for m in measurements]
    speculative = [m.pair.speculative for m in measurements]

    def compare(prefill: bool) -> dict[str, Any]:
        amounts = [
            _per_prompt(measurements, values)
            for runs in (speculative, plain)
            for values in (_tokens(runs, prefill), _seconds(runs, prefill))
        ]
        rates = [float(t.sum() / s.sum()) if s.sum() else None for t, s in (amounts[:2], amounts[2:])]
        return {
            "tokens_per_s": dict(zip(("speculative", "autoregressive"), rates, strict=True)),
            "speedup": bootstrap.ratio_of_ratios(*amounts),
        }

    plain_steps = sum(run.result.num_steps for run in plain)
    step_ms = sum(run.wall_ms - run.prefill_ms for run in plain)
    return {
        **compare(prefill=True),
        "without_prefill": compare(prefill=False),
        "prefill_ms": {
            "speculative": sum(run.prefill_ms for run in speculative) / len(speculative),
            "autoregressive": sum(run.prefill_ms for run in plain) / len(plain),
        },
        "autoregressive_ms_per_step": step_ms / plain_steps if plain_steps else None,
    }


def _tokens(runs: list[TimedRun], prefill: bool) -> list[int]:
    """New tokens of each run; the first one is the prefill's."""
    return [len(run.result.tokens) if prefill else run.result.step_tokens for run in runs]


def _seconds(runs: list[TimedRun], prefill: bool) -> list[float]:
    return [(run.wall_ms - (0.0 if prefill else run.prefill_ms)) / 1e3 for run in runs]


def _per_prompt(measurements: Sequence[Measurement], amounts: Sequence[float]) -> Floats:
    """``[P]``: amounts of turns summed over the turns of each prompt, so that prompts are what is resampled."""
    _, places = np.unique([m.prompt for m in measurements], return_inverse=True)
    sums: Floats = np.zeros(places.max() + 1)
    np.add.at(sums, places, amounts)
    return sums


def _per_depth(counts: list[list[int]], max_depth: int) -> list[int]:
    """Counts summed over runs, one a depth."""
    return [sum(c[k] for c in counts if k < len(c)) for k in range(max_depth)]
