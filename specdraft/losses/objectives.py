"""The training objective: loss terms over draft depths, in chunks, so that logits never exist for more than one chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdraft.core.types import DraftBatch, DraftStep, TokenBatch, Unembedding
from specdraft.losses._config import LossConfig
from specdraft.losses.alignment import Aligned, align, anchor_positions
from specdraft.losses.metrics import StepStats

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class LossResult:
    """loss_sum: 0-d, unnormalised sum over anchors and depths, with its graph. stats: counts for the metrics."""

    loss_sum: Tensor
    stats: StepStats


@dataclass(frozen=True)
class Teacher:
    """The target's side of the loss: its unembedding, and the draft vocabulary in which draft and target are compared.

    unembed: the full lm_head. draft_unembed: its rows of the draft vocabulary (the same object when not reduced).
    label_map: ``[V]`` int64, target id -> draft id, -1 outside; None when the vocabulary is not reduced.
    """

    unembed: Unembedding
    draft_unembed: Unembedding
    label_map: Tensor | None


class Objective:
    """A weighted sum of terms, each summed over the anchors that have a label at the step's offset.

    With w_n the anchor's normalisation weight, gamma the step decay and lambda the term weights:

        loss_sum = sum_k gamma^k sum_n w_n sum_term lambda_term term(k, n)

    hard_ce: -log q(label). soft_ce: -sum_x p(x) log q(x), p the target's distribution over the draft vocabulary
    (EAGLE-3; Medusa's distillation form). smooth_l1: mean over H of SmoothL1(draft hidden, target hidden) (EAGLE-1).
    """

    def __init__(self, config: LossConfig) -> None:
        self.config = config

    def denominator(self, tokens: TokenBatch | DraftBatch) -> Tensor:
        """This batch's part of the normaliser, 0-d float64: anchors, rows with anchors, or B*T (see LossConfig)."""
        anchors = tokens.anchors if isinstance(tokens, DraftBatch) else anchor_positions(tokens)
        rows, length = tokens.input_ids.shape
        if self.config.normalize == "token":
            value = anchors.numel()
        elif self.config.normalize == "sequence":
            value = int(torch.unique(anchors // length).numel())
        else:
            value = rows * length
        return torch.tensor(float(value), dtype=torch.float64, device=tokens.input_ids.device)

    def anchor_weights(self, batch: DraftBatch) -> Tensor:
        """``[N]`` float32: 1, or one over the anchors of the row when rows weigh the same."""
        weights = torch.ones(batch.anchors.numel(), device=batch.anchors.device)
        if self.config.normalize == "sequence":
            row = batch.anchors // batch.input_ids.shape[1]
            weights = weights / torch.bincount(row, minlength=batch.input_ids.shape[0])[row]
        return weights

    def __call__(self, steps: Sequence[DraftStep], batch: DraftBatch, teacher: Teacher) -> LossResult:
        """Loss and counts of one batch. Without anchors the loss is a zero that still reaches every step's graph."""
        aligned = [align(batch, step) for step in steps]
        weights = self.anchor_weights(batch)
        scales = [
            weights * (self._in_loss(a, batch, teacher) * self.config.step_decay**k) for k, a in enumerate(aligned)
        ]
        loss_sum = _connected_zero(steps)
        step_losses = torch.zeros(len(steps), dtype=torch.float64, device=batch.anchors.device)
        hits = [torch.zeros_like(a.valid) for a in aligned]
        if batch.anchors.numel():
            values, hits = self._logit_terms(steps, batch, teacher, aligned, scales)
            loss_sum = loss_sum + values.sum().float()
            step_losses += values.detach()
        if "smooth_l1" in self.config.terms and batch.anchors.numel():
            values = torch.stack([_smooth_l1(s, a, c, batch) for s, a, c in zip(steps, aligned, scales, strict=True)])
            values = values * self.config.terms["smooth_l1"]
            loss_sum = loss_sum + values.sum().float()
            step_losses += values.detach()
        return LossResult(loss_sum, _stats(aligned, hits, step_losses))

    def _in_loss(self, aligned: Aligned, batch: DraftBatch, teacher: Teacher) -> Tensor:
        """``[N]`` bool: valid anchors, less those whose token the draft vocabulary lacks."""
        if teacher.label_map is None or self.config.outside_vocab == "keep":
            return aligned.valid
        tokens = aligned.labels
        if self.config.outside_vocab == "argmax":
            hidden = batch.features.last_hidden.flatten(0, 1)
            tokens = torch.cat(
                [
                    teacher.unembed(hidden[positions].to(teacher.unembed.weight.dtype)).argmax(-1)
                    for positions in aligned.teacher_positions.split(self.config.chunk_size)
                ]
            )
        return aligned.valid & (teacher.label_map[tokens] >= 0)

    def _logit_terms(
        self,
        steps: Sequence[DraftStep],
        batch: DraftBatch,
        teacher: Teacher,
        aligned: list[Aligned],
        scales: list[Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        """Losses ``[K]`` float64 of the terms over logits, and ``[N]`` bool per step, True where the argmax is the label."""
        label_map = teacher.label_map
        labels = [a.labels if label_map is None else label_map[a.labels] for a in aligned]
        teacher_hidden = batch.features.last_hidden.flatten(0, 1) if "soft_ce" in self.config.terms else None
        plan = ChunkPlan(
            steps=steps,
            labels=labels,
            scales=scales,
            positions=[a.teacher_positions for a in aligned],
            teacher_hidden=teacher_hidden,
            teacher=teacher.draft_unembed,
            hard=self.config.terms.get("hard_ce", 0.0),
            soft=self.config.terms.get("soft_ce", 0.0),
            chunk_size=self.config.chunk_size,
        )
        weights = [w for w in plan.trained_weights]
        out = ChunkedCrossEntropy.apply(plan, *(step.hidden for step in steps), *weights)
        return out[0], [hit & a.valid for hit, a in zip(out[1:], aligned, strict=True)]


@dataclass(frozen=True)
class ChunkPlan:
    """Everything ``ChunkedCrossEntropy`` needs that takes no gradient. Lists run over the K steps, tensors over anchors.

    labels: ``[N]`` int64 draft ids, -1 outside. scales: ``[N]`` float32, 0 outside the loss. positions: ``[N]`` int64,
    ascending flat teacher positions. teacher_hidden: ``[B*T, H]`` or None without a soft term.
    """

    steps: Sequence[DraftStep]
    labels: list[Tensor]
    scales: list[Tensor]
    positions: list[Tensor]
    teacher_hidden: Tensor | None
    teacher: Unembedding
    hard: float
    soft: float
    chunk_size: int

    @property
    def trained_weights(self) -> list[Tensor]:
        """Distinct lm_head weights among the steps that are trained, in order of first use."""
        seen: dict[int, Tensor] = {}
        for step in self.steps:
            if step.unembed.weight.requires_grad:
                seen.setdefault(id(step.unembed.weight), step.unembed.weight)
        return list(seen.values())

    def chunks(self) -> Iterator[tuple[Tensor | None, list[tuple[int, Tensor, Tensor | None]]]]:
        """Yields teacher positions (at most ``chunk_size``) and per step (index, anchors in the loss, place in chunk).

        Steps that share a teacher position meet in one chunk, so that the teacher's logits are made once for all depths.
        """
        active = [scale.nonzero().flatten() for scale in self.scales]
        if self.teacher_hidden is None:
            for k, rows in enumerate(active):
                for part in rows.split(self.chunk_size):
                    if part.numel():
                        yield None, [(k, part, None)]
            return
        used = torch.cat([self.positions[k][rows] for k, rows in enumerate(active)])
        unique = torch.unique(used)
        places = [torch.searchsorted(unique, self.positions[k][rows]) for k, rows in enumerate(active)]
        for start in range(0, unique.numel(), self.chunk_size):
            stop = start + self.chunk_size
            members: list[tuple[int, Tensor, Tensor | None]] = []
            for k, rows in enumerate(active):
                inside = (places[k] >= start) & (places[k] < stop)
                members.append((k, rows[inside], places[k][inside] - start))
            yield unique[start:stop], members


class ChunkedCrossEntropy(torch.autograd.Function):
    """Cross-entropy of the draft logits against labels and the target's distribution, made and differentiated by chunks.

    The gradient with respect to hidden states and trained lm_heads is computed in the forward pass, where the logits
    of the chunk exist anyway, and only scaled in the backward pass: two products more than a forward, none repeated.
    Returns the losses ``[K]`` float64 and, per step, ``[N]`` bool: the argmax of the draft logits is the label.
    """

    @staticmethod
    def forward(ctx: Any, plan: ChunkPlan, *tensors: Tensor) -> tuple[Tensor, ...]:
        """tensors: K hidden states ``[N, H']``, then the distinct trained lm_head weights ``[D, H']``."""
        num_steps = len(plan.steps)
        hidden, weights = tensors[:num_steps], tensors[num_steps:]
        device = hidden[0].device
        compute = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else hidden[0].dtype
        weight_index = {id(weight): i for i, weight in enumerate(plan.trained_weights)}
        casts = {id(s.unembed.weight): s.unembed.weight.detach().to(compute) for s in plan.steps}
        grad_hidden = [torch.zeros_like(h) if h.requires_grad else None for h in hidden]
        grad_weight = [torch.zeros_like(w, dtype=torch.float32) for w in weights]
        losses = torch.zeros(num_steps, dtype=torch.float64, device=device)
        hits = [torch.zeros(h.shape[0], dtype=torch.bool, device=device) for h in hidden]
        teacher_weight = plan.teacher.weight.detach().to(compute)
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            for positions, members in plan.chunks():
                probs = None
                if positions is not None and plan.teacher_hidden is not None:
                    logits = _logits(plan.teacher_hidden[positions].to(compute), teacher_weight, plan.teacher)
                    probs = logits.softmax(-1)
                for k, rows, place in members:
                    if not rows.numel():
                        continue
                    unembed = plan.steps[k].unembed
                    weight = casts[id(unembed.weight)]
                    rows_hidden = hidden[k][rows].to(compute)
                    logits = _logits(rows_hidden, weight, unembed)
                    labels, scale = plan.labels[k][rows], plan.scales[k][rows]
                    hits[k][rows] = logits.argmax(-1) == labels
                    row_probs = None if probs is None or place is None else probs[place]
                    loss, grad = _cross_entropy(logits, labels, row_probs, plan.hard, plan.soft)
                    losses[k] += (loss * scale).sum(dtype=torch.float64)
                    grad = _through_finish(grad.mul_(scale[:, None]), logits, unembed).to(compute)
                    target = grad_hidden[k]
                    if target is not None:
                        target[rows] = (grad @ weight).to(target.dtype)
                    index = weight_index.get(id(unembed.weight))
                    if index is not None:
                        grad_weight[index] += grad.t() @ rows_hidden
        ctx.grads = (*grad_hidden, *(g.to(w.dtype) for g, w in zip(grad_weight, weights, strict=True)))
        ctx.mark_non_differentiable(*hits)
        return (losses, *hits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """The depths share one upstream gradient: their losses are summed with equal weight."""
        upstream = grads[0][0]
        return (None, *(None if g is None else g * upstream.to(g.dtype) for g in ctx.grads))


def _connected_zero(steps: Sequence[DraftStep]) -> Tensor:
    """A 0-d zero that depends on all that the steps depend on: a rank without anchors still takes part in backward."""
    zero = sum((step.hidden.sum() * 0.0 for step in steps), torch.zeros((), device=steps[0].hidden.device))
    if not steps[0].hidden.shape[0]:
        zero = zero + sum((step.unembed.weight.sum() * 0.0 for step in steps if step.unembed.weight.requires_grad), zero)
    return zero


def _logits(hidden: Tensor, weight: Tensor, unembed: Unembedding) -> Tensor:
    """``[n, H]`` -> float32 logits ``[n, D]``, scaled and soft-capped."""
    bias = None if unembed.bias is None else unembed.bias.detach().to(hidden.dtype)
    return unembed.finish(torch.nn.functional.linear(hidden, weight, bias).float())


def _cross_entropy(
    logits: Tensor, labels: Tensor, probs: Tensor | None, hard: float, soft: float
) -> tuple[Tensor, Tensor]:
    """Loss ``[n]`` and its gradient with respect to ``logits`` ``[n, D]``; a label of -1 has no hard part."""
    log_q = logits.log_softmax(-1)
    loss = torch.zeros(logits.shape[0], device=logits.device)
    weight = torch.zeros_like(loss)
    grad = log_q.exp()
    known = (labels >= 0).float() * hard
    if probs is not None:
        weight = weight + soft
        loss = loss - soft * (probs * log_q).sum(-1)
    weight = weight + known
    grad.mul_(weight[:, None])
    if probs is not None:
        grad.add_(probs, alpha=-soft)
    if hard:
        index = labels.clamp(min=0)[:, None]
        loss = loss - known * log_q.gather(1, index)[:, 0]
        grad.scatter_add_(1, index, -known[:, None])
    return loss, grad


def _through_finish(grad: Tensor, logits: Tensor, unembed: Unembedding) -> Tensor:
    """Gradient with respect to ``h W^T + b`` from that with respect to the scaled, soft-capped ``logits``."""
    if unembed.softcap is not None:
        grad = grad * (1 - (logits / unembed.softcap).square())
    return grad * unembed.scale if unembed.scale != 1.0 else grad


def _smooth_l1(step: DraftStep, aligned: Aligned, scale: Tensor, batch: DraftBatch) -> Tensor:
    """Sum over anchors of the mean over H of SmoothL1 to the target's state that predicts the same token; 0-d float64."""
    wanted = batch.features.last_hidden.flatten(0, 1)[aligned.teacher_positions]
    rows = torch.nn.functional.smooth_l1_loss(step.hidden.float(), wanted.float(), reduction="none").mean(-1)
    return (rows * scale).sum(dtype=torch.float64)


def _stats(aligned: list[Aligned], hits: list[Tensor], losses: Tensor) -> StepStats:
    """Counts per depth; prefixes by running AND over the depths."""
    valid = torch.stack([a.valid for a in aligned])
    hit = torch.stack(hits) & valid
    prefix_valid = valid.cummin(0).values if valid.numel() else valid
    prefix_hit = hit.cummin(0).values if hit.numel() else hit
    counts = [t.sum(1, dtype=torch.float64) for t in (hit, valid, prefix_hit, prefix_valid)]
    return StepStats(*counts, losses)
