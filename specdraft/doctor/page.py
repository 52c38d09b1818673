"""The findings and the rows as one page of HTML that needs no other file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

import jinja2

from specdraft.data.chat import TokenRow
from specdraft.doctor.case import Case
from specdraft.doctor.findings import VERDICTS, Finding

TEMPLATE = "page.html.j2"
MOST_ROWS = 64
"""Rows that are shown, the worst ones."""


@dataclass(frozen=True)
class Piece:
    """Text of a token as it is shown, its id, and the classes that colour it."""

    text: str
    id: int
    style: str


@dataclass(frozen=True)
class ShownRow:
    """One row of the page. place: in the sample. flags: names of the findings about it."""

    place: int
    pieces: list[Piece]
    supervised: int
    score: float | None
    flags: list[str]


def as_dict(case: Case, findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings for programs."""
    return {
        "schema": 1,
        "target": {"name": case.target.spec.name, "fingerprint": case.target.spec.fingerprint},
        "head": case.head.config.kind,
        "verdict": worst(findings),
        "counts": {verdict: sum(found.verdict == verdict for found in findings) for verdict in VERDICTS},
        "findings": [asdict(found) for found in findings],
    }


def worst(findings: Sequence[Finding]) -> str:
    """The worst verdict."""
    return max((found.verdict for found in findings), key=VERDICTS.index, default="ok")


def html_page(case: Case, findings: Sequence[Finding]) -> str:
    """The page; text of rows and findings is escaped."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    source = (resources.files("specdraft.doctor") / TEMPLATE).read_text(encoding="utf-8")
    spec = case.target.spec
    ordered = sorted(findings, key=lambda found: -VERDICTS.index(found.verdict))
    return environment.from_string(source).render(
        title=f"specdraft doctor: {spec.name}, {case.head.config.kind}",
        verdict=worst(findings),
        findings=[(found, json.dumps(found.numbers, indent=1, default=str)) for found in ordered],
        rows=worst_rows(case, findings),
        num_rows=len(case.rows),
    )


def worst_rows(case: Case, findings: Sequence[Finding]) -> list[ShownRow]:
    """The rows, worst first: those of faults, then of warnings, then by how unlikely the target finds their answers."""
    flags: dict[int, list[Finding]] = {}
    for found in findings:
        for place in found.rows:
            flags.setdefault(place, []).append(found)
    scores: dict[int, float] = case.notes.get("row_scores", {})

    def badness(place: int) -> tuple[int, int, float]:
        own = flags.get(place, [])
        level = max((VERDICTS.index(found.verdict) for found in own), default=0)
        return -level, -len(own), scores.get(place, -1e9)

    places = sorted(range(len(case.rows)), key=badness)[:MOST_ROWS]
    return [
        ShownRow(
            place=place,
            pieces=_pieces(case, case.rows[place]),
            supervised=sum(case.rows[place].loss_mask),
            score=scores.get(place),
            flags=[found.name for found in flags.get(place, [])],
        )
        for place in places
    ]


def _pieces(case: Case, row: TokenRow) -> list[Piece]:
    special = set(case.tokenizer.all_special_ids) | case.end_ids
    pieces = []
    for token, on in zip(row.input_ids, row.loss_mask, strict=True):
        text = str(case.tokenizer.decode([token], skip_special_tokens=False))
        style = "on" if on else "off"
        pieces.append(Piece(text.replace("\n", "⏎\n"), token, f"{style} special" if token in special else style))
    return pieces
