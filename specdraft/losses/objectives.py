"""The training objective: loss terms over draft depths, their weights, their normalisation and the counts they give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdraft.core.errors import ConfigError
from specdraft.core.types import DraftBatch, DraftStep, TokenBatch, Unembedding
from specdraft.losses._config import LossConfig
from specdraft.losses.alignment import Aligned, align, anchor_positions
from specdraft.losses.chunked import ChunkedTerms, ChunkPlan
from specdraft.losses.metrics import StepStats


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

    (or with step_weights[k] for gamma^k; where a step chose some of the anchors, w_n is multiplied by their share, which
    leaves the expected sum as it is). hard_ce: -log q(label). soft_ce: -sum_x p(x) log q(x), p the target's
    distribution over the draft vocabulary, renormalised there (EAGLE-3; Medusa's distillation form); the other terms of
    p and q are written out in ``divergences``. smooth_l1: mean over H of SmoothL1(draft hidden, target hidden) (EAGLE-1).
    confidence: binary cross-entropy between the head's confidence and sum_x min(p(x), q(x)), which no gradient goes
    through (DSpark, its section on the confidence head).
    """

    def __init__(self, config: LossConfig) -> None:
        self.config = config

    def denominator(self, tokens: TokenBatch | DraftBatch) -> Tensor:
        """This batch's part of the normaliser, 0-d float64: anchors, rows with anchors, or B*T (see LossConfig)."""
        anchors = tokens.anchors[tokens.drafting] if isinstance(tokens, DraftBatch) else anchor_positions(tokens)
        rows, length = tokens.input_ids.shape
        if self.config.normalize == "token":
            value = anchors.numel()
        elif self.config.normalize == "sequence":
            value = int(torch.unique(_document_keys(tokens, anchors)).numel())
        else:
            value = rows * length
        return torch.tensor(float(value), dtype=torch.float64, device=tokens.input_ids.device)

    def anchor_weights(self, batch: DraftBatch) -> Tensor:
        """``[N]`` float32: 1, or one over the anchors of the row when rows weigh the same."""
        weights = torch.ones(batch.anchors.numel(), device=batch.anchors.device)
        if self.config.normalize == "sequence":
            keys = _document_keys(batch, batch.anchors[batch.drafting])
            weights = torch.zeros_like(weights).masked_scatter_(batch.drafting, 1.0 / torch.bincount(keys)[keys])
        return weights

    def __call__(self, steps: Sequence[DraftStep], batch: DraftBatch, teacher: Teacher) -> LossResult:
        """Loss and counts of one batch. Without anchors the loss is a zero that still reaches every step's graph."""
        self._check(steps, batch)
        aligned = [align(batch, step) for step in steps]
        weights = self.anchor_weights(batch)
        scales = [
            _chosen(step, weights) * (self._in_loss(a, batch, teacher) * self.config.step_weight(k))
            for k, (step, a) in enumerate(zip(steps, aligned, strict=True))
        ]
        loss_sum = _connected_zero(steps)
        step_losses = torch.zeros(len(steps), dtype=torch.float64, device=batch.anchors.device)
        hits = [torch.zeros_like(a.valid) for a in aligned]
        if batch.anchors.numel():
            values, hits, accepted = self._logit_terms(steps, batch, teacher, aligned, scales)
            loss_sum = loss_sum + values.sum().float()
            step_losses += values.detach()
            if accepted:
                values = torch.stack([_confidence(*row) for row in zip(steps, accepted, scales, strict=True)])
                values = values * self.config.terms["confidence"]
                loss_sum = loss_sum + values.sum().float()
                step_losses += values.detach()
        if "smooth_l1" in self.config.terms and batch.anchors.numel():
            values = torch.stack([_smooth_l1(s, a, c, batch) for s, a, c in zip(steps, aligned, scales, strict=True)])
            values = values * self.config.terms["smooth_l1"]
            loss_sum = loss_sum + values.sum().float()
            step_losses += values.detach()
        return LossResult(loss_sum, _stats(steps, aligned, hits, step_losses, batch.anchors.numel()))

    def _check(self, steps: Sequence[DraftStep], batch: DraftBatch) -> None:
        """Raises ConfigError where the head's steps do not fit the settings."""
        weights, width = self.config.step_weights, batch.features.last_hidden.shape[-1]
        if weights is not None and len(weights) < len(steps):
            raise ConfigError(f"loss.step_weights: the head trains {len(steps)} depths, got {weights}; give as many")
        if "smooth_l1" in self.config.terms and steps[0].hidden.shape[-1] != width:
            raise ConfigError(
                f"loss.terms.smooth_l1: this head drafts no features of the target's width {width}, "
                f"got {steps[0].hidden.shape[-1]}; remove the term"
            )
        confident = steps[0].confidence is not None
        if confident != ("confidence" in self.config.terms):
            raise ConfigError(
                f"loss.terms.confidence: {'is' if confident else 'is not'} for this head, which estimates "
                f"{'its acceptance' if confident else 'no acceptance'}, got {self.config.terms}; "
                f"{'add' if confident else 'remove'} the term"
            )

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
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The terms over logits: losses ``[K]`` float64 and, per step, what is measured on the way.

        That is ``[N]`` bool, True where the argmax is the label, and ``[N]`` float32, what sampling accepts; there are
        none of the latter where no term asks for it.
        """
        label_map = teacher.label_map
        labels = [a.labels if label_map is None else label_map[a.labels] for a in aligned]
        teacher_hidden = batch.features.last_hidden.flatten(0, 1) if self.config.needs_teacher else None
        reduced = label_map is not None and self.config.measures_acceptance
        plan = ChunkPlan(
            steps=steps,
            labels=labels,
            scales=scales,
            positions=[a.teacher_positions for a in aligned],
            teacher_hidden=teacher_hidden,
            teacher=teacher.draft_unembed,
            whole=teacher.unembed if reduced else None,
            config=self.config,
        )
        out = ChunkedTerms.apply(  # type: ignore[no-untyped-call]
            plan, *(step.hidden for step in steps), *plan.trained_weights
        )
        hits, accepted = out[1 : len(steps) + 1], out[len(steps) + 1 :]
        return out[0], [hit & a.valid for hit, a in zip(hits, aligned, strict=True)], list(accepted)


def _document_keys(tokens: TokenBatch | DraftBatch, anchors: Tensor) -> Tensor:
    """``[N]`` int64, a number of the document that every anchor stands in, different for every document of the batch."""
    length = tokens.input_ids.shape[1]
    return anchors // length * length + tokens.document_ids.flatten()[anchors]


def _connected_zero(steps: Sequence[DraftStep]) -> Tensor:
    """A 0-d zero that depends on all that the steps depend on: a rank without anchors still takes part in backward."""
    zero = sum((step.hidden.sum() * 0.0 for step in steps), torch.zeros((), device=steps[0].hidden.device))
    zero = sum((step.confidence.sum() * 0.0 for step in steps if step.confidence is not None), zero)
    if not steps[0].hidden.shape[0]:
        zero = zero + sum(
            (step.unembed.weight.sum() * 0.0 for step in steps if step.unembed.weight.requires_grad), zero
        )
    return zero


def _chosen(step: DraftStep, weights: Tensor) -> Tensor:
    """Weights ``[N]`` of the batch's anchors -> those of the anchors that the step drafts from."""
    if step.chosen is None:
        return weights
    return weights[step.chosen] if step.share is None else weights[step.chosen] * step.share


