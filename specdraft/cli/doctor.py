"""``specdraft doctor``: checks target, data, masks and head of a run before it starts; writes nothing of the run."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdraft.cli.plan import job_of, write_json, write_text
from specdraft.config.doctor import STDOUT, DoctorRun

if TYPE_CHECKING:
    from rich.console import Console

    from specdraft.data.sources import Conversation
    from specdraft.doctor.case import Case
    from specdraft.doctor.findings import Finding
    from specdraft.targets.hf import HFTarget

STYLES = {"ok": "green", "warning": "yellow", "fault": "bold red"}


def run(cfg: DoctorRun) -> None:
    """Prints rendered examples and a table of findings; writes the JSON and the page that are asked for.

    Raises:
        SystemExit: with 1, when a check found a fault.
        ConfigError, DataError, UnsupportedTargetError: what makes a run impossible; see the messages.
    """
    from rich.console import Console

    from specdraft.doctor.findings import all_checks, choose_checks

    if cfg.check == "list":
        for found in all_checks().values():
            sys.stdout.write(f"{found.name:<20}{found.summary}\n")
        return
    # With JSON on stdout, everything for people goes to stderr.
    console = Console(highlight=False, stderr=cfg.json == STDOUT)
    if cfg.check == "lossless":
        conclude(cfg, lossless(cfg), console)
        return
    chosen = choose_checks(cfg.only, cfg.skip)
    with tempfile.TemporaryDirectory() as folder:
        case = make_case(cfg, Path(folder), console)
        show_examples(cfg, case, console)
        findings = examine(case, [found.name for found in chosen], console)
        if cfg.html is not None:
            from specdraft.doctor.page import html_page

            write_text("html", cfg.html, html_page(case, findings))
        conclude(cfg, findings, console, case)


def examine(case: Case, names: Sequence[str], console: Console) -> list[Finding]:
    """Runs the checks; the one that runs is named on a terminal."""
    from specdraft.doctor.findings import all_checks, run_checks

    with console.status("") as status:
        return list(run_checks(case, [all_checks()[name] for name in names], lambda name: status.update(name)))


def make_case(cfg: DoctorRun, folder: Path, console: Console) -> Case:
    """Loads the target, prepares a sample of the sources in ``folder``, and builds the untrained head.

    Raises:
        ConfigError, DataError, UnsupportedTargetError: see the messages.
    """
    from accelerate.utils import set_seed

    from specdraft.cli.answers import answer_writer
    from specdraft.cli.train import build_head
    from specdraft.data.prepare import prepare
    from specdraft.doctor.case import Case
    from specdraft.plan.machines import resident_bytes
    from specdraft.plan.sampling import source_sample
    from specdraft.targets.hf import load_target

    resident = resident_bytes()
    target = load_target(cfg.target)
    conversations = source_sample(cfg.data, cfg.rows).conversations
    path = folder / "sample.jsonl"
    path.write_text(
        "".join(json.dumps(sample_row(one, cfg.data.regenerate)) + "\n" for one in conversations), encoding="utf-8"
    )
    sample = replace(cfg.data, sources=[str(path)], weights=None, limit=None, streaming=False)
    data = prepare(sample, target, folder / "data", make_writer=answer_writer(cfg, target))
    set_seed(cfg.seed)
    return Case(
        job=job_of(cfg),
        target=target,
        rows=data.rows(range(len(data))),
        conversations=conversations,
        dropped=dict(data.manifest["dropped"]),
        head=build_head(cfg, target, data, console),
        scratch=folder,
        seed=cfg.seed,
        resident=resident,
        overfit_steps=cfg.overfit_steps,
        overfit_seconds=cfg.overfit_seconds,
    )


def sample_row(conversation: Conversation, regenerate: bool) -> dict[str, Any]:
    """A conversation as a source holds it. What stands in the place of answers yet to be written is never used."""
    written: list[dict[str, Any]] = []
    for message in conversation.messages:
        if message["content"] is None and not regenerate:
            break
        written.append({**message, "content": message["content"] or "-"})
    return {"id": conversation.id, "category": conversation.category, "messages": written}


def lossless(cfg: DoctorRun) -> list[Finding]:
    """The target and that drafts leave its text alone."""
    from specdraft.cli.lossless import lossless_checks
    from specdraft.heads.storage import read_adapter, resolve_head
    from specdraft.targets.hf import load_target

    adapter = None if cfg.trained is None else read_adapter(resolve_head(cfg.trained))
    target = load_target(cfg.target, adapter)
    return [target_finding(target), *lossless_checks(cfg, target)]


def target_finding(target: HFTarget) -> Finding:
    """What was loaded. That its features and cached forwards are right was checked while loading."""
    from specdraft.doctor.findings import Finding
    from specdraft.eval.drift import LOSSY_TARGET

    spec = target.spec
    detail = (
        f"{spec.name} ({spec.model_type}): {spec.num_hidden_layers} layers of {spec.hidden_size}, {spec.vocab_size:,} "
        f"tokens, context {spec.max_position_embeddings:,}, {str(target.dtype).removeprefix('torch.')} on "
        f"{target.device}; features, logits and cached tree forwards agree with the model's own"
    )
    if target.adapted:
        return Finding("target", "warning", f"{detail}; {LOSSY_TARGET}")
    return Finding("target", "ok", detail)


def conclude(cfg: DoctorRun, findings: Sequence[Finding], console: Console, case: Case | None = None) -> None:
    """Prints the table and the JSON; leaves with 1 when a check found a fault."""
    show_findings(findings, console)
    if cfg.json is not None:
        if case is None:
            write_json(cfg.json, {"schema": 1, "findings": [asdict(found) for found in findings]})
        else:
            from specdraft.doctor.page import as_dict

            write_json(cfg.json, as_dict(case, findings))
    if any(found.verdict == "fault" for found in findings):
        raise SystemExit(1)


def show_examples(cfg: DoctorRun, case: Case, console: Console) -> None:
    """Rows as the target sees them, with what the head learns from coloured."""
    from specdraft.data.preview import CONTEXT_STYLE, SUPERVISED_STYLE, render_preview

    for index, row in enumerate(case.rows[: cfg.examples]):
        supervised = sum(row.loss_mask)
        console.print(
            f"row {index}: {len(row.input_ids)} tokens, [{SUPERVISED_STYLE}]{supervised} supervised[/], "
            f"[{CONTEXT_STYLE}]{len(row.input_ids) - supervised} context[/]"
        )
        console.print(render_preview(row, case.tokenizer), soft_wrap=True)
        console.print()


def show_findings(findings: Sequence[Finding], console: Console) -> None:
    """One line each, the verdict first; what to do stands below."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False)
    for found in findings:
        detail = Text(found.evidence)
        if found.fix:
            detail.append(f"\n-> {found.fix}", style="bold")
        table.add_row(Text(found.verdict, STYLES[found.verdict]), Text(found.name), detail)
    console.print(table)
