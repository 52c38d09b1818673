"""Cases for the doctor: rows as the pipeline makes them, and a case with one thing changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from specdraft.data.chat import ChatRenderer, TokenRow
from specdraft.data.formats import Message
from specdraft.data.sources import Conversation
from specdraft.doctor.case import Case
from specdraft.doctor.findings import Finding, choose_checks, run_checks
from specdraft.eval.lossless import greedy_texts
from specdraft.targets.hf import HFTarget
from tests.cli import WORDS

EOS = 2


def conversation(place: int, *answers: str, question: str | None = None) -> Conversation:
    asked = question or f"What about {WORDS[place % len(WORDS)]} number {place} of them all?"
    messages: list[Message] = [{"role": "user", "content": asked}]
    for answer in answers:
        messages.append({"role": "assistant", "content": answer})
    return Conversation(str(place), "", messages)


def answered(writer: HFTarget, conversations: Sequence[Conversation]) -> list[TokenRow]:
    """Rows as the pipeline makes them: the target's own greedy answers, ended as the template does."""
    assert writer.tokenizer is not None
    renderer = ChatRenderer(writer.tokenizer)
    rows = []
    for one in conversations:
        prompt = renderer.prompt_ids(one.messages)
        (text,) = greedy_texts(writer, [prompt], 24)
        text = text[: text.index(EOS)] if EOS in text else text
        rows.append(TokenRow([*prompt, *text, EOS], [False] * len(prompt) + [True] * (len(text) + 1)))
    return rows


def run(case: Case, *names: str) -> dict[str, Finding]:
    """Name -> finding of the checks ``names``, or of all."""
    return {found.name: found for found in run_checks(case, choose_checks(names, []))}


def faults(case: Case, *names: str) -> set[str]:
    return {name for name, found in run(case, *names).items() if found.verdict == "fault"}


def with_target(case: Case, **changes: Any) -> Case:
    """The case with a copy of its target that has other attributes."""
    other = copy.copy(case.target)
    for name, value in changes.items():
        setattr(other, name, value)
    return replace(case, target=other, notes={})


def with_template(case: Case, template: str, **changes: Any) -> Case:
    tokenizer = copy.deepcopy(case.tokenizer)
    tokenizer.chat_template = template
    return replace(with_target(case, tokenizer=tokenizer), **changes)


def with_rows(case: Case, change: Callable[[TokenRow], TokenRow]) -> Case:
    return replace(case, rows=[change(row) for row in case.rows], notes={})


def shifted(row: TokenRow, by: int) -> TokenRow:
    mask = row.loss_mask
    return TokenRow(row.input_ids, [*[False] * by, *mask[:-by]] if by > 0 else [*mask[-by:], *[True] * -by])
