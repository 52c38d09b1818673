"""Whether prompts that measure the head are among those that train it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from specdraft.core.errors import DataError
from specdraft.data.overlap import BUILTIN_HELD_OUT, HeldOut
from specdraft.data.sources import SourceReport, open_source
from specdraft.doctor.case import Case
from specdraft.doctor.findings import Finding, check
from specdraft.eval.prompts import DEV_SET, load_prompts, set_name

WORDS = 13
"""In a row that a prompt and a training text must share; a shorter prompt must be the whole of one."""
MOST = 1
"""Conversation that may share text by chance; more are a fault."""


@check("leak", 51)
def leak(case: Case) -> Iterator[Finding]:
    """No prompt of the evaluation sets is among the training prompts, by runs of 13 words."""
    data = case.job.data
    dropped = {*data.held_out, *("builtin" if name == BUILTIN_HELD_OUT[1] else name for name in BUILTIN_HELD_OUT)}
    sets: dict[str, tuple[HeldOut, int]] = {}
    for source in [*case.job.eval.prompts, DEV_SET]:
        name = f"leak: {set_name(source)}"
        if source in dropped and data.overlap_words and data.overlap_words <= WORDS:
            yield Finding(
                name, "ok", f"training rows that share {data.overlap_words} words in a row with it are dropped"
            )
            continue
        try:
            prompts = load_prompts(source)
        except DataError as error:
            yield Finding(name, "warning", f"not looked at: {error}", "give the set as a local file")
            continue
        held = HeldOut(WORDS)
        for prompt in prompts:
            held.add(prompt.turns)
        sets[source] = held, len(prompts)
    if sets:
        yield from _overlaps(case, sets)


def _overlaps(case: Case, sets: Mapping[str, tuple[HeldOut, int]]) -> Iterator[Finding]:
    """One finding for each set; the sources are read once, one conversation after the other."""
    hits: dict[str, list[str]] = {source: [] for source in sets}
    count = 0
    for name in case.job.data.sources:
        source = open_source(name)
        for conversation in source.conversations(SourceReport(name)):
            count += 1
            for key, (held, _) in sets.items():
                if held.overlaps(conversation.user_turns):
                    hits[key].append(conversation.id)
    for key, (_, size) in sets.items():
        found = hits[key]
        text = f"{len(found)} of {count:,} conversations share {WORDS} words in a row with its {size} prompts"
        numbers = {"conversations": count, "overlapping": len(found), "first": found[:20]}
        if not found:
            yield Finding(f"leak: {set_name(key)}", "ok", text, "", numbers)
            continue
        yield Finding(
            f"leak: {set_name(key)}",
            "fault" if len(found) > MOST else "warning",
            f"{text}, first {found[0]}: the acceptance measured there would be too high",
            f"add it to data.held_out, so that prepare drops them: data.held_out=[{key}]",
            numbers,
        )
