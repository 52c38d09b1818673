"""Whether the answers are the target's own: a head learns to predict the target, not another writer."""

from __future__ import annotations

from collections.abc import Iterator

from specdraft.data.own_answers import own_answers
from specdraft.doctor.case import Case
from specdraft.doctor.findings import Finding, check

FAULT_SHARE, WARNING_SHARE = 0.5, 0.05
"""Shares of rows whose answers are not the target's own."""


@check("own answers", 40)
def own(case: Case) -> Iterator[Finding]:
    """The supervised answers are as likely under the target as what it writes itself."""
    places = [place for place, row in enumerate(case.rows) if any(row.loss_mask[1:])]
    if not places:
        yield Finding("own answers", "fault", "no row has a supervised token", "see the check masks")
        return
    data = case.job.data
    found = own_answers(
        case.target, [case.rows[place] for place in places], max(data.temperature, *data.answers.temperatures, 1.0)
    )
    case.notes["row_scores"] = dict(zip(places, found.mean_logprobs, strict=True))
    suspects = tuple(places[place] for place in found.suspects)
    numbers = found.as_dict()
    text = (
        f"mean log-probability {numbers['mean_logprob']:.2f} nats a token, {len(suspects)} of {len(places)} rows are less "
        "likely than the target's own writing"
    )
    if found.share_suspect <= WARNING_SHARE:
        yield Finding("own answers", "ok", text, "", numbers, suspects)
        return
    fix = "use data.regenerate=true, so that the target answers itself"
    if data.regenerate:
        fix = (
            "the kept answers are of another model or revision: remove the folder of answers and prepare the data again"
        )
    verdict = "fault" if found.share_suspect > FAULT_SHARE else "warning"
    yield Finding("own answers", verdict, f"{text}; heads accept less on answers of others", fix, numbers, suspects)
