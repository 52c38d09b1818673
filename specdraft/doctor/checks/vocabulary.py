"""Whether the head can draft what is said: its draft vocabulary against the answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from specdraft.data.chat import TokenRow
from specdraft.doctor.case import Case
from specdraft.doctor.findings import Finding, check
from specdraft.heads._vocab import choose_draft_vocab, coverage

POOR, MODERATE = 0.8, 0.95
"""Coverage below which it is a fault of the tokens it was chosen by, and a warning of rows that were not counted."""
FOLDS = 4
ENOUGH_TOKENS = 2000
"""Held-out tokens from which on a poor coverage of theirs is worth a warning."""


@check("draft vocabulary", 50)
def vocabulary(case: Case) -> Iterator[Finding]:
    """The draft vocabulary holds the end of turn, and covers answers, also those it was not chosen by."""
    vocab, size = case.head.vocab, case.target.spec.vocab_size
    if vocab is None:
        yield Finding("draft vocabulary", "ok", f"all {size:,} tokens of the target")
        return
    chosen = vocab.draft_token_ids().tolist()
    needed = {*case.end_ids, *case.target.spec.eos_token_ids}
    missing = sorted(needed - set(chosen))
    if missing:
        yield Finding(
            "draft vocabulary ends",
            "fault",
            f"it lacks {', '.join(repr(case.tokenizer.decode([token])) for token in missing)}: drafts never end an answer",
            "choose the draft vocabulary again from data of this target (train from the start, not from another head's map)",
            {"missing": missing},
        )
    counts = _counts(case.rows, size)
    share = coverage(counts, chosen)
    held, tokens = _held_out(case, len(chosen), needed)
    numbers = {"size": len(chosen), "coverage": share, "held_out_coverage": held, "held_out_tokens": tokens}
    text = f"{len(chosen):,} of {size:,} tokens cover {share:.1%} of the sample's answers"
    if held is not None:
        text += f"; as many chosen by other rows cover {held:.1%} of {tokens:,} held-out tokens"
    if share < POOR:
        yield Finding(
            "draft vocabulary",
            "fault",
            f"{text}: every other token is rejected",
            "raise head.draft_vocab_size, or use head.draft_vocab_coverage=0.98; a map of other data must be chosen anew",
            numbers,
        )
    elif held is not None and held < MODERATE and tokens >= ENOUGH_TOKENS:
        yield Finding(
            "draft vocabulary",
            "warning",
            text,
            "more training rows, or a larger head.draft_vocab_size",
            numbers,
        )
    else:
        yield Finding("draft vocabulary", "ok", text, "", numbers)


def _counts(rows: Sequence[TokenRow], size: int) -> Tensor:
    """``[V]`` int64: how often each token is supervised."""
    ids = [token for row in rows for token, on in zip(row.input_ids, row.loss_mask, strict=True) if on]
    return torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=size)


def _held_out(case: Case, size: int, always: set[int]) -> tuple[float | None, int]:
    """(coverage of one row in ``FOLDS`` by a vocabulary of the others, over all folds; tokens)."""
    vocab_size = case.target.spec.vocab_size
    if len(case.rows) < 2 * FOLDS:
        return None, 0
    covered = tokens = 0.0
    for fold in range(FOLDS):
        held = _counts([row for place, row in enumerate(case.rows) if place % FOLDS == fold], vocab_size)
        others = _counts([row for place, row in enumerate(case.rows) if place % FOLDS != fold], vocab_size)
        total = float(held.sum())
        covered += coverage(held, choose_draft_vocab(others, size, always)) * total
        tokens += total
    return (covered / tokens if tokens else None), int(tokens)
