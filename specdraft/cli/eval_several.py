"""``specdraft eval`` of several: heads and other proposers on the same prompts, in one table and one file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdraft.config.schema import EvalRun
from specdraft.config.store import to_proposer
from specdraft.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specdraft.decode._proposer_config import ProposerConfig
    from specdraft.eval.subjects import Subject
    from specdraft.heads.base import DraftHead
    from specdraft.targets.hf import HFTarget

DEFAULT_OUTPUT = "comparison.json"


def run(cfg: EvalRun) -> None:
    """Measures one after the other, each in turns with plain decoding, and writes ``comparison.json``.

    The file holds ``{"schema": 1, "results": [...]}``, where each result is what ``results.json`` of one is.

    Raises:
        ConfigError, CheckpointError, DataError, UnsupportedTargetError: see the messages; nothing is written then.
    """
    from specdraft.cli.trained import target_of_head
    from specdraft.decode.methods import make_proposer
    from specdraft.eval.acceptance import SCHEMA, evaluate
    from specdraft.eval.prompts import load_sets
    from specdraft.eval.report import comparison_table, print_notes, report_console, write_results
    from specdraft.heads.storage import read_head_config, resolve_head
    from specdraft.targets.hf import load_target

    proposers = [to_proposer(entry) for entry in cfg.proposers]
    output = Path(cfg.output or DEFAULT_OUTPUT)
    if output.is_dir():
        raise ConfigError(f"output: is a folder, got {output}; give a file such as {output / DEFAULT_OUTPUT}")
    folders = [resolve_head(path, None) for path in cfg.heads]
    for path, folder in zip(cfg.heads, folders, strict=True):
        if "adapter" in read_head_config(folder):
            raise ConfigError(f"heads: a head with an adapter changes the target of all, got {path}; measure it alone")
    prompt_sets = load_sets(cfg.eval.prompts, cfg.eval.limit, cfg.eval.seed)
    measured = replace(cfg.target, dtype=cfg.eval.dtype or cfg.target.dtype)
    target = load_target(target_of_head(measured, read_head_config(folders[0])) if folders else measured)
    console = report_console()
    results: list[dict[str, Any]] = []
    # What does not fit is found before anything is measured, and let go of until it is its turn.
    for proposer in proposers:
        make_proposer(proposer, target)
    for folder in folders:
        _load(cfg, target, folder)
    for name, subject, note in _subjects(cfg, target, proposers, folders):
        console.print(f"measuring {name}{f' ({note})' if note else ''}", markup=False)
        found = evaluate(target, subject, prompt_sets, cfg.decode, cfg.eval, cfg.sampling, console)
        results.append({"name": name, **found})
    write_results({"schema": SCHEMA, "results": results}, output)
    for set_name in prompt_sets:
        console.print()
        console.print(set_name, style="bold", markup=False)
        console.print(comparison_table(results, console, set_name))
        for one in results:
            print_notes(f"{one['name']}, {set_name}", one["sets"][set_name], console)
    console.print(f"results: {output}", markup=False)


def _load(cfg: EvalRun, target: HFTarget, folder: Path) -> DraftHead:
    """A head that fits the target and can draft the shape that was asked for."""
    from specdraft.decode.proposers import check_shape, draft_tree, head_dtype
    from specdraft.heads.storage import check_head_matches, load_head

    head = load_head(folder, device=target.device, dtype=head_dtype(cfg.decode, target))
    check_head_matches(head, target.spec)
    check_shape(head, draft_tree(cfg.decode, head.config.num_draft_tokens))
    return head


def _subjects(
    cfg: EvalRun, target: HFTarget, proposers: list[ProposerConfig], folders: list[Path]
) -> Iterator[tuple[str, Subject, str | None]]:
    """What is measured: a name, the subject, made when it is its turn, and a note on the shape a head was tuned to."""
    from specdraft.core.files import file_sha256
    from specdraft.eval.subjects import head_subject, method_subject
    from specdraft.eval.tuned import machine, with_tuned_shape
    from specdraft.heads.storage import WEIGHTS_NAME, read_head_config

    seen: dict[str, int] = {}

    def distinct(name: str) -> str:
        seen[name] = seen.get(name, 0) + 1
        return name if seen[name] == 1 else f"{name} ({seen[name]})"

    for config, entry in zip(proposers, cfg.proposers, strict=True):
        changed = [f"{key}={value}" for key, value in entry.items() if key != "kind"] if isinstance(entry, dict) else []
        yield distinct(" ".join([config.kind, *changed])), method_subject(target, config), None
    kinds = [read_head_config(folder)["kind"] for folder in folders]
    for path, folder, kind in zip(cfg.heads, folders, kinds, strict=True):
        head = _load(cfg, target, folder)
        tuned = with_tuned_shape(
            folder,
            cfg.decode,
            machine(target.device, target.dtype, head.dtype),
            cfg.sampling.verifier == "block",
            cfg.eval.batch_size,
        )
        note = f"{tuned.note}; measured is the head's own chain" if tuned.plain else tuned.note
        subject = head_subject(target, head, tuned.decode, file_sha256(folder / WEIGHTS_NAME))
        yield distinct(kind if kinds.count(kind) == 1 else f"{kind} {path}"), subject, note