def _confidence(step: DraftStep, accepted: Tensor, scale: Tensor) -> Tensor:
    """Sum over anchors of the cross-entropy between the head's confidence and what sampling accepts; 0-d float64."""
    assert step.confidence is not None
    rows = torch.nn.functional.binary_cross_entropy_with_logits(step.confidence.float(), accepted, reduction="none")
    return (rows * scale).sum(dtype=torch.float64)


def _smooth_l1(step: DraftStep, aligned: Aligned, scale: Tensor, batch: DraftBatch) -> Tensor:
    """Sum over anchors of the mean over H of SmoothL1 to the target's state that predicts the same token; 0-d float64."""
    wanted = batch.features.last_hidden.flatten(0, 1)[aligned.teacher_positions]
    rows = torch.nn.functional.smooth_l1_loss(step.hidden.float(), wanted.float(), reduction="none").mean(-1)
    return (rows * scale).sum(dtype=torch.float64)


def _stats(
    steps: Sequence[DraftStep], aligned: list[Aligned], hits: list[Tensor], losses: Tensor, count: int
) -> StepStats:
    """Counts per depth; prefixes by running AND over the depths. Of the ``count`` anchors those not chosen are left out."""

    def spread(step: DraftStep, values: Tensor) -> Tensor:
        return values if step.chosen is None else values.new_zeros(count).index_copy(0, step.chosen, values)

    valid = torch.stack([spread(step, a.valid) for step, a in zip(steps, aligned, strict=True)])
    hit = torch.stack([spread(step, own) for step, own in zip(steps, hits, strict=True)]) & valid
    prefix_valid = valid.cummin(0).values if valid.numel() else valid
    prefix_hit = hit.cummin(0).values if hit.numel() else hit
    counts = [t.sum(1, dtype=torch.float64) for t in (hit, valid, prefix_hit, prefix_valid)]
    return StepStats.unpack(torch.stack([*counts, losses]))
