"""A head written in one format or several: built beside its place, read back, compared with the head, then put there."""

from __future__ import annotations

import copy
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from safetensors import SafetensorError

from specdraft.core.errors import ExportError, SpecDraftError
from specdraft.core.files import sync, write_json
from specdraft.export._config import ExportConfig
from specdraft.export.card import CARD_NAME, check_card, hub_id, model_card, portable
from specdraft.export.engines.checking import check_in_engine, unavailable
from specdraft.export.formats.hf import FILES, MARK
from specdraft.export.hub import Repository
from specdraft.export.material import MAIN, Material, Place
from specdraft.export.probe import ROUNDED, TOLERANCE, compare, draft, make_world
from specdraft.export.registry import Format, choose
from specdraft.export.serve import serve_text
from specdraft.export.sidecar import SIDECAR, read_sidecar, sidecar
from specdraft.heads.base import DraftHead
from specdraft.heads.storage import read_head_config, resolve_head

SERVE_NAME = "SERVE.md"


@dataclass(frozen=True)
class Export:
    """One export. folder: None on a dry run. sizes: bytes by file name. card: its text. url: of the commit."""

    format: str
    folder: Path | None
    sizes: dict[str, int]
    card: str
    url: str | None = None


@dataclass(frozen=True)
class Source:
    """Where the head and its target are. target: folder or Hub id; None = as the head recorded it."""

    head: str | Path
    revision: str | None = None
    target: str | None = None
    target_revision: str | None = None


def export_head(
    source: Source, config: ExportConfig, *, endpoint: str | None = None, console: Console | None = None
) -> list[Export]:
    """Writes a head in every format asked for and, with ``config.push_to``, uploads what was written.

    A folder is complete and was verified before it gets its name, and before anything is uploaded; until then an earlier
    export keeps it.

    Args:
        source: the head and its target.
        config: formats and destination; with ``dry_run`` nothing is written or sent.
        endpoint: of the Hub; None = the library's own.
        console: where is told what was left out, and on a dry run what would go.

    Raises:
        CheckpointError: no head there, or a torn one.
        ConfigError, UnsupportedTargetError: the target cannot be had.
        ExportError: a format cannot carry the head, the results belong to other weights, the folder is occupied or
            cannot be written, the export read back differs, or the upload failed; then the folders are whole.
    """
    console = console or Console()
    folder = resolve_head(source.head, source.revision)
    if "adapter" in read_head_config(folder):
        raise ExportError(
            f"head: drafts for a target with an adapter merged in, which no format carries, got {source.head}; "
            "export a head of the original target"
        )
    material = Material(folder, source.target, source.target_revision, config.push_to, config.license)
    material.target_gguf = config.target_gguf
    formats, left_out = choose(config.format, material)
    if config.target_gguf and "gguf" not in [format.name for format in formats]:
        reason = left_out.get("gguf", f"it has no place for {material.kind} heads")
        raise ExportError(f"export.target_gguf: needs format gguf, got a head without: {reason}; leave it out")
    for name, reason in left_out.items():
        console.print(f"left out: {name}: {reason}", markup=False, soft_wrap=True)
    if config.verify == "engine" and config.format != ["all"]:
        for format in formats:
            if (missing := _no_engine(material, format, config)) is not None:
                raise ExportError(f"export.verify: {missing}")
    alone = config.format != ["all"] and len(formats) == 1
    outputs = [output_folder(source.head, folder, config, format, alone=alone) for format in formats]
    exports = []
    for format, output in zip(formats, outputs, strict=True):
        material.place = place_of(format.name, config, alone=alone)
        exports.append(_export(material, format, output, config, console))
    if config.push_to is None or config.dry_run:
        return exports
    return _upload(exports, config.push_to, config, endpoint, alone=alone)


def place_of(name: str, config: ExportConfig, *, alone: bool) -> Place:
    """Where an export of format ``name`` goes: one alone and our own to the root, unless each has a branch."""
    if config.layout == "branches":
        return Place(MAIN if name == "hf" else name)
    return Place(config.revision or MAIN, "" if alone or name == "hf" else name)


