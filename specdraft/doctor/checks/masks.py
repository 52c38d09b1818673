"""Checks of the rows: what is supervised, where it begins and ends, BOS, and what was dropped or cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import jinja2

from specdraft.data.chat import TokenRow
from specdraft.data.formats import Message
from specdraft.data.preview import mask_report
from specdraft.doctor.case import Case
from specdraft.doctor.findings import Finding, check

MUCH_CUT = 0.2
"""Share of the rows that end at data.max_length, from which on it is a warning."""
FIXES = {
    "supervised share": "look at the rows (html=page.html); mend the template or the sources; prepare the data again",
    "BOS": "write BOS once: in the chat template, or nowhere if the target was trained without it",
    "end of turn": "raise data.max_new_tokens or data.max_length; if answers are whole, the template must end them",
}
"""Name of a check of ``mask_report`` -> what to do."""


@check("masks", 20)
def masks(case: Case) -> Iterator[Finding]:
    """Something is supervised in every row, BOS stands once, and the end of turn is learned."""
    for found in mask_report(case.rows, case.tokenizer, case.end_ids):
        fix = FIXES[found.name] if found.verdict != "ok" else ""
        yield Finding(found.name, found.verdict, found.detail, fix, rows=_rows_without(case, found.name, found.verdict))
    unended = [place for place, row in enumerate(case.rows) if _lacks_end(case, row)]
    if unended:
        yield Finding(
            "end of turn missing",
            "fault",
            f"{len(unended)} of {len(case.rows)} rows end without an end of turn though no limit cut them: drafts would "
            "never stop",
            "the chat template must write the end of turn after an answer; prepare the data again",
            {"rows": unended},
            tuple(unended),
        )


def _rows_without(case: Case, name: str, verdict: str) -> tuple[int, ...]:
    if name != "supervised share" or verdict == "ok":
        return ()
    return tuple(place for place, row in enumerate(case.rows) if not any(row.loss_mask) or all(row.loss_mask))


def _lacks_end(case: Case, row: TokenRow) -> bool:
    """Whether the last answer of a row ends neither in an end of turn nor at a limit."""
    if not any(row.loss_mask):
        return False
    data = case.job.data
    last = max(place for place, on in enumerate(row.loss_mask) if on)
    length = next(stop - start for start, stop in reversed(spans(row)))
    following = row.input_ids[last + 1 : last + 2]
    was_cut = len(row.input_ids) >= data.max_length or (data.regenerate and length >= data.max_new_tokens)
    return row.input_ids[last] not in case.end_ids and not set(following) & case.end_ids and not was_cut


def spans(row: TokenRow) -> list[tuple[int, int]]:
    """(start, stop) of every supervised stretch."""
    found, place = [], 0
    for on, group in groupby(row.loss_mask):
        size = len(list(group))
        if on:
            found.append((place, place + size))
        place += size
    return found


@check("mask position", 21)
def mask_position(case: Case) -> Iterator[Finding]:
    """Supervision begins with the token that follows the prompt: not the user's words, not one token early or late."""
    shifts: Counter[int] = Counter()
    wrong, unknown, checked = [], [], 0
    prompts = list(_prompts(case))
    for place, row in enumerate(case.rows):
        own = [prompt for prompt in prompts if row.input_ids[: len(prompt.ids)] == prompt.ids]
        if not own:
            unknown.append(place)
        elif any(row.loss_mask):
            checked += 1
            shift = min((_shift(case, row, prompt) for prompt in own), key=abs)
            if shift:
                wrong.append(place)
                shifts[shift] += 1
    numbers = {"checked": checked, "shifts": {str(k): count for k, count in shifts.items()}, "unknown": len(unknown)}
    if wrong:
        shift, count = shifts.most_common(1)[0]
        where = f"{-shift} tokens before" if shift < 0 else f"{shift} tokens after"
        yield Finding(
            "mask position",
            "fault",
            f"in {len(wrong)} of {checked} rows supervision does not begin with the answer, in {count} of them {where} it",
            "the loss mask is shifted or covers prompts: prepare the data again with this version and this template",
            numbers,
            tuple(wrong),
        )
    elif checked:
        yield Finding(
            "mask position", "ok", f"supervision begins with the answer's first token in {checked} rows", "", numbers
        )
    if unknown:
        yield Finding(
            "prompts",
            "fault",
            f"{len(unknown)} of {len(case.rows)} rows do not begin with a prompt as decoding would start from, by the "
            "tokenizer's own chat template",
            "template, system message or thinking switch have changed since the rows were made: prepare the data again",
            numbers,
            tuple(unknown),
        )


