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
class Difference:
    """Where the answer to a prompt first differs. margin: how far the target's best logit was above its second there."""

    prompt: int
    place: int
    margin: float


@dataclass(frozen=True)
class GreedyIdentity:
    """How many prompts are continued as transformers' generate() does, and where the others first differ.

    accepted: drafted tokens that were emitted; with none, nothing was shown.
    """

    num_prompts: int
    accepted: int
    differences: list[Difference]

    @property
    def identical(self) -> int:
        """Prompts with the same answer."""
        return self.num_prompts - len(self.differences)

    def worst(self) -> Difference | None:
        """The difference that a near tie explains least."""
        return max(self.differences, key=lambda one: one.margin, default=None)


@torch.no_grad()
def greedy_texts(target: HFTarget, prompts: Sequence[list[int]], max_new_tokens: int) -> list[list[int]]:
    """What ``target.model.generate(do_sample=False)`` writes after each prompt alone, whatever token comes."""
    texts = []
    for prompt in prompts:
        length = min(max_new_tokens, target.spec.max_position_embeddings - len(prompt))
        ids = torch.tensor([prompt], device=target.device)
        out = target.model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def check_greedy(
    decoder: SpeculativeDecoder, prompts: Sequence[list[int]], texts: Sequence[list[int]], together: bool = False
) -> GreedyIdentity:
    """Continues every prompt with the decoder, one by one or ``together``, and compares with ``texts``."""
    lengths = [len(text) for text in texts]
    if together:
        found = decoder.generate_batch(prompts, lengths, ignore_eos=True, trace=True)
    else:
        pairs = zip(prompts, lengths, strict=True)
        found = [decoder.generate(prompt, length, ignore_eos=True, trace=True) for prompt, length in pairs]
    differences = []
    for index, (result, text) in enumerate(zip(found, texts, strict=True)):
        if result.tokens != text:
            place = next(i for i, pair in enumerate(zip(result.tokens, text, strict=True)) if pair[0] != pair[1])
            differences.append(Difference(index, place, result.first_margins[place]))
    return GreedyIdentity(len(prompts), sum(result.accepted_tokens for result in found), differences)


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