def _upload(
    exports: list[Export], repo_id: str, config: ExportConfig, endpoint: str | None, *, alone: bool
) -> list[Export]:
    """Sends every export to its place, once it is known that all may be written."""
    places = [place_of(export.format, config, alone=alone) for export in exports]
    repository = Repository(
        repo_id, endpoint, f"the export is whole in {', '.join(str(export.folder) for export in exports)}"
    )
    repository.open(config.private, [place.branch for place in places])
    sent = []
    for export, place in zip(exports, places, strict=True):
        assert export.folder is not None
        sent.append(replace(export, url=repository.upload(export.folder, list(export.sizes), place)))
    return sent


def _export(material: Material, format: Format, output: Path, config: ExportConfig, console: Console) -> Export:
    """Builds, verifies and places one export."""
    with _scratch(output, config.dry_run) as scratch:
        card = build(material, format, scratch, output.name)
        if config.verify == "engine":
            _check_in_engine(material, format, scratch, config, console)
        sizes = {path.name: path.stat().st_size for path in sorted(scratch.iterdir())}
        if config.dry_run:
            _print_plan(material, config, output, sizes, card, console)
            return Export(format.name, None, sizes, card)
        _put_in_place(scratch, output)
    return Export(format.name, output, sizes, card)


def _check_in_engine(material: Material, format: Format, folder: Path, config: ExportConfig, console: Console) -> None:
    """Runs the export in its engine, or says why not where that was not asked for by the format's name."""
    reason = _no_engine(material, format, config)
    if reason is not None:
        console.print(f"not run in an engine: {format.name}: {reason}", markup=False, soft_wrap=True)
        return
    head = copy.deepcopy(_reference(material, format.widens and material.head.vocab is not None))
    found = check_in_engine(material, format.name, folder, head.eval().requires_grad_(False), config.engines)
    console.print(f"run in {found.line()}", markup=False, soft_wrap=True)


def _no_engine(material: Material, format: Format, config: ExportConfig) -> str | None:
    """Why the export is not run in an engine; None = it can be."""
    if material.kind == "peagle":
        return "drafts in one pass are held against the files alone; use verify=files"
    return unavailable(format.name, config.engines)


def build(material: Material, format: Format, scratch: Path, name: str) -> str:
    """Fills ``scratch``, which will be called ``name``, verifies what is in it, and returns the card."""
    where = f"./{name}" if material.in_subfolder or material.repo_id is None else material.repo_id
    engines = format.engines(material, where)
    serve = serve_text(material, format.name, engines, where, format.widens) if engines else None
    card = str(
        model_card(
            material.head,
            portable(material.record),
            material.results,
            base_model=hub_id(material.record["target"]["name"]),
            repo_id=material.repo_id,
            license=material.published_license,
            revision=material.branch,
            serve=None
            if serve is None
            else f"Written as `{format.name}`; `{SERVE_NAME}` has a command for each engine.",
        )
    )
    check_card(card, hub_id(material.record["target"]["name"]), material.published_license)
    try:
        format.write(material, scratch)
        if serve is not None:
            (scratch / SERVE_NAME).write_text(serve, encoding="utf-8")
            files = [*(path.name for path in scratch.iterdir()), CARD_NAME, SIDECAR]
            write_json(scratch / SIDECAR, sidecar(material, format, files))
        (scratch / CARD_NAME).write_text(card, encoding="utf-8")
        for path in scratch.iterdir():
            path.chmod(0o644)
            sync(path)
    except OSError as error:
        raise _cannot_write(scratch, error) from error
    verify(material, format, scratch)
    return card


