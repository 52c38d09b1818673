"""Proof on a user's own target and head that drafts leave the text alone: greedy identity, and the law of drawn text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specdraft.decode._sampling_config import SamplingConfig
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.sampling import truncate
from specdraft.targets.hf import HFTarget

LEAST_EXPECTED = 5.0
"""Pairs of tokens that are expected less often than this are counted together."""


@dataclass(frozen=True)
class GreedyIdentity:
    """How many prompts are continued as transformers' generate() does, and where the first difference is.

    first_difference: prompt and place in its answer, None without one. margin: how far the target's best logit was above
    its second there. accepted: drafted tokens that were emitted; with none, nothing was shown.
    """

    num_prompts: int
    identical: int
    accepted: int
    first_difference: tuple[int, int] | None
    margin: float | None


def check_greedy(
    target: HFTarget, decoder: SpeculativeDecoder, prompts: Sequence[list[int]], max_new_tokens: int
) -> GreedyIdentity:
    """Continues every prompt with the decoder and with ``target.model.generate(do_sample=False)``."""
    identical = accepted = 0
    difference: tuple[int, int] | None = None
    margin: float | None = None
    for index, prompt in enumerate(prompts):
        found = decoder.generate(prompt, max_new_tokens, ignore_eos=True, trace=True)
        accepted += found.accepted_tokens
        ids = torch.tensor([prompt], device=target.device)
        with torch.no_grad():
            out = target.model.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=len(found.tokens),
                min_new_tokens=len(found.tokens),
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        wanted = out[0, len(prompt) :].tolist()
        if found.tokens == wanted:
            identical += 1
        elif difference is None:
            place = next(i for i, pair in enumerate(zip(found.tokens, wanted, strict=True)) if pair[0] != pair[1])
            difference, margin = (index, place), found.first_margins[place]
    return GreedyIdentity(len(prompts), identical, accepted, difference, margin)


@dataclass(frozen=True)
class ChiSquare:
    """A chi-square test of the first two drawn tokens of an answer against their exact law.

    accepted: drawn answers whose second token was drafted and accepted; with none, nothing was shown.
    """

    samples: int
    accepted: int
    cells: int
    statistic: float

    @property
    def pvalue(self) -> float:
        """How often chance alone gives a statistic as large; 1 with a single cell."""
        if self.cells < 2:
            return 1.0
        half = torch.tensor([(self.cells - 1) / 2, self.statistic / 2], dtype=torch.float64)
        return float(torch.special.gammaincc(half[0], half[1]))


def check_sampling(
    target: HFTarget, decoder: SpeculativeDecoder, prompt: list[int], config: SamplingConfig, samples: int
) -> ChiSquare:
    """Draws the beginning of an answer ``samples`` times, with the seeds after the settings', and tests its law.

    The exact law comes from the model's own forward. ``config``: temperature and truncation, and the verifier.
    """
    counts: Counter[tuple[int, int]] = Counter()
    accepted = 0
    for i in range(samples):
        # A third token is asked for, so that the second may be a drafted one.
        result = decoder.generate(prompt, 3, ignore_eos=True, sampling=replace(config, seed=config.seed + i))
        counts[result.tokens[0], result.tokens[1]] += 1
        accepted += result.accepted_tokens
    expected = _expected(target, prompt, config, samples)
    observed = {pair: counts[pair] for pair in expected}
    rest, rest_observed = samples - sum(expected.values()), samples - sum(observed.values())
    statistic = sum((observed[pair] - mean) ** 2 / mean for pair, mean in expected.items())
    cells = len(expected)
    if rest > 1e-6:
        statistic += (rest_observed - rest) ** 2 / rest
        cells += 1
    elif rest_observed:
        statistic = float("inf")
    return ChiSquare(samples, accepted, cells, statistic)


@torch.no_grad()
def _expected(
    target: HFTarget, prompt: list[int], config: SamplingConfig, samples: int
) -> dict[tuple[int, int], float]:
    """Pairs of first tokens expected at least ``LEAST_EXPECTED`` times, and how often."""

    def after(ids: list[int]) -> torch.Tensor:
        logits = target.model(input_ids=torch.tensor([ids], device=target.device)).logits[:, -1]
        return truncate(logits.float(), config).softmax(dim=-1)[0] * samples

    first = after(prompt)
    found: dict[tuple[int, int], float] = {}
    for token in (first >= LEAST_EXPECTED).nonzero().flatten().tolist():
        pairs = after([*prompt, token]) * float(first[token]) / samples
        for second in (pairs >= LEAST_EXPECTED).nonzero().flatten().tolist():
            found[token, second] = float(pairs[second])
    return found