@dataclass(frozen=True)
class _Prompt:
    """What decoding would start from for one turn.

    inserted: tokens the template itself may put behind it. is_first: of several turns, whose later prompts hold answers that
    are not known here.
    """

    ids: list[int]
    inserted: int
    is_first: bool


def _shift(case: Case, row: TokenRow, prompt: _Prompt) -> int:
    """Tokens by which supervision begins too late, or with a minus too early, if the row's answer follows ``prompt``."""
    start = row.loss_mask.index(True)
    shift = start - len(prompt.ids)
    if 0 <= shift <= prompt.inserted:
        return 0
    if shift > 0 and prompt.is_first:
        # A later turn with a row of its own: it must follow a generation prompt, too.
        ending = _generation_ids(case)
        if ending and row.input_ids[start - len(ending) : start] == ending:
            return 0
    return shift


def _generation_ids(case: Case) -> list[int]:
    """What the template puts between a question and the place where the answer begins."""
    question: list[Message] = [{"role": "user", "content": "Hi there."}]
    with_prompt, without = case.render(question, prompt=True), case.render(question, prompt=False)
    added = with_prompt[len(without) :] if with_prompt.startswith(without) else ""
    ids: list[int] = case.tokenizer(added, add_special_tokens=False)["input_ids"] if added else []
    return ids


def _prompts(case: Case) -> Iterator[_Prompt]:
    """The prompts of the sample's turns, as far as the text before them is known."""
    for conversation in case.conversations:
        messages = conversation.messages
        answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        several = len(conversation.user_turns) > 1
        starts = answers or [len(messages)]
        if case.job.data.regenerate:
            starts = starts[:1]
        try:
            for number, start in enumerate(starts):
                inserted = _inserted(case, messages) if number == 0 else 0
                yield _Prompt(case.prompt_ids(messages[:start]), inserted, several and number == 0)
        except jinja2.TemplateError:
            continue


def _inserted(case: Case, messages: Sequence[Message]) -> int:
    """Tokens of the template between prompt and answer, such as an empty think block."""
    if case.job.data.regenerate:
        return 0
    turns = case.renderer.turns(messages)
    first = turns[0].supervised if turns else []
    return first.index(True) if True in first else 0


@check("lengths", 22)
def lengths(case: Case) -> Iterator[Finding]:
    """What was dropped, and how many rows reach their limit."""
    dropped = ", ".join(f"{reason}: {count}" for reason, count in case.dropped.items())
    count = sum(case.dropped.values())
    yield Finding(
        "dropped rows",
        "warning" if count else "ok",
        dropped or "none",
        "see the reasons; longer rows need data.max_length" if count else "",
        {"dropped": dict(case.dropped)},
    )
    cut = [place for place, row in enumerate(case.rows) if len(row.input_ids) >= case.job.data.max_length]
    share = len(cut) / len(case.rows)
    yield Finding(
        "cut rows",
        "warning" if share > MUCH_CUT else "ok",
        f"{len(cut)} of {len(case.rows)} rows are cut at data.max_length={case.job.data.max_length}",
        "raise data.max_length" if share > MUCH_CUT else "",
        {"share": share},
        tuple(cut),
    )
