"""Loss terms over draft logits that exist for one chunk of anchors at a time, with their gradient made on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specdraft.core.shapes import padded_rows
from specdraft.core.types import DraftStep, Unembedding
from specdraft.losses._config import LossConfig
from specdraft.losses.divergences import Chunk, acceptance, compare

CACHED_ROWS = 32
"""Rows of some thousand logits that fit a core's cache in float32."""


@dataclass(frozen=True)
class ChunkPlan:
    """Everything ``ChunkedTerms`` needs that takes no gradient. Lists run over the K steps, tensors over their anchors.

    labels: ``[N]`` int64 draft ids, -1 outside. scales: ``[N]`` float32, 0 outside the loss. positions: ``[N]`` int64,
    flat teacher positions. teacher_hidden: ``[B*T, H]`` or None without a term of the target's distribution. teacher:
    the target's lm_head over the draft vocabulary. whole: the full one, where the mass outside is asked for, else None.
    config: the terms and their weights, the size of a chunk.
    """

    steps: Sequence[DraftStep]
    labels: list[Tensor]
    scales: list[Tensor]
    positions: list[Tensor]
    teacher_hidden: Tensor | None
    teacher: Unembedding
    whole: Unembedding | None
    config: LossConfig

    @property
    def hard(self) -> float:
        """Weight of the labels."""
        return self.config.terms.get("hard_ce", 0.0)

    @property
    def soft(self) -> float:
        """Weight of the target's distribution in the gradient: the forward KL has that of the cross-entropy."""
        return self.config.terms.get("soft_ce", 0.0) + self.config.terms.get("forward_kl", 0.0)

    @property
    def bends(self) -> bool:
        """Whether a gradient has to go through whole logits: a soft-cap, or more than cross-entropies."""
        return (
            any(u.softcap is not None for u, _ in self.groups())
            or bool(self.config.distribution_terms.keys() - {"soft_ce", "forward_kl"})
            or "confidence" in self.config.terms
        )

    @property
    def trained_weights(self) -> list[Tensor]:
        """Distinct lm_head weights among the steps that are trained, in order of first use."""
        return [u.weight for u, _ in self.groups() if u.weight.requires_grad]

    def groups(self) -> list[tuple[Unembedding, list[int]]]:
        """Steps by the lm_head they share: their rows go through one product."""
        found: dict[int, tuple[Unembedding, list[int]]] = {}
        for k, step in enumerate(self.steps):
            found.setdefault(id(step.unembed.weight), (step.unembed, []))[1].append(k)
        return list(found.values())

    def chunks(self) -> Iterator[tuple[Tensor, list[tuple[Tensor, Tensor]]]]:
        """Yields teacher positions ``[c]`` and, per step, the anchors in the loss there and their places in the chunk.

        Steps that share a teacher position meet in one chunk, so that its logits are made once for all depths.
        """
        active = [scale.nonzero().flatten() for scale in self.scales]
        unique = torch.unique(torch.cat([self.positions[k][rows] for k, rows in enumerate(active)]))
        places = [torch.searchsorted(unique, self.positions[k][rows]) for k, rows in enumerate(active)]
        size = max(self.config.chunk_size // len(self.steps), 1)
        for start in range(0, unique.numel(), size):
            members = []
            for rows, place in zip(active, places, strict=True):
                inside = ((place >= start) & (place < start + size)).nonzero().flatten()
                members.append((rows[inside], place[inside] - start))
            yield unique[start : start + size], members


class ChunkedTerms(torch.autograd.Function):
    """The weighted terms over draft logits z = W h, with the labels y and the target's distribution p.

    For the cross-entropies and the forward KL, with e = soft * p W + hard * W_y, the vector that the wanted tokens point
    to, and w = soft + hard:

        loss = w logsumexp(z) - e . h        d loss / dh = w softmax(z) W - e        d loss / dW = (w softmax(z) - p - 1_y) h^T

    so p enters only through p W and p^T h, once for all depths that share it, and exp(z - max z) takes the place of the
    logits: only what it is multiplied to is divided by its sum. Both gradients are made where the logits exist anyway and
    only scaled in the backward pass. Other terms, and a soft-capped target, which bends z, need the gradient of whole
    logits instead (``_bent``).
    Returns the losses ``[K]`` float64, per step ``[N]`` bool: the argmax of the draft logits is the label, and per step
    ``[N]`` float32: what sampling accepts, where the term confidence asks for it (0 outside the loss).
    """

    @staticmethod
    def forward(ctx: Any, plan: ChunkPlan, *tensors: Tensor) -> tuple[Tensor, ...]:
        """tensors: K hidden states ``[N, H']``, then the distinct trained lm_head weights ``[D, H']``."""
        num_steps = len(plan.steps)
        work = _Work(plan, tensors[:num_steps])
        device = tensors[0].device
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            for positions, members in plan.chunks():
                work.chunk(positions, members)
        ctx.grads = (*work.grad_hidden, *(g for g in work.grad_weight.values()))
        ctx.mark_non_differentiable(*work.hits, *work.accepted)
        return (work.losses, *work.hits, *work.accepted)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """The depths share one upstream gradient: their losses are summed with equal weight."""
        upstream = grads[0][0]
        return (None, *(g * upstream.to(g.dtype) for g in ctx.grads))


@dataclass(frozen=True)
class _Rows:
    """The n rows of a chunk that share an lm_head, of one or more steps.

    hidden: ``[n, H']``. labels, place: ``[n]`` int64 draft ids and rows of the teacher. scale: ``[n]`` float32.
    weight: ``[D, H']`` of the lm_head. grad_weight: what its gradient is added to, ``[D, H']`` float32, or None.
    """

    hidden: Tensor
    labels: Tensor
    scale: Tensor
    place: Tensor
    unembed: Unembedding
    weight: Tensor
    grad_weight: Tensor | None


class _Work:
    """The sums that the chunks of one batch add to."""

    def __init__(self, plan: ChunkPlan, hidden: Sequence[Tensor]) -> None:
        device = hidden[0].device
        autocast = torch.is_autocast_enabled(device.type)
        self.dtype = torch.get_autocast_dtype(device.type) if autocast else hidden[0].dtype
        self.plan = plan
        self.config = plan.config
        self.hidden = hidden
        self.groups = plan.groups()
        self.terms = self._bent if plan.bends else self._linear
        self.weights = {id(u.weight): u.weight.detach().to(self.dtype) for u, _ in self.groups}
        self.teacher_weight = plan.teacher.weight.detach().to(self.dtype)
        self.whole_weight = None if plan.whole is None else plan.whole.weight.detach().to(self.dtype)
        self.grad_hidden = [torch.zeros_like(h) for h in hidden]
        self.grad_weight = {id(w): torch.zeros_like(w, dtype=torch.float32) for w in plan.trained_weights}
        self.losses = torch.zeros(len(hidden), dtype=torch.float64, device=device)
        self.hits = [torch.zeros(h.shape[0], dtype=torch.bool, device=device) for h in hidden]
        wanted = "confidence" in plan.config.terms
        self.accepted = [torch.zeros(h.shape[0], device=device) for h in hidden if wanted]

    def chunk(self, positions: Tensor, members: list[tuple[Tensor, Tensor]]) -> None:
        """Adds the anchors of one chunk."""
        plan, (teacher, inside) = self.plan, self._teacher(positions)
        for unembed, steps in self.groups:
            parts = [members[k][0] for k in steps]
            if not sum(part.numel() for part in parts):
                continue
            # Rows of zeros that pad them have a scale of zero, and nothing is taken from them.
            rows = _Rows(
                hidden=self._rows([self.hidden[k][r] for k, r in zip(steps, parts, strict=True)]).to(self.dtype),
                labels=self._rows([plan.labels[k][r] for k, r in zip(steps, parts, strict=True)]),
                scale=self._rows([plan.scales[k][r] for k, r in zip(steps, parts, strict=True)]),
                place=self._rows([members[k][1] for k in steps]),
                unembed=unembed,
                weight=self.weights[id(unembed.weight)],
                grad_weight=self.grad_weight.get(id(unembed.weight)),
            )
            loss, grad, hit, accepted = self.terms(rows, teacher, inside)
            start = 0
            for k, r in zip(steps, parts, strict=True):
                part = slice(start, start + r.numel())
                self.losses[k] += loss[part].sum(dtype=torch.float64)
                self.grad_hidden[k][r] = grad[part].to(self.grad_hidden[k].dtype)
                self.hits[k][r] = hit[part]
                if accepted is not None:
                    self.accepted[k][r] = accepted[part]
                start += r.numel()

    def _rows(self, parts: list[Tensor]) -> Tensor:
        """The parts of the steps as rows of one chunk, padded."""
        return padded_rows(torch.cat(parts), self.config.chunk_size)

    def _teacher(self, positions: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The target's distribution at positions ``[c]``, ``[c, D]``, and its mass on the draft vocabulary, ``[c]``.

        The first is None without a term that asks for it, the second where it is 1 or not asked for. Log-probabilities
        in float32 where gradients go through whole logits, else probabilities.
        """
        plan = self.plan
        if plan.teacher_hidden is None:
            return None, None
        hidden = padded_rows(plan.teacher_hidden[positions].to(self.dtype), self.config.chunk_size)
        logits = self._warm(_product(hidden, self.teacher_weight, plan.teacher), plan.teacher)
        if not plan.bends:
            return logits.softmax(-1), None
        logits = logits.float()
        if plan.whole is None or self.whole_weight is None:
            return logits.log_softmax(-1), None
        every = self._warm(_product(hidden, self.whole_weight, plan.whole), plan.whole).float().logsumexp(-1)
        return logits.log_softmax(-1), (logits.logsumexp(-1) - every).exp().clamp(max=1.0)

    def _warm(self, product: Tensor, unembed: Unembedding) -> Tensor:
        """The target's logits of a product, at the teacher's temperature."""
        logits = unembed.finish(product)
        return logits if self.config.teacher_temperature == 1.0 else logits / self.config.teacher_temperature

    def _linear(self, rows: _Rows, probs: Tensor | None, _: Tensor | None) -> tuple[Tensor, Tensor, Tensor, None]:
        """Losses ``[n]``, gradients ``[n, H']`` and hits ``[n]`` of cross-entropies without a soft-cap."""
        plan, unembed, h32 = self.plan, rows.unembed, rows.hidden.float()
        logits = unembed.finish(_product(rows.hidden, rows.weight, unembed))
        top = logits.amax(-1)
        hits = _is_argmax(logits, top, rows.labels)
        # In the place of the logits, and q = powers / norm only where a product has made them small.
        powers = logits.sub_(top[:, None]).exp_()
        norm = _row_sums(powers)
        total = norm.log() + top.float()
        known = (rows.labels >= 0).float() * plan.hard
        index = rows.labels.clamp(min=0)
        wanted = rows.weight[index].float() * known[:, None]
        bias = 0.0 if unembed.bias is None else unembed.bias.detach().float()[index] * known
        if probs is not None:
            wanted += plan.soft * (probs @ rows.weight).float()[rows.place]
            if unembed.bias is not None:
                bias = bias + plan.soft * (probs.float() @ unembed.bias.detach().float())[rows.place]
        mass = known + (plan.soft if probs is not None else 0.0)
        loss = mass * total - unembed.scale * ((wanted * h32).sum(-1) + bias)
        if probs is not None and "forward_kl" in self.config.terms:
            entropy = torch.special.entr(probs.float()).sum(-1)
            loss = loss - self.config.terms["forward_kl"] * entropy[rows.place]
        scale = rows.scale * unembed.scale
        share = mass / norm
        grad = ((powers @ rows.weight).float() * share[:, None] - wanted) * scale[:, None]
        if rows.grad_weight is not None:
            scaled = h32 * scale[:, None]
            rows.grad_weight.add_(powers.t() @ (scaled * share[:, None]).to(self.dtype))
            if plan.hard:
                rows.grad_weight.index_add_(0, index, scaled * -known[:, None])
            if probs is not None:
                by_place = torch.zeros(probs.shape[0], h32.shape[1], device=h32.device)
                by_place.index_add_(0, rows.place, scaled)
                rows.grad_weight.sub_(probs.t() @ by_place.to(self.dtype), alpha=plan.soft)
        return loss * rows.scale, grad, hits, None

    def _bent(
        self, rows: _Rows, log_p: Tensor | None, inside: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The same for every term, and with a soft-cap c: z = c tanh(x / c), dz/dx = 1 - (z / c)^2; float32 logits.

        The last is what sampling accepts, ``[n]``, where the term confidence asks for it.
        """
        unembed = rows.unembed
        logits = unembed.finish(_product(rows.hidden, rows.weight, unembed).float())
        hits = _is_argmax(logits, logits.amax(-1), rows.labels)
        log_q = logits.log_softmax(-1)
        known = (rows.labels >= 0).float() * self.plan.hard
        index = rows.labels.clamp(min=0)[:, None]
        loss = -known * log_q.gather(1, index)[:, 0]
        grad = (log_q.exp() * known[:, None]).scatter_add_(1, index, -known[:, None])
        accepted = None
        if log_p is not None:
            mass = None if inside is None else inside[rows.place]
            chunk = Chunk(log_q, log_p[rows.place], self.config.top_k, self.config.adaptive_rate, mass)
            accepted = acceptance(chunk) if self.accepted else None
            more, towards = compare(chunk, self.config.distribution_terms)
            loss, grad = loss + more, grad + towards
        if unembed.softcap is not None:
            grad = grad * (1 - (logits / unembed.softcap).square())
        grad = (grad * (rows.scale * unembed.scale)[:, None]).to(self.dtype)
        if rows.grad_weight is not None:
            rows.grad_weight.add_(grad.t() @ rows.hidden)
        return loss * rows.scale, grad @ rows.weight, hits, accepted


def _product(hidden: Tensor, weight: Tensor, unembed: Unembedding) -> Tensor:
    """``[n, H]`` -> ``h W^T + b`` ``[n, D]`` in the dtype of ``hidden``."""
    bias = None if unembed.bias is None else unembed.bias.detach().to(hidden.dtype)
    return F.linear(hidden, weight, bias)


def _row_sums(values: Tensor) -> Tensor:
    """``[n, D]`` -> ``[n]`` float32, summed in float32.

    On a CPU such a sum of half-precision values copies all of them to float32 first: a few rows at a time, so that the copy
    is small and stays in the processor's cache.
    """
    if values.device.type != "cpu" or values.dtype == torch.float32:
        return values.sum(-1, dtype=torch.float32)
    return torch.cat([part.sum(-1, dtype=torch.float32) for part in values.split(CACHED_ROWS)])


def _is_argmax(logits: Tensor, top: Tensor, labels: Tensor) -> Tensor:
    """``[n]`` bool: the label is the first maximum of its row, as argmax has it; a label of -1 never is.

    Half-precision logits tie often; only rows where the label ties with another token take the slow argmax.
    """
    hits = (logits.gather(1, labels.clamp(min=0)[:, None])[:, 0] == top) & (labels >= 0)
    candidates = hits.nonzero().flatten()
    tied = (logits[candidates] == top[candidates, None]).sum(-1) > 1
    rows = candidates[tied]
    hits[rows] = logits[rows].argmax(-1) == labels[rows]
    return hits
