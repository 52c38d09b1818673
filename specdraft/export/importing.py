"""Other people's heads brought into our own format: recognised, converted, held against their own conventions, saved."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from specdraft.core.errors import CheckpointError, ConfigError, ExportError
from specdraft.export import readers
from specdraft.export.checkpoint import Checkpoint, open_checkpoint
from specdraft.export.formats.hf import MARK
from specdraft.export.imported import Imported, Reader
from specdraft.export.probe import TOLERANCE, compare, draft, make_world
from specdraft.heads.base import DraftHead, head_config
from specdraft.heads.storage import (
    check_head_matches,
    load_head,
    load_tensors,
    read_head_config,
    save_head,
)
from specdraft.targets.weights import TargetFiles

OURS = "specdraft"


@dataclass(frozen=True)
class Brought:
    """What an import did. layout: that was recognised. assumed, warnings: lines for the user."""

    folder: Path
    head: DraftHead
    layout: str
    assumed: list[str]
    warnings: list[str]


@cache
def all_readers() -> list[Reader]:
    """The readers, one file each."""
    names = sorted(module.name for module in pkgutil.iter_modules(readers.__path__))
    return [importlib.import_module(f"{readers.__name__}.{name}").READER for name in names]


def import_head(
    source: str,
    output: Path,
    *,
    revision: str | None = None,
    target: str | None = None,
    target_revision: str | None = None,
    num_draft_tokens: int | None = None,
) -> Brought:
    """Reads a head of another layout (or of ours) and saves it as ``load_head`` reads it.

    Args:
        source: folder or Hub id.
        output: folder that is written.
        revision: of a Hub id.
        target: folder or Hub id of the head's target; None = the one that the head names.
        target_revision: of that.
        num_draft_tokens: depth of drafts; None = as the checkpoint says, else 4.

    Raises:
        CheckpointError: no head, a torn one, one for another target, or one with parts that our heads have not.
        ConfigError: the target is not known, or ``output`` is occupied.
        UnsupportedTargetError: the target cannot be used.
    """
    if output.exists() and not (output.is_dir() and (not any(output.iterdir()) or _is_import(output))):
        raise ConfigError(
            f"output: is occupied by something other than an earlier import, got {output}; choose another"
        )
    checkpoint = open_checkpoint(source, revision)
    if _is_ours(checkpoint.folder):
        return _copy_ours(checkpoint, output, target, target_revision)
    reader = next((one for one in all_readers() if one.matches(checkpoint)), None)
    if reader is None:
        raise checkpoint.error(
            f"is no head of a known layout (first tensor {min(checkpoint.tensors, default='none')})",
            "EAGLE-1, EAGLE-3 and Medusa are read",
        )
    files = find_target(checkpoint, reader, target, target_revision)
    spec = files.spec()
    found = reader.read(checkpoint, files, spec)
    if num_draft_tokens is not None:
        _set_depth(found, num_draft_tokens)
    head = _build(checkpoint, found)
    if found.reading is not None:
        _check(head, found, files)
    record = {"layout": reader.layout, "assumed": found.assumed, "warnings": found.warnings}
    save_head(head, output, {"import": record})
    return Brought(output, head, reader.layout, found.assumed, found.warnings)


def find_target(checkpoint: Checkpoint, reader: Reader, name: str | None, revision: str | None) -> TargetFiles:
    """The files of the target that was given, else of the one that the checkpoint names.

    Raises:
        ConfigError: neither, or what it names is not there.
    """
    record = None if checkpoint.record is None else checkpoint.record["target"]
    named = name or (record["name"] if record else reader.target_of(checkpoint))
    if named is None:
        raise ConfigError(
            f"target: the checkpoint does not name its target, got null for {checkpoint.source}; add target=..."
        )
    if name is None and record is not None and not Path(named).is_dir():
        revision = revision or record["revision"]
    try:
        return TargetFiles(named, revision)
    except ConfigError as error:
        if name is not None:
            raise
        raise ConfigError(
            f"target: the one that the checkpoint names cannot be had, got {named} ({error}); add target=..."
        ) from error


def _set_depth(found: Imported, depth: int) -> None:
    """Another depth for kinds that draft one token after another.

    Raises:
        ConfigError: the kind has one set of weights for each depth.
    """
    if found.kind == "medusa":
        raise ConfigError(
            f"num_draft_tokens: is the number of heads ({found.settings['num_draft_tokens']}), got {depth}; leave it out"
        )
    found.settings["num_draft_tokens"] = depth
    found.assumed[:] = [line for line in found.assumed if not line.startswith("the depth of drafts")]


def _build(checkpoint: Checkpoint, found: Imported) -> DraftHead:
    """The head with its tensors.

    Raises:
        CheckpointError: the settings or the tensors do not make one.
    """
    try:
        head = head_config(found.kind, found.settings).build(found.spec)
    except (ConfigError, TypeError) as error:
        raise checkpoint.error(f"does not make a head of kind {found.kind} ({error})") from error
    load_tensors(head, {name: value.contiguous() for name, value in found.tensors.items()}, checkpoint.source)
    return head.eval().requires_grad_(False)


def _check(head: DraftHead, found: Imported, files: TargetFiles) -> None:
    """Holds the head against the forward that the checkpoint's own conventions mean.

    Raises:
        CheckpointError: they differ.
    """
    assert found.reading is not None
    full = head
    dtype = head.dtype
    if head.vocab is not None and "vocab.d2t" in found.tensors and found.kind == "medusa":
        full = head_config(head.config.kind, {**found.settings, "draft_vocab_size": None}).build(head.spec)
        full.load_state_dict({k: v for k, v in head.state_dict().items() if not k.startswith("vocab.")}, assign=True)
    world = make_world(files, head.spec.num_hidden_layers, head.spec.vocab_size)
    try:
        compare(draft(full.float().eval(), world), found.reading, world, 0.1 if dtype.itemsize < 4 else TOLERANCE)
    except ExportError as error:
        raise CheckpointError(f"source: {str(error).partition(': ')[2]}") from error
    finally:
        head.to(dtype)


def _is_ours(folder: Path) -> bool:
    try:
        read_head_config(folder)
    except CheckpointError:
        return False
    return True


def _copy_ours(checkpoint: Checkpoint, output: Path, target: str | None, revision: str | None) -> Brought:
    """A head in our own format is read strictly and saved as it is, for the target that was given, if one was.

    Raises:
        CheckpointError: the head was trained for another target.
    """
    head = load_head(checkpoint.folder)
    record = {key: value for key, value in read_head_config(checkpoint.folder).items() if key != MARK}
    if target is not None:
        spec = TargetFiles(target, revision).spec()
        check_head_matches(head, spec)
        head.spec = spec
    save_head(head, output, {**record, "import": {"layout": OURS, "assumed": [], "warnings": []}})
    return Brought(output, head, OURS, [], [])


def _is_import(folder: Path) -> bool:
    try:
        return "import" in read_head_config(folder)
    except CheckpointError:
        return False
