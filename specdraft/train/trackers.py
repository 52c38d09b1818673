"""Where metrics go: nowhere, a JSONL file, or Weights & Biases, behind one protocol."""

from __future__ import annotations

import json
import math
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
            raise ConfigError(
                f"tracker.kind: wandb could not start, got {error}; run `wandb login`, or use "
                "WANDB_MODE=offline or tracker=jsonl"
            ) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One wandb step per optimizer step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Flushes and ends the run."""
        if self._run is not None:
            self._run.finish()


def build_tracker(config: TrackerConfig, folder: Path, is_main_process: bool = True) -> Tracker:
    """The tracker of ``config`` for a run in ``folder``; other ranks than 0 get one that drops everything."""
    if config.kind == "none" or not is_main_process:
        return NoTracker()
    return JsonlTracker(folder) if config.kind == "jsonl" else WandbTracker(folder, config.project)
