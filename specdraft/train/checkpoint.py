"""Step checkpoints: all that an exact resume needs, written atomically and checked when read."""

from __future__ import annotations

import json
import logging
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdraft.core.errors import CheckpointError
from specdraft.core.files import file_sha256, replacing, sync
from specdraft.heads.base import DraftHead
from specdraft.heads.storage import ADAPTER_NAME, load_tensors
from specdraft.targets.lora import LoraAdapter
from specdraft.train.state import TrainState, set_rng_state

FORMAT = 1
HEAD_NAME, AVERAGE_NAME, OPTIMIZER_NAME, RNG_NAME, STATE_NAME = (
    "head.safetensors",
    "average.safetensors",
    "optimizer.safetensors",
    "rng.json",
    "state.json",
)
_FOLDER = re.compile(r"step-(\d{6,})")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """What a step checkpoint holds.

    head: the head's ``state_dict``. optimizer: ``<parameter name>:<state name>`` -> tensor, so that a
    parameter added or frozen later does not shift the others. rng: ``rng_state()`` of every rank. run: what
    must be the same for the data position to mean the same. scaler: the fp16 loss scaler's state, else empty.
    average: the average of the weights by parameter name, None where they are not averaged. adapter: the tensors of an
    adapter that is trained in the target, None without one.
    settings: of the whole run, to tell what a resumed run does otherwise.
    """

    state: TrainState
    head: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    rng: list[dict[str, Any]]
    run: dict[str, Any]
    scaler: dict[str, Any]
    average: dict[str, Tensor] | None = None
    adapter: dict[str, Tensor] | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Writes ``folder/step-<step>``, then removes all but the newest ``keep`` checkpoints.

    Raises:
        CheckpointError: it cannot be written; what was there is untouched and nothing half-written stays.
    """
    final = folder / f"step-{checkpoint.state.step:06d}"
    temporary = folder / f".{final.name}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".step-*"):
            shutil.rmtree(leftover)
        temporary.mkdir()
        try:
            _write(temporary, checkpoint)
            _replace(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        for old in list_checkpoints(folder)[keep:]:
            shutil.rmtree(old)
    except (OSError, SafetensorError) as error:
        last = next(iter(list_checkpoints(folder)), None)
        raise CheckpointError(
            f"output_dir: the checkpoint of step {checkpoint.state.step} could not be saved, got {error}; "
            f"free space or choose another output_dir, the last complete checkpoint is {last or 'none'}"
        ) from error
    return final


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    """All files, synced; state.json comes last and holds the others' checksums."""
    save_file(checkpoint.head, folder / HEAD_NAME)
    save_file(checkpoint.optimizer, folder / OPTIMIZER_NAME)
    if checkpoint.average is not None:
        save_file(checkpoint.average, folder / AVERAGE_NAME)
    if checkpoint.adapter is not None:
        save_file(checkpoint.adapter, folder / ADAPTER_NAME)
    (folder / RNG_NAME).write_text(json.dumps(checkpoint.rng))
    record = {
        "format": FORMAT,
        "state": asdict(checkpoint.state),
        "run": checkpoint.run,
        "scaler": checkpoint.scaler,
        "settings": checkpoint.settings,
        "sha256": {path.name: file_sha256(path) for path in sorted(folder.iterdir())},
    }
    (folder / STATE_NAME).write_text(json.dumps(record, indent=2) + "\n")
    for path in (*folder.iterdir(), folder):
        sync(path)


def update_state(folder: Path, state: TrainState) -> None:
    """Notes counters that changed after the checkpoint of this step was written, if there is one.

    Raises:
        CheckpointError: the file cannot be replaced.
    """
    path = folder / f"step-{state.step:06d}" / STATE_NAME
    if not path.exists():
        return
    try:
        record = json.loads(path.read_text())
        with replacing(path) as file:
            file.write(json.dumps({**record, "state": asdict(state)}, indent=2).encode() + b"\n")
    except OSError as error:
        raise CheckpointError(f"output_dir: {path} could not be updated, got {error}; free space") from error


