"""Whether the supervised answers of rows are the target's own: how likely the target finds them."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdraft.core.errors import DataError
from specdraft.core.types import FeatureRequest
from specdraft.data._config import DataConfig
from specdraft.data.batching import collate
from specdraft.data.chat import TokenRow

if TYPE_CHECKING:
    from specdraft.targets.base import Target

WARN_SHARE = 0.1
MIN_EXCESS = 0.3
"""Nats a token by which an answer must be less likely than the target's own draws are, to be suspect."""
MIN_Z = 3.0
"""And the standard deviations of such draws; a short answer is let off by it."""
BATCH_TOKENS = 4096
LOGITS_VALUES = 1 << 25
logger = logging.getLogger(__name__)
BINS = (-8.0, -6.0, -5.0, -4.0, -3.5, -3.0, -2.5, -2.0, -1.75, -1.5, -1.25, -1.0, -0.75, -0.5, -0.25, 0.0)
"""Upper ends of the histogram's bins, in nats a token."""


@dataclass(frozen=True)
class OwnAnswers:
    """What the target says of the supervised tokens of every row.

    mean_logprobs: mean log-probability of a token, in nats. excesses: how far it lies below what the target's own draws
    at that temperature reach on the same prefixes, which is minus the mean entropy there; below zero for greedy answers,
    around zero for draws. z_scores: that distance in standard deviations of such draws. suspects: places of the rows
    that are not the target's own by ``MIN_EXCESS`` and ``MIN_Z``.
    """

    mean_logprobs: list[float]
    excesses: list[float]
    z_scores: list[float]
    suspects: list[int]

    @property
    def share_suspect(self) -> float:
        """Share of the rows that are not the target's own; 0 without rows."""
        return len(self.suspects) / len(self.mean_logprobs) if self.mean_logprobs else 0.0

    @property
    def histogram(self) -> dict[str, int]:
        """Rows by mean log-probability, from the least likely: ``{"<=-2.0": 3, "<=-1.75": 10}``."""
        return logprob_histogram(self.mean_logprobs)

    def as_dict(self) -> dict[str, Any]:
        """What a manifest records of it."""
        count = max(1, len(self.mean_logprobs))
        return {
            "num_rows": len(self.mean_logprobs),
            "mean_logprob": sum(self.mean_logprobs) / count,
            "mean_excess": sum(self.excesses) / count,
            "share_suspect": self.share_suspect,
            "logprob_histogram": self.histogram,
        }


def own_answers(target: Target, rows: Sequence[TokenRow], temperature: float = 1.0) -> OwnAnswers:
    """Scores the supervised tokens of ``rows`` under the target.

    ``temperature``: the highest that the answers may have been drawn at; what was drawn lower, or greedily, is likelier
    and passes as well. Under the target an answer of its own has, summed over its tokens, the log-probability minus the
    sum of the entropies, give or take the root of the summed variances, as each token's difference has mean zero given
    those before it. Text of another origin falls below by several tenths of a nat a token.

    Raises:
        ValueError: a row has no supervised token after its first, or the temperature is not positive.
    """
    if not temperature > 0.0:
        raise ValueError(f"temperature: must be positive, got {temperature}")
    places = sorted(range(len(rows)), key=lambda i: len(rows[i].input_ids))
    found: dict[int, tuple[float, float, float]] = {}
    for batch in _batches(places, rows):
        scored = _score(target, [rows[i] for i in batch], temperature)
        found.update(zip(batch, scored, strict=True))
    ordered = [found[i] for i in range(len(rows))]
    suspects = [i for i, (_, excess, z) in enumerate(ordered) if excess > MIN_EXCESS and z > MIN_Z]
    return OwnAnswers([row[0] for row in ordered], [row[1] for row in ordered], [row[2] for row in ordered], suspects)


def check_rows(target: Target | None, rows: Sequence[TokenRow], config: DataConfig) -> dict[str, Any]:
    """Scores ``answers.check_rows`` of the rows; warns of those that are not the target's own. For a manifest.

    Nothing where the target is not loaded or no rows are wanted.

    Raises:
        DataError: more of them than ``answers.max_suspect_share`` are not the target's own.
    """
    settings = config.answers
    if target is None or not settings.check_rows:
        return {}
    # A row that begins with its answer says nothing of its first token.
    usable = [row for row in spread(rows, settings.check_rows) if any(row.loss_mask[1:])]
    found = own_answers(target, usable, max([1.0, config.temperature, *settings.temperatures]))
    limit = settings.max_suspect_share
    told = f"{found.share_suspect:.0%} of {len(usable)} answers are not the target's own"
    if limit is not None and found.share_suspect > limit:
        raise DataError(
            f"data.answers.max_suspect_share: {told}, got {found.share_suspect:.3f}; set data.regenerate=true, or serve "
            "the model of target.name"
        )
    if limit is None and found.share_suspect > WARN_SHARE:
        logger.warning("data: %s; a head learns to predict the target, so let it answer (data.regenerate=true)", told)
    return {"own": found.as_dict()}


