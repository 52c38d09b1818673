"""Where metrics go: nowhere, a JSONL file, Weights & Biases, TensorBoard or Trackio, behind one protocol."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from specdraft.core.errors import ConfigError
from specdraft.train._config import TrackerConfig

METRICS_NAME = "metrics.jsonl"


class Tracker(Protocol):
    """Takes the metrics of a run; only rank 0 has one that does anything."""

    def start(self, step: int, config: Mapping[str, Any]) -> None:
        """Before the first step: the run stands at ``step`` (0 = new) and has these settings."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics after optimizer step ``step``."""

    def close(self) -> None:
        """After the last step, also when training failed."""


class NoTracker:
    """Drops everything."""

    def start(self, step: int, config: Mapping[str, Any]) -> None:
        """See Tracker."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See Tracker."""

    def close(self) -> None:
        """See Tracker."""


class JsonlTracker:
    """One JSON object a line, ``step`` first, in ``metrics.jsonl`` of the run's folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS_NAME

    def start(self, step: int, config: Mapping[str, Any]) -> None:
        """Drops lines after ``step`` (a resumed run does those steps again) and a line torn by a kill."""
        kept = []
        for line in self.path.read_text().splitlines() if step and self.path.exists() else []:
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except json.JSONDecodeError:
                continue
        self._write("w", "".join(kept))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Appends a line; a metric that is not finite becomes null."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._write("a", json.dumps({"step": step, **finite}) + "\n")

    def _write(self, mode: str, text: str) -> None:
        """Writes or appends.

        Raises:
            ConfigError: the disk is full or the folder may not be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open(mode) as file:
                file.write(text)
        except OSError as error:
            raise ConfigError(
                f"output_dir: the metrics cannot be written, got {error}; free space or choose another output_dir"
            ) from error

    def close(self) -> None:
        """Every line is on its way to the disk already."""


class WandbTracker:
    """A Weights & Biases run that a resumed training continues (its id is kept in the run's folder)."""

    def __init__(self, folder: Path, project: str) -> None:
        self.folder = folder
        self.project = project
        self._run: Any = None

    def start(self, step: int, config: Mapping[str, Any]) -> None:
        """Opens the run.

        Raises:
            ConfigError: wandb refuses, mostly for want of a login.
        """
        import wandb

        id_file = self.folder / "wandb_run_id"
        run_id = id_file.read_text().strip() if step and id_file.exists() else secrets.token_hex(4)
        self.folder.mkdir(parents=True, exist_ok=True)
        id_file.write_text(run_id + "\n")
        try:
            self._run = wandb.init(
                project=self.project,
                name=self.folder.name,
                id=run_id,
                resume="allow",
                dir=str(self.folder),
                config=dict(config),
            )
        except (wandb.errors.UsageError, wandb.errors.CommError) as error:
            raise _refused(error) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One wandb step per optimizer step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Flushes and ends the run."""
        if self._run is not None:
            self._run.finish()


class TensorBoardTracker:
    """Event files in ``tensorboard`` of the run's folder; what a resumed run does again replaces what it did before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tensorboard"
        self._writer: Any = None

    def start(self, step: int, config: Mapping[str, Any]) -> None:
        """Opens the event file; the settings are a text beside the metrics."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.folder), purge_step=step + 1 if step else None)
        self._writer.add_text("settings", f"```json\n{json.dumps(dict(config), indent=2, default=str)}\n```", step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One scalar per metric."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes and closes the file."""
        if self._writer is not None:
            self._writer.close()


class TrackioTracker:
    """A Trackio run named as the run's folder, which a resumed training continues."""

    def __init__(self, folder: Path, project: str) -> None:
        self.folder = folder
        self.project = project
        self._run: Any = None

    def start(self, step: int, config: Mapping[str, Any]) -> None:
        """Opens the run."""
        import trackio

        resume = "allow" if step else "never"
        self._run = trackio.init(project=self.project, name=self.folder.name, config=dict(config), resume=resume)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One Trackio step per optimizer step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Flushes and ends the run."""
        if self._run is not None:
            self._run.finish()


def check_tracker(config: TrackerConfig) -> None:
    """What a tracker needs besides settings, found out before a model is loaded.

    Raises:
        ConfigError: its package is not installed, or wandb has no login.
    """
    package = {"wandb": "wandb", "tensorboard": "tensorboard", "trackio": "trackio"}.get(config.kind)
    if package is None:
        return
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"tracker.kind: needs the package {package}, got {config.kind}; pip install {package}, or use tracker=jsonl"
        )
    if config.kind == "wandb" and os.environ.get("WANDB_MODE", "online") in ("online", "run"):
        import wandb

        try:
            found = wandb.login()
        except wandb.errors.UsageError as error:
            raise _refused(error) from error
        if not found:
            raise _refused("no login")


def _refused(reason: object) -> ConfigError:
    """The error for a wandb that does not start."""
    return ConfigError(
        f"tracker.kind: wandb could not start, got {reason}; run `wandb login`, or use WANDB_MODE=offline or tracker=jsonl"
    )


def build_tracker(config: TrackerConfig, folder: Path, is_main_process: bool = True) -> Tracker:
    """The tracker of ``config`` for a run in ``folder``; other ranks than 0 get one that drops everything."""
    if config.kind == "none" or not is_main_process:
        return NoTracker()
    if config.kind == "tensorboard":
        return TensorBoardTracker(folder)
    if config.kind == "trackio":
        return TrackioTracker(folder, config.project)
    return JsonlTracker(folder) if config.kind == "jsonl" else WandbTracker(folder, config.project)
