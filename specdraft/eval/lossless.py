"""Proof on a user's own target and head that drafts leave the text alone: greedy identity, and the law of drawn text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specdraft.decode._sampling_config import SamplingConfig
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.sampling import truncate
from specdraft.targets.hf import HFTarget

LEAST_EXPECTED = 5
"""Draws that each cell of a test should expect."""
MAX_BINS = 6


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

    A token's place in the order of likelihood, as a share of probability, is uniform if the token was drawn from the
    law it should have, whatever that law is; the places of the first two tokens fill a square of equal cells. The laws
    come from the model's own forward. ``config``: temperature and truncation, and the verifier.
    """
    laws: dict[tuple[int, ...], torch.Tensor] = {}
    inside = torch.Generator().manual_seed(config.seed)
    bins = max(2, min(MAX_BINS, math.isqrt(samples // LEAST_EXPECTED)))
    counts = torch.zeros(bins, bins, dtype=torch.float64)
    accepted = 0
    for i in range(samples):
        # A third token is asked for, so that the second may be a drafted one.
        result = decoder.generate(prompt, 3, ignore_eos=True, sampling=replace(config, seed=config.seed + i))
        accepted += result.accepted_tokens
        places = []
        for start in ((), (result.tokens[0],)):
            if start not in laws:
                laws[start] = _law(target, [*prompt, *start], config)
            place = _place(laws[start], result.tokens[len(start)], float(torch.rand((), generator=inside)))
            places.append(min(int(place * bins), bins - 1))
        counts[places[0], places[1]] += 1
    expected = samples / counts.numel()
    return ChiSquare(samples, accepted, counts.numel(), float(((counts - expected) ** 2 / expected).sum()))


@torch.no_grad()
def _law(target: HFTarget, ids: list[int], config: SamplingConfig) -> torch.Tensor:
    """``[V]`` float64 on the host: what the token after ``ids`` is drawn from."""
    logits = target.model(input_ids=torch.tensor([ids], device=target.device)).logits[:, -1]
    return truncate(logits.float(), config).softmax(dim=-1)[0].double().cpu()


def _place(law: torch.Tensor, token: int, inside: float) -> float:
    """The probability of all likelier tokens, and of ``token`` the share ``inside``; 1 for what has no probability."""
    own = law[token]
    if own == 0:
        return 1.0
    likelier = law > own
    likelier |= (law == own) & (torch.arange(law.numel()) < token)
    return float(law[likelier].sum() + inside * own)
