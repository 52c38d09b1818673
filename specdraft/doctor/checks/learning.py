"""Whether the head can learn at all: one text by heart, decoded again, exported and read back, and left unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from specdraft.core.errors import SpecDraftError
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.proposers import HeadProposer, draft_tree
from specdraft.doctor.case import Case
from specdraft.doctor.findings import Finding, check
from specdraft.doctor.overfit import KNOWN, MARGIN, Overfit
from specdraft.doctor.verdicts import NEAR_TIE, greedy_verdict
from specdraft.eval.lossless import check_greedy, greedy_texts
from specdraft.export._config import ExportConfig
from specdraft.export.exporting import Source, export_head
from specdraft.export.material import Material
from specdraft.export.registry import choose
from specdraft.heads.storage import save_head

GREEDY_PROMPTS, GREEDY_TOKENS = 3, 24


@check("trained parameters", 60)
def trained_parameters(case: Case) -> Iterator[Finding]:
    """All parameters of the head are trained, none of the target's."""
    frozen = [name for name, parameter in case.head.named_parameters() if not parameter.requires_grad]
    loose = sum(parameter.numel() for parameter in case.target.model.parameters() if parameter.requires_grad)
    if frozen:
        yield Finding(
            "trained parameters",
            "fault",
            f"{len(frozen)} parameters of the head are frozen, first {frozen[0]}: they keep their random values",
            "do not freeze the head: requires_grad must be true for all of its parameters",
            {"frozen": frozen},
        )
    elif loose:
        yield Finding(
            "trained parameters",
            "fault",
            f"{loose:,} parameters of the target would be trained",
            "freeze the target: target.model.requires_grad_(False)",
        )
    else:
        yield Finding(
            "trained parameters",
            "ok",
            f"{case.head.config.kind}: {case.head.num_parameters:,} parameters to train, depth "
            f"{case.head.config.num_draft_tokens}; the target is frozen",
        )


@check("overfit", 61)
def overfit(case: Case) -> Iterator[Finding]:
    """The head learns one text of the target by heart, and decoding that text accepts nearly every draft."""
    found = case.overfitted
    length, best = found.acceptance.acceptance_length, found.best
    numbers = {
        "acceptance_length": length,
        "best": best,
        "agreement": found.agreement,
        "steps": found.steps,
        "seconds": found.seconds,
        "first_loss": found.losses[0],
        "last_loss": found.losses[1],
    }
    text = (
        f"after {found.steps} steps on one text, loss {found.losses[0]:.2f} to {found.losses[1]:.2f}, it drafts "
        f"{found.agreement:.0%} of the tokens at its worst depth; decoding the text accepts {length:.2f} of {best:.2f}"
    )
    yield _overfit_finding(found, length, best, text, numbers)
    if found.steps and found.untouched:
        yield Finding(
            "gradients",
            "warning",
            f"{len(found.untouched)} parameters did not change, first {found.untouched[0]}",
            "a part of the head that no loss reaches: check loss.terms",
            {"untouched": found.untouched},
        )


def _overfit_finding(found: Overfit, length: float, best: float, text: str, numbers: dict[str, float]) -> Finding:
    if length >= MARGIN * best:
        return Finding("overfit", "ok", text, "", numbers)
    if found.agreement >= KNOWN - 0.05:
        fix = "what is trained is not what is decoded: an offset, a position or a state differs; report this head"
        return Finding("overfit", "fault", f"{text}: learned and yet not accepted", fix, numbers)
    learns = found.losses[1] < 0.7 * found.losses[0] and length > 0.5 * best
    fix = "raise optim.lr, or overfit_steps and overfit_seconds if the loss was still falling"
    if learns:
        return Finding("overfit", "warning", f"{text}: it learns, and was not done in time", fix, numbers)
    return Finding(
        "overfit", "fault", f"{text}: it does not learn", f"{fix}; a head that is frozen learns nothing", numbers
    )


@check("export", 62)
def export(case: Case) -> Iterator[Finding]:
    """The head is exported in every format that carries it, read back as engines do, and drafts the same tokens."""
    folder = save_head(case.overfitted.head, case.scratch / "head")
    name, revision = case.job.target.name, case.job.target.revision
    material = Material(folder, name, revision)
    formats, _ = choose(["all"], material)
    done, failed = [], []
    for format in formats:
        output = case.scratch / "exports" / format.name
        try:
            export_head(
                Source(folder, None, name, revision),
                ExportConfig(format=[format.name], output=str(output)),
                console=Console(quiet=True),
            )
            done.append(format.name)
        except SpecDraftError as error:
            failed.append(f"{format.name}: {error}")
        _remove(output)
    if failed:
        yield Finding(
            "export",
            "fault",
            f"{len(failed)} of {len(formats)} formats: {'; '.join(failed)}",
            "an engine would draft other tokens than were trained: use another format, and report this",
            {"failed": failed, "done": done},
        )
    else:
        yield Finding(
            "export", "ok", f"{', '.join(done)}: read back, the drafts are those of the head", "", {"done": done}
        )


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


@check("greedy identity", 63)
def greedy_identity(case: Case) -> Iterator[Finding]:
    """Greedy text with drafts is that of transformers' generate(); in low precision up to near ties."""
    head, target = case.overfitted.head, case.target
    config = head.config
    copy = config.build(head.spec).to(device=target.device, dtype=target.dtype)
    copy.load_state_dict(head.state_dict())
    tree = draft_tree(case.job.decode, config.num_draft_tokens)
    decoder = SpeculativeDecoder(target, HeadProposer(copy.eval().requires_grad_(False), target, tree))
    prompts = [case.overfitted.prompt, *(case.prompt_of(row) for row in case.rows[1:GREEDY_PROMPTS])]
    answers = greedy_texts(target, prompts, GREEDY_TOKENS)
    near_tie = NEAR_TIE[str(target.dtype).removeprefix("torch.")]
    found = check_greedy(decoder, prompts, answers)
    verdict, text = greedy_verdict(found, near_tie)
    fix = {
        "fault": "the drafts change the text: do not use this target with these settings, and report this",
        "warning": "measure in eval.dtype=float32, where the text must be the same",
        "ok": "",
    }[verdict]
    worst = found.worst()
    numbers: dict[str, float] = {"identical": found.identical, "prompts": found.num_prompts, "accepted": found.accepted}
    if worst is not None:
        numbers["worst_margin"] = worst.margin
    if verdict == "warning" and worst is None:
        fix = "see the check overfit"
    yield Finding("greedy identity", verdict, text, fix, numbers)
