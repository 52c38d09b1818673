"""What the figures of greedy identity and of chi-square tests mean."""

from __future__ import annotations

from specdraft.eval.lossless import ChiSquare, GreedyIdentity

LEAST_PVALUE = 1e-3
"""Below it, chance does not explain the difference of two laws."""
NEAR_TIE = {"float32": 1e-2, "float16": 0.1, "bfloat16": 0.5}
"""By dtype: two best logits that are no further apart may change places when the same numbers are added in another order."""
SHOWN_DIFFERENCES = 5


def greedy_verdict(found: GreedyIdentity, near_tie: float) -> tuple[str, str]:
    """Verdict and detail of the greedy check. near_tie: distance of two logits that rounding explains."""
    text = f"{found.identical} of {found.num_prompts} answers are those of transformers"
    worst = found.worst()
    if worst is not None:
        shown = sorted(found.differences, key=lambda one: -one.margin)[:SHOWN_DIFFERENCES]
        places = ", ".join(f"prompt {one.prompt} from token {one.place} ({one.margin:.2e})" for one in shown)
        rest = len(found.differences) - len(shown)
        text += f"; first differences, with the distance of the two best logits there: {places}"
        text += f" and {rest} more" if rest else ""
        if worst.margin > near_tie:
            return "fault", f"{text}; above {near_tie:g} no near tie explains it"
        return "warning", f"{text}; up to {near_tie:g} they are near ties, which rounding decides"
    if not found.accepted:
        return "warning", f"{text}, but no draft was accepted, which shows little; name a trained head"
    return "ok", f"{text}, with {found.accepted} drafted tokens accepted"


def sampling_verdict(found: ChiSquare) -> tuple[str, str]:
    """Verdict and detail of a chi-square test."""
    text = (
        f"{found.samples} answers at temperature 1, top_p 0.9: chi-square {found.statistic:.1f} over {found.cells} cells, "
        f"p = {found.pvalue:.3f}, {found.accepted} drafted tokens accepted"
    )
    if found.pvalue < LEAST_PVALUE:
        return "fault", f"{text}; the law of the text is not the target's"
    return ("ok", text) if found.accepted and found.cells > 1 else ("warning", f"{text}; too few to show anything")