def spread(rows: Sequence[TokenRow], count: int) -> list[TokenRow]:
    """At most ``count`` rows from all over the data set, first and last included."""
    size = len(rows)
    if size <= count:
        return [rows[i] for i in range(size)]
    return [rows[i * (size - 1) // max(1, count - 1)] for i in range(count)]


def logprob_histogram(values: Sequence[float]) -> dict[str, int]:
    """Rows by mean log-probability in the bins of ``BINS``; what is below the first counts to it."""
    counts = Counter(min((top for top in BINS if value <= top), default=BINS[-1]) for value in values)
    return {f"<={top}": counts[top] for top in sorted(counts)}


def _batches(places: Sequence[int], rows: Sequence[TokenRow]) -> Iterator[list[int]]:
    """Places of rows that run together: at most ``BATCH_TOKENS`` with padding, or a single row. The longest come last."""
    batch: list[int] = []
    for place in places:
        if batch and (len(batch) + 1) * len(rows[place].input_ids) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


@torch.no_grad()
def _score(target: Target, rows: Sequence[TokenRow], temperature: float) -> list[tuple[float, float, float]]:
    """(mean log-probability, excess, z) of each row."""
    tokens = collate(rows, pad_id=0).to(target.device)
    features = target.capture(tokens, FeatureRequest())
    wanted = tokens.loss_mask[:, 1:]
    if not bool(wanted.any(dim=1).all()):
        raise ValueError("rows: each needs a supervised token after its first")
    numbers = wanted.nonzero()[:, 0]
    hidden = features.last_hidden[:, :-1][wanted]
    following = tokens.input_ids[:, 1:][wanted]
    step = max(1, LOGITS_VALUES // target.spec.vocab_size)
    parts = [
        _moments(target.logits(hidden[i : i + step]), following[i : i + step], temperature)
        for i in range(0, len(hidden), step)
    ]
    # [3, n] -> sums a row of log-probability at 1, excess and variance at the temperature.
    values = torch.cat(parts, dim=1).double()
    sums = torch.zeros(3, len(rows), dtype=torch.float64, device=values.device)
    sums.index_add_(1, numbers, values)
    counts = torch.bincount(numbers, minlength=len(rows))
    scored = []
    for (logprob, excess, variance), count in zip(sums.T.tolist(), counts.tolist(), strict=True):
        scored.append((logprob / count, excess / count, excess / math.sqrt(variance + 1e-6)))
    return scored


def _moments(logits: Tensor, following: Tensor, temperature: float) -> Tensor:
    """``[3, n]`` of tokens ``[n]``: log-probability; at ``temperature``, shortfall against minus the entropy; variance."""
    logits = logits.float()
    chosen = logits.log_softmax(-1).gather(-1, following[:, None])[:, 0]
    scaled = (logits / temperature).log_softmax(-1)
    own = scaled.gather(-1, following[:, None])[:, 0]
    probs = scaled.exp()
    # A logit of minus infinity has no part in the sums.
    finite = scaled.clamp(min=-1e4)
    mean = (probs * finite).sum(-1)
    variance = (probs * (finite - mean[:, None]).square()).sum(-1)
    return torch.stack([chosen, mean - own, variance])


@torch.no_grad()
def greedy_gaps(target: Target, row: TokenRow) -> list[float]:
    """For every supervised token: how far its logit is below the target's best there; 0 = the target chooses it too."""
    tokens = collate([row], pad_id=0).to(target.device)
    wanted = tokens.loss_mask[0, 1:]
    hidden = target.capture(tokens, FeatureRequest()).last_hidden[0, :-1][wanted]
    logits = target.logits(hidden).float()
    chosen = logits.gather(-1, tokens.input_ids[0, 1:][wanted][:, None])[:, 0]
    gaps: list[float] = (logits.max(-1).values - chosen).tolist()
    return gaps
