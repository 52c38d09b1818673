"""Loss terms that compare two whole distributions: values and gradients with respect to the draft logits, for one chunk."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_OVERLAP = 1e-6
"""-log acceptance and its gradient stay finite where draft and target share nothing."""


@dataclass(frozen=True)
class Chunk:
    """n rows of draft logits and what they are compared with, all float32.

    log_q: ``[n, D]`` the draft's log-probabilities. log_p: ``[n, D]`` the target's over the same tokens, renormalised.
    top_k: tokens that the top_k term keeps. adaptive_rate: eta of the adaptive term. inside: ``[n]`` the target's mass on
    these D tokens, None = 1.
    """

    log_q: Tensor
    log_p: Tensor
    top_k: int
    adaptive_rate: float
    inside: Tensor | None = None


Term = Callable[[Chunk], tuple[Tensor, Tensor]]
"""Losses ``[n]`` and their gradient ``[n, D]`` with respect to q or to the logits, see the two tables."""


def _forward_kl(chunk: Chunk) -> tuple[Tensor, Tensor]:
    """KL(p || q)."""
    p = chunk.log_p.exp()
    return (p * (chunk.log_p - chunk.log_q)).sum(-1), chunk.log_q.exp() - p


def _soft_ce(chunk: Chunk) -> tuple[Tensor, Tensor]:
    """-sum p log q."""
    p = chunk.log_p.exp()
    return -(p * chunk.log_q).sum(-1), chunk.log_q.exp() - p


def _top_k(chunk: Chunk) -> tuple[Tensor, Tensor]:
    """-sum p log q over the target's k likeliest tokens, p as it is (HASS, equation of the top-K loss)."""
    log_p, index = chunk.log_p.topk(min(chunk.top_k, chunk.log_p.shape[-1]), dim=-1)
    p = log_p.exp()
    gradient = (chunk.log_q.exp() * p.sum(-1, keepdim=True)).scatter_add_(1, index, -p)
    return -(p * chunk.log_q.gather(1, index)).sum(-1), gradient


def _reverse_kl(chunk: Chunk) -> tuple[Tensor, Tensor]:
    """KL(q || p)."""
    ratio = chunk.log_q - chunk.log_p
    return (chunk.log_q.exp() * ratio).sum(-1), ratio


def _jensen_shannon(chunk: Chunk) -> tuple[Tensor, Tensor]:
    """(KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2."""
    log_m = torch.logaddexp(chunk.log_p, chunk.log_q) - math.log(2.0)
    p_part = chunk.log_p.exp() * (chunk.log_p - log_m)
    ratio = chunk.log_q - log_m
    return 0.5 * (p_part + chunk.log_q.exp() * ratio).sum(-1), 0.5 * ratio


def _overlap(chunk: Chunk) -> tuple[Tensor, Tensor]:
    """The chance that sampling accepts the draft, sum min(p, q), and the gradient of its negative.

    p is the target's distribution as it is: its mass outside the draft vocabulary is rejected.
    """
    p, q = chunk.log_p.exp(), chunk.log_q.exp()
    if chunk.inside is not None:
        p = p * chunk.inside[:, None]
    return torch.minimum(p, q).sum(-1), -(q < p).float()


def acceptance(chunk: Chunk) -> Tensor:
    """``[n]``: sum min(p, q), the chance that sampling accepts the draft."""
    return _overlap(chunk)[0]


def _total_variation(chunk: Chunk) -> tuple[Tensor, Tensor]:
    """1 - sum min(p, q): the chance that sampling rejects the draft."""
    overlap, gradient = _overlap(chunk)
    return 1.0 - overlap, gradient


def _log_acceptance(chunk: Chunk) -> tuple[Tensor, Tensor]:
    """-log sum min(p, q)."""
    overlap, gradient = _overlap(chunk)
    overlap = overlap.clamp(min=SMALLEST_OVERLAP)
    return -overlap.log(), gradient / overlap[:, None]


TO_LOGITS: dict[str, Term] = {"soft_ce": _soft_ce, "forward_kl": _forward_kl, "top_k": _top_k}
"""Terms whose gradient is with respect to the logits."""
TO_PROBABILITIES: dict[str, Term] = {
    "reverse_kl": _reverse_kl,
    "jensen_shannon": _jensen_shannon,
    "total_variation": _total_variation,
    "log_acceptance": _log_acceptance,
}
"""Terms whose gradient is with respect to q, any constant per row aside."""


def compare(chunk: Chunk, terms: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """The weighted sum of ``terms``: losses ``[n]`` and their gradient with respect to the draft logits ``[n, D]``.

    adaptive: lambda KL(p || q) + (1 - lambda) TV with lambda = exp(-eta sum min(p, q)), which no gradient goes through:
    the divergence while draft and target have little in common, then what counts in decoding (LK losses).
    """
    q = chunk.log_q.exp()
    loss = torch.zeros_like(q[:, 0])
    to_logits, to_probabilities = torch.zeros_like(q), torch.zeros_like(q)
    for name, weight in terms.items():
        if name == "adaptive":
            divergence, towards = _forward_kl(chunk)
            distance, away = _total_variation(chunk)
            share = torch.exp(-chunk.adaptive_rate * (1.0 - distance))
            loss += weight * (share * divergence + (1.0 - share) * distance)
            to_logits.addcmul_(towards, (weight * share)[:, None])
            to_probabilities.addcmul_(away, (weight * (1.0 - share))[:, None])
            continue
        value, gradient = (TO_LOGITS.get(name) or TO_PROBABILITIES[name])(chunk)
        loss.add_(value, alpha=weight)
        (to_logits if name in TO_LOGITS else to_probabilities).add_(gradient, alpha=weight)
    # Through the softmax: dL/dz = q (g - sum q g).
    mean = (q * to_probabilities).sum(-1, keepdim=True)
    return loss, to_logits.addcmul_(q, to_probabilities - mean)