def _replace(temporary: Path, final: Path) -> None:
    """Renames into place; a checkpoint of the same step (torn, so passed over) is moved away first."""
    if final.exists():
        old = final.with_name(f".{final.name}.old")
        final.rename(old)
        temporary.rename(final)
        shutil.rmtree(old)
    else:
        temporary.rename(final)
    sync(final.parent)


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in ``folder``, the newest step first."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _FOLDER.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in the folder ``path``.

    Raises:
        CheckpointError: a file is missing, torn or altered, or the format is another one.
    """
    try:
        record = json.loads((path / STATE_NAME).read_text())
        if record["format"] != FORMAT:
            raise CheckpointError(
                f"resume: a checkpoint of format {FORMAT} is needed, got {record['format']} in {path}"
            )
        for name, digest in record["sha256"].items():
            if file_sha256(path / name) != digest:
                raise CheckpointError(f"resume: the checksum of {name} is wrong, got a torn or altered file in {path}")
        return Checkpoint(
            state=TrainState(**record["state"]),
            head=load_file(path / HEAD_NAME),
            optimizer=load_file(path / OPTIMIZER_NAME),
            rng=json.loads((path / RNG_NAME).read_text()),
            run=record["run"],
            scaler=record["scaler"],
            average=load_file(path / AVERAGE_NAME) if AVERAGE_NAME in record["sha256"] else None,
            adapter=load_file(path / ADAPTER_NAME) if ADAPTER_NAME in record["sha256"] else None,
            settings=record.get("settings", {}),
        )
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"resume: the checkpoint cannot be read, got {path} ({error})") from error


def newest_settings(folder: Path) -> dict[str, Any]:
    """Settings of the run that wrote the newest checkpoint in ``folder``; empty where none can be read."""
    for path in list_checkpoints(folder):
        try:
            settings: dict[str, Any] = json.loads((path / STATE_NAME).read_text())["settings"]
        except (OSError, ValueError, KeyError):
            continue
        return settings
    return {}


def choose_checkpoint(folder: Path, resume: str) -> Path | None:
    """The checkpoint to continue from, None = start anew. resume: never | auto (the newest readable) | must.

    Raises:
        CheckpointError: ``must`` without a checkpoint or with a torn newest; ``auto`` with torn ones only.
    """
    paths = [] if resume == "never" else list_checkpoints(folder)
    if resume == "must" and not paths:
        raise CheckpointError(f"resume: there is no checkpoint to continue from, got must in {folder}; use resume=auto")
    for path in paths:
        try:
            read_checkpoint(path)
        except CheckpointError as error:
            if resume == "must":
                raise CheckpointError(f"{error}; use resume=auto to continue from the one before") from error
            logger.warning("%s; trying the checkpoint before it", error)
        else:
            return path
    if paths:
        raise CheckpointError(
            f"resume: none of {len(paths)} checkpoints can be read, got {folder}; start under a new name"
        )
    return None


def _names(head: DraftHead, adapter: LoraAdapter | None) -> dict[Tensor, str]:
    """Trained parameter -> its name; those of an adapter have a prefix."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in head.named_parameters()}
    if adapter is not None:
        names |= {parameter: f"adapter.{name}" for name, parameter in adapter.parameters.items()}
    return names


def optimizer_tensors(
    head: DraftHead, optimizer: torch.optim.Optimizer, adapter: LoraAdapter | None = None
) -> dict[str, Tensor]:
    """State of ``optimizer`` keyed ``<parameter name>:<state name>``, on the CPU."""
    names = _names(head, adapter)
    return {
        f"{names[parameter]}:{key}": value.detach().cpu().contiguous()
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
    }


def restore(
    checkpoint: Checkpoint,
    head: DraftHead,
    optimizer: torch.optim.Optimizer,
    run: dict[str, Any],
    rank: int,
    adapter: LoraAdapter | None = None,
) -> TrainState:
    """Puts ``checkpoint`` into the head, the adapter, the optimizer and this rank's random generators.

    Raises:
        CheckpointError: it belongs to another head, other data, or another number of micro-batches per step.
    """
    for key, value in run.items():
        if checkpoint.run.get(key) != value:
            raise CheckpointError(
                f"resume: {key} differs from the checkpoint's {checkpoint.run.get(key)}, got {value}; "
                "continue with the settings and data it was trained with"
            )
    load_tensors(head, checkpoint.head, "the checkpoint")
    if adapter is not None:
        adapter.load(checkpoint.adapter or {})
    _load_optimizer(checkpoint.optimizer, _names(head, adapter), optimizer)
    if rank < len(checkpoint.rng):
        set_rng_state(checkpoint.rng[rank])
    else:
        logger.warning(
            "resume: rank %d has no random state in the checkpoint, which %d ranks wrote",
            rank,
            len(checkpoint.rng),
        )
    return checkpoint.state


def _load_optimizer(tensors: dict[str, Tensor], names: dict[Tensor, str], optimizer: torch.optim.Optimizer) -> None:
    """Sets the optimizer's state by parameter name; learning rates stay (the schedule sets them)."""
    order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    states: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, kind = key.rpartition(":")
        if name not in order:
            raise CheckpointError(f"resume: the head has no trained parameter {name}, got optimizer state for it")
        states.setdefault(order.index(name), {})[kind] = value
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
