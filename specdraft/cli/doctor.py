"""``specdraft doctor``: checks target, template, masks and head on real rows before a long run; writes nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specdraft.config.schema import DoctorRun

if TYPE_CHECKING:
    from rich.console import Console

    from specdraft.data.prepared import PreparedData
    from specdraft.data.preview import Check
    from specdraft.targets.hf import HFTarget

STYLES = {"ok": "green", "warning": "yellow", "fault": "bold red"}
CHECK_TOKENS = 16
"""Tokens decoded with and without the head."""


def run(cfg: DoctorRun) -> None:
    """Prints rendered examples and a table of checks.

    Raises:
        SystemExit: with 1, when a check found a fault.
        ConfigError, DataError, UnsupportedTargetError: what makes a run impossible; see the messages.
    """
    from rich.console import Console

    from specdraft.data.prepare import prepare
    from specdraft.heads.storage import read_adapter, resolve_head
    from specdraft.targets.hf import load_target

    console = Console(highlight=False)
    adapter = None if cfg.trained is None else read_adapter(resolve_head(cfg.trained))
    target = load_target(cfg.target, adapter)
    if cfg.check == "lossless":
        from specdraft.cli.lossless import lossless_checks

        conclude([target_check(target), *lossless_checks(cfg, target)], console)
        return
    limit = cfg.rows if cfg.data.limit is None else min(cfg.rows, cfg.data.limit)
    with tempfile.TemporaryDirectory() as folder:
        data = prepare(replace(cfg.data, limit=limit), target, Path(folder))
        show_examples(cfg, target, data, console)
        checks = [target_check(target), *data_checks(cfg, target, data), *head_checks(cfg, target, data, console)]
    conclude(checks, console)


def conclude(checks: Sequence[Check], console: Console) -> None:
    """Prints the table; leaves with 1 when a check found a fault."""
    show_checks(checks, console)
    if any(check.verdict == "fault" for check in checks):
        raise SystemExit(1)


def show_examples(cfg: DoctorRun, target: HFTarget, data: PreparedData, console: Console) -> None:
    """Rows as the target sees them, with what the head learns from coloured."""
    from specdraft.data.preview import CONTEXT_STYLE, SUPERVISED_STYLE, render_preview

    assert target.tokenizer is not None
    for index in range(min(cfg.examples, len(data))):
        row = data.row(index)
        supervised = sum(row.loss_mask)
        console.print(
            f"row {index}: {len(row.input_ids)} tokens, [{SUPERVISED_STYLE}]{supervised} supervised[/], "
            f"[{CONTEXT_STYLE}]{len(row.input_ids) - supervised} context[/]"
        )
        console.print(render_preview(row, target.tokenizer), soft_wrap=True)
        console.print()


def target_check(target: HFTarget) -> Check:
    """What was loaded. That its features and cached forwards are right was checked while loading."""
    from specdraft.data.preview import Check
    from specdraft.eval.drift import LOSSY_TARGET

    spec = target.spec
    detail = (
        f"{spec.name} ({spec.model_type}): {spec.num_hidden_layers} layers of {spec.hidden_size}, {spec.vocab_size:,} "
        f"tokens, context {spec.max_position_embeddings:,}, {str(target.dtype).removeprefix('torch.')} on "
        f"{target.device}; features, logits and cached tree forwards agree with the model's own"
    )
    if target.adapted:
        return Check("target", "warning", f"{detail}; {LOSSY_TARGET}")
    return Check("target", "ok", detail)


def data_checks(cfg: DoctorRun, target: HFTarget, data: PreparedData) -> list[Check]:
    """Masks and markers of the rows, and rows that were dropped."""
    from specdraft.data.chat import ChatRenderer
    from specdraft.data.preview import Check, mask_report

    assert target.tokenizer is not None
    renderer = ChatRenderer(target.tokenizer, system=cfg.data.system, enable_thinking=cfg.data.enable_thinking)
    end_ids = {*target.spec.eos_token_ids, *renderer.end_of_turn_ids}
    checks = mask_report(data.rows(range(len(data))), target.tokenizer, end_ids)
    dropped = data.manifest["dropped"]
    reasons = ", ".join(f"{reason}: {count}" for reason, count in dropped.items())
    return [*checks, Check("dropped rows", "warning" if dropped else "ok", reasons or "none")]


def head_checks(cfg: DoctorRun, target: HFTarget, data: PreparedData, console: Console) -> list[Check]:
    """The untrained head: its size, and that decoding with it leaves the target's text as it is."""
    from specdraft.cli.train import build_head
    from specdraft.data.preview import Check
    from specdraft.decode.engine import SpeculativeDecoder
    from specdraft.decode.proposers import HeadProposer, draft_tree

    head = build_head(cfg, target, data, console).to(dtype=target.dtype).eval()
    size = f"{cfg.head.kind}: {head.num_parameters:,} parameters to train, depth {cfg.head.num_draft_tokens}"
    checks = [Check("head", "ok", size)]
    row = data.row(0)
    prompt = row.input_ids[: max(row.loss_mask.index(True), 1)]
    proposer = HeadProposer(head, target, draft_tree(cfg.decode, cfg.head.num_draft_tokens))
    plain = SpeculativeDecoder(target).generate(prompt, CHECK_TOKENS)
    drafted = SpeculativeDecoder(target, proposer).generate(prompt, CHECK_TOKENS)
    if plain.tokens == drafted.tokens:
        detail = f"{len(plain.tokens)} tokens are the same with and without the untrained head"
        return [*checks, Check("decoding", "ok", detail)]
    # In lower precision a near tie can go either way; in fp32 it would be a fault of ours or of the model's kernels.
    verdict = "fault" if cfg.target.dtype == "float32" else "warning"
    return [*checks, Check("decoding", verdict, f"the untrained head changes the text, in {cfg.target.dtype}")]


def show_checks(checks: Sequence[Check], console: Console) -> None:
    """One line each, the verdict first."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False)
    for check in checks:
        table.add_row(Text(check.verdict, STYLES[check.verdict]), Text(check.name), Text(check.detail))
    console.print(table)
