"""The one place that shifts: an offset becomes labels, masks, teacher states, for every head alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdraft.core.shapes import missing_rows
from specdraft.core.types import DraftBatch, DraftStep, Features, TokenBatch


@dataclass(frozen=True)
class Aligned:
    """What the anchors of a step, all N or those it chose, are compared with. Anchors without a partner have ``valid`` False.

    For an anchor at position t of its row and a step of offset o:

        label position     t + o        the token the step predicts
        teacher position   t + o - 1    the target's state there predicts the same token

    label_positions, teacher_positions: ``[N]`` int64 flat positions ``b * T + t`` (clamped where not valid).
    labels: ``[N]`` int64. valid: ``[N]`` bool, True = the label is supervised, in the same row and document.
    """

    label_positions: Tensor
    teacher_positions: Tensor
    labels: Tensor
    valid: Tensor


def anchor_positions(tokens: TokenBatch) -> Tensor:
    """``[N]`` int64, sorted flat positions t whose token at t + 2 is supervised and of t's document.

    The last prompt position but one is an anchor (it drafts the first answer token); the last two positions of a
    document never are.
    """
    length = tokens.input_ids.shape[1]
    if length < 3:
        return tokens.input_ids.new_zeros(0)
    same = tokens.document_ids[:, 2:] == tokens.document_ids[:, :-2]
    wanted = tokens.loss_mask[:, 2:] & tokens.attention_mask[:, 2:] & tokens.attention_mask[:, :-2] & same
    rows, columns = wanted.nonzero(as_tuple=True)
    return rows * length + columns


def build_draft_batch(tokens: TokenBatch, features: Features, rounded: bool = False) -> DraftBatch:
    """Tokens and the target's features of the same batch, with their anchors.

    rounded: on a CPU more anchors are added, at the end of the row with the fewest, where nothing is left to draft, until
    there are ``padded_size`` of them. They take no part in loss and counts.
    """
    anchors = anchor_positions(tokens)
    missing = missing_rows(anchors.numel(), anchors.device) if rounded else 0
    if missing:
        rows, length = tokens.input_ids.shape
        fewest = torch.bincount(anchors // length, minlength=rows).argmin()
        anchors = torch.cat([anchors, (fewest * length + length - 1).expand(missing)]).sort().values
    return DraftBatch(
        input_ids=tokens.input_ids,
        attention_mask=tokens.attention_mask,
        loss_mask=tokens.loss_mask,
        features=features,
        position_ids=tokens.position_ids,
        document_ids=tokens.document_ids,
        anchors=anchors,
    )


def align(batch: DraftBatch, step: DraftStep) -> Aligned:
    """The partners at ``step.offset`` of every anchor that the step drafts from.

    Raises:
        ValueError: an offset below 2: the target itself predicts offset 1, so the head is wrong.
    """
    if step.offset < 2:
        raise ValueError(f"a draft step must have an offset of at least 2, got {step.offset}")
    length = batch.input_ids.shape[1]
    anchors = batch.anchors if step.chosen is None else batch.anchors[step.chosen]
    column = anchors % length + step.offset
    inside = column < length
    label = torch.where(inside, anchors + step.offset, anchors)
    documents = batch.document_ids.flatten()
    valid = inside & batch.loss_mask.flatten()[label] & batch.attention_mask.flatten()[label]
    valid = valid & (documents[label] == documents[anchors])
    teacher = torch.where(inside, label - 1, label)
    return Aligned(label, teacher, batch.input_ids.flatten()[label], valid)
