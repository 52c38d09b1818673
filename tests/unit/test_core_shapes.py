"""Padded sizes, and that padding to them changes neither loss nor gradient."""

from __future__ import annotations

import pytest
import torch

from specdraft.core.shapes import LEAST, padded_rows, padded_size
from specdraft.core.types import DraftStep, Features, Unembedding
from specdraft.data.batching import collate
from specdraft.data.chat import TokenRow
from specdraft.heads._parallel import choose_anchors
from specdraft.heads._sampled import sampled_anchors, share_of
from specdraft.heads.base import head_kinds
from specdraft.losses._config import LossConfig
from specdraft.losses.alignment import align, build_draft_batch
from specdraft.losses.objectives import Objective, Teacher
from tests.training import make_head, make_rows, target


def test_a_padded_size_holds_at_most_an_eighth_more_and_there_are_eight_for_a_doubling() -> None:
    sizes = [padded_size(size) for size in range(1, 4096)]
    assert all(size <= padded <= max(LEAST, size * 1.125 + 1, size + LEAST - 1) for size, padded in enumerate(sizes, 1))
    assert len({padded for size, padded in enumerate(sizes, 1) if 1024 <= size < 2048}) <= 9
    assert padded_size(0) == 0
    assert [padded_size(padded) for padded in sizes] == sizes


def test_padded_rows_are_zeros_behind_the_rows() -> None:
    padded = padded_rows(torch.ones(17, 3), 1024)
    assert padded.shape == (32, 3)
    assert padded_rows(torch.ones(17, 3), 20).shape == (20, 3) and padded_rows(torch.ones(17, 3), 4).shape == (17, 3)
    assert padded[:17].eq(1).all() and padded[17:].eq(0).all()


@pytest.mark.parametrize("offset", [2, 3, 6])
def test_added_anchors_have_no_label_at_any_offset(offset: int) -> None:
    rows = [
        TokenRow(list(range(5, 25)), [t >= 4 for t in range(20)]),
        TokenRow([5, 6, 7, 8, 9], [False] * 2 + [True] * 3),
    ]
    tokens = collate(rows, 0)
    hidden = torch.zeros(*tokens.input_ids.shape, 4)
    plain = build_draft_batch(tokens, Features(hidden, None))
    rounded = build_draft_batch(tokens, Features(hidden, None), rounded=True)
    assert rounded.anchors.numel() == padded_size(plain.anchors.numel()) > plain.anchors.numel()
    assert rounded.anchors.diff().ge(0).all()
    unembed = Unembedding(torch.zeros(30, 4))
    wanted = align(plain, DraftStep(hidden.flatten(0, 1)[plain.anchors], offset, unembed))
    found = align(rounded, DraftStep(hidden.flatten(0, 1)[rounded.anchors], offset, unembed))
    assert found.labels[found.valid].tolist() == wanted.labels[wanted.valid].tolist()


def test_rounded_rows_are_padded_on_the_right() -> None:
    row = TokenRow(list(range(1, 20)), [True] * 19)
    tokens = collate([row], 0, rounded=True)
    assert tokens.input_ids.shape == (1, 32)
    assert tokens.attention_mask[0].tolist() == [True] * 19 + [False] * 13


@pytest.mark.parametrize("normalize", ["token", "sequence"])
@pytest.mark.parametrize("kind", list(head_kinds()))
def test_padding_changes_neither_loss_nor_gradient_nor_counts(kind: str, normalize: str) -> None:
    head = make_head(kind).train()
    rows, objective = make_rows(3), Objective(LossConfig(normalize=normalize))
    vocab = head.vocab
    unembed = target().unembedding
    reduced = (
        Teacher(unembed, head.draft_unembedding(unembed), head.label_map())
        if vocab
        else Teacher(unembed, unembed, None)
    )
    results, gradients = [], []
    for rounded in (False, True):
        tokens = collate(rows, 0, [0, 1, 2], rounded=rounded)
        batch = build_draft_batch(tokens, target().capture(tokens, head.features()), rounded)
        head.zero_grad()
        torch.manual_seed(0)
        result = objective(head(batch, target().embed, unembed), batch, reduced)
        result.loss_sum.backward()
        results.append((batch, result))
        gradients.append([p.grad.clone() for p in head.parameters() if p.grad is not None])
    (plain, wanted), (padded, found) = results
    assert padded.anchors.numel() > plain.anchors.numel() == int(padded.drafting.sum())
    assert objective.denominator(plain) == objective.denominator(padded)
    torch.testing.assert_close(found.loss_sum, wanted.loss_sum, rtol=1e-5, atol=1e-5)
    assert found.stats.counts.tolist() == wanted.stats.counts.tolist()
    assert found.stats.prefix_hits.tolist() == wanted.stats.prefix_hits.tolist()
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_sample_of_anchors_leaves_out_those_that_only_pad() -> None:
    """Without padding nothing exceeds the limit, so with it every real anchor stays too."""
    tokens = collate(make_rows(3), 0, [0, 1, 2])
    hidden = torch.zeros(*tokens.input_ids.shape, 4)
    plain = build_draft_batch(tokens, Features(hidden, None))
    rounded = build_draft_batch(tokens, Features(hidden, None), rounded=True)
    most = int(torch.bincount(plain.anchors // tokens.input_ids.shape[1]).max())
    assert choose_anchors(plain, most) is None and choose_anchors(rounded, most) is None
    drawn = choose_anchors(rounded, most - 1)
    assert drawn is not None
    assert rounded.drafting[drawn[0]].all() and drawn[1].sum() == plain.anchors.numel()


def test_deeper_depths_draw_from_real_anchors_in_numbers_that_padding_rounds() -> None:
    tokens = collate(make_rows(3), 0, [0, 1, 2])
    batch = build_draft_batch(tokens, Features(torch.zeros(*tokens.input_ids.shape, 4), None), rounded=True)
    real, padded = int(batch.drafting.sum()), batch.anchors.numel()
    assert real < padded
    first, *deeper = sampled_anchors(batch, 3, 0.5)
    assert first is None and share_of(batch, None) is None
    for depth, chosen in enumerate(deeper, 1):
        assert chosen is not None and chosen.numel() == min(round(padded * 0.5**depth), real)
        assert batch.drafting[chosen].all() and chosen.unique().numel() == chosen.numel()
        share = share_of(batch, chosen)
        assert share is not None and share.sum().item() == pytest.approx(real)