def verify(material: Material, format: Format, folder: Path) -> None:
    """Reads an export back without our classes, as each engine would, and compares its drafts with the head's.

    Raises:
        ExportError: a tensor is missing, too many, not the target's where it should be, or the drafts differ.
    """
    if format.is_ours:
        return
    is_widened = format.widens and material.head.vocab is not None
    spec = material.spec
    world = make_world(material.target, spec.num_hidden_layers, spec.vocab_size)
    drafts = material.drafts.get(is_widened) or draft(_reference(material, is_widened), world)
    material.drafts[is_widened] = drafts
    # From here on the files are looked at; head and files need not be in memory together.
    material.release()
    try:
        readings = format.readings(folder, material)
    except (OSError, ValueError, KeyError, SafetensorError, struct.error) as error:
        if isinstance(error, SpecDraftError):
            raise
        raise ExportError(
            f"export.format: the export cannot be read back as {format.name}, got {error!r}; nothing was written, report this"
        ) from error
    tolerance = ROUNDED[material.dtype] if format.rounds else TOLERANCE
    for reading in readings:
        try:
            compare(drafts, reading, world, tolerance)
        except (RuntimeError, KeyError, IndexError) as error:
            raise ExportError(
                f"export.format: {reading.engine} could not run the export, got {error!r}; nothing was written, report this"
            ) from error


def _reference(material: Material, is_widened: bool) -> DraftHead:
    """The head in float32, over its own vocabulary or the whole one."""
    head = material.head
    if is_widened:
        config = replace(head.config, draft_vocab_size=None)
    elif material.dtype is torch.float32:
        return head
    else:
        config = head.config
    copy = config.build(head.spec)
    kept = {
        name: value.float() if value.is_floating_point() else value
        for name, value in material.tensors.items()
        if config.draft_vocab_size or not name.startswith("vocab.")
    }
    copy.load_state_dict(kept, assign=True)
    return copy.eval().requires_grad_(False)


def output_folder(source: str | Path, folder: Path, config: ExportConfig, format: Format, *, alone: bool) -> Path:
    """The folder that is written, checked to be free: absent, empty, or an earlier export.

    Raises:
        ExportError: it holds anything else, such as the head itself.
    """
    beside = folder.absolute().parent if Path(source).exists() else Path()
    output = beside / f"export-{format.name}"
    if config.output is not None:
        output = Path(config.output).expanduser() / ("" if alone else format.name)
    if not output.exists():
        return output
    names = {path.name for path in output.iterdir()} if output.is_dir() else {output.name}
    if not output.is_dir() or (names and not names <= _earlier(output)):
        raise ExportError(
            f"export.output: is occupied by something other than an earlier export, got {output}; choose another folder"
        )
    return output


def _earlier(folder: Path) -> set[str]:
    """The files of an earlier export, which a new one may replace; empty = none is there."""
    try:
        record = read_sidecar(folder)
        if record is not None:
            return set(record.get("files", []))
        return set(FILES) if MARK in read_head_config(folder) else set()
    except SpecDraftError:
        return set()


@contextmanager
def _scratch(output: Path, dry_run: bool) -> Iterator[Path]:
    """A folder to build in: beside the output, so that a rename puts it in place; elsewhere on a dry run."""
    try:
        if not dry_run:
            output.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=None if dry_run else output.parent))
    except OSError as error:
        raise _cannot_write(output, error) from error
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _cannot_write(output: Path, error: OSError) -> ExportError:
    return ExportError(f"export.output: cannot be written, got {output} ({error}); free space or choose another folder")


def _put_in_place(scratch: Path, output: Path) -> None:
    """Gives the finished folder its name; an earlier export is moved aside first and removed after."""
    old = output.with_name(f".{output.name}-old")
    try:
        scratch.chmod(0o755)
        shutil.rmtree(old, ignore_errors=True)
        if output.exists():
            output.rename(old)
        scratch.rename(output)
    except OSError as error:
        raise _cannot_write(output, error) from error
    shutil.rmtree(old, ignore_errors=True)


def _print_plan(
    material: Material, config: ExportConfig, output: Path, sizes: dict[str, int], card: str, console: Console
) -> None:
    """What a run without ``dry_run`` would write and send."""
    console.print(f"would write {output}", markup=False)
    for name, size in sizes.items():
        console.print(f"  {name:<20} {size:>14,} bytes", markup=False, highlight=False)
    if config.push_to is not None:
        kind = "private" if config.private else "public"
        branch = f" on branch {material.branch}" if material.branch else ""
        console.print(
            f"would upload these files to {config.push_to}{branch} ({kind} if it has to be made)", markup=False
        )
    console.print(f"model card:\n\n{card}", markup=False, highlight=False, soft_wrap=True)
