"""An engine's texts, proposals and counts held against ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdraft.export.engines.ours import Row, places


@dataclass(frozen=True)
class Agreement:
    """What was compared in one engine. difference: the first one in words; None = there is none.

    proposed: drafted tokens that were compared one by one (0 = the engine tells counts only). drafted, accepted: of ours.
    """

    engine: str
    version: str
    rows: int
    tokens: int
    proposed: int
    drafted: int
    accepted: int
    difference: str | None

    def line(self) -> str:
        """For the terminal."""
        what = f"{self.proposed} proposed tokens" if self.proposed else f"{self.drafted} drafted tokens, counted"
        begin = (
            f"{self.engine} {self.version}: {self.rows} texts of {self.tokens} tokens, {what}, {self.accepted} accepted"
        )
        return f"{begin}: {self.difference or 'equal to ours'}"


def compare(engine: str, result: Mapping[str, Any], ours: Sequence[Row]) -> Agreement:
    """Holds the rows of a runner's result against ours: texts, and whatever of drafting it reports."""
    difference, proposed = None, 0
    for i, row in enumerate(ours):
        plain = result["plain"][i]["tokens"] if "plain" in result else row.tokens
        found, count = _compare_row(row, plain, result["speculative"][i])
        proposed += count
        if difference is None and found is not None:
            difference = f"text {i + 1}: {found}"
    return Agreement(
        engine,
        str(result["version"]),
        len(ours),
        sum(len(row.tokens) for row in ours),
        proposed,
        sum(row.drafted for row in ours),
        sum(row.accepted for row in ours),
        difference,
    )


def _compare_row(row: Row, plain: Sequence[int], theirs: Mapping[str, Any]) -> tuple[str | None, int]:
    """What differs first, and how many proposed tokens were compared."""
    for tokens, how in ((plain, "plain"), (theirs["tokens"], "with the draft")):
        if list(tokens) != row.tokens:
            at = next((i for i, (a, b) in enumerate(zip(tokens, row.tokens, strict=False)) if a != b), None)
            where = f"{len(tokens)} tokens in place of {len(row.tokens)}" if at is None else f"another token at {at}"
            return f"the target's own text differs {how}: {where}", 0
    if "proposals" in theirs:
        return _compare_proposals(row, theirs["proposals"])
    for name, own in (("drafted", row.drafted), ("accepted", row.accepted), ("forwards", row.steps + 1)):
        if name in theirs and theirs[name] != own:
            return f"{theirs[name]} {name}, ours {own}", 0
    return None, 0


def _compare_proposals(row: Row, proposals: Sequence[Sequence[int]]) -> tuple[str | None, int]:
    """Step by step. Near the end of a text we draft no further than it reaches; an engine may."""
    theirs = places(row.tokens, proposals)
    count = 0
    for place, own in places(row.tokens, row.proposals).items():
        if place not in theirs:
            return f"nothing is proposed behind token {place}", count
        found = theirs[place][: len(own)]
        count += len(own)
        if found != own:
            return f"behind token {place} it proposes {found}, ours {own}", count
    return None, count
