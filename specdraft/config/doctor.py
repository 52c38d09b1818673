"""`specdraft plan` and `specdraft doctor`: what is to be known of a run before it starts."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdraft.config.experiment import ExperimentRun
from specdraft.core.errors import ConfigError
from specdraft.plan.machines import gpu

STDOUT = "-"
"""In the place of a file: the terminal, with nothing else on it."""


def _check_path(key: str, value: str | None, example: str) -> None:
    if value is not None and not value:
        raise ConfigError(f"{key}: must not be empty, got ''; use null or {example}")


@dataclass(slots=True, kw_only=True)
class PlanRun(ExperimentRun):
    """Says what a run will take (disk, memory, steps, time) and whether it fits; writes nothing of the run.

    Exit code 2 where it cannot fit on this machine, or with ``machines`` on none of them.
    """

    steps: int = 20
    """Optimizer steps that are measured on this machine, on a sample of the data; 0 = from the settings alone, no weights are
    loaded."""
    rows: int = 64
    """Conversations of that sample; the target answers them."""
    machines: list[str] = field(default_factory=list)
    """GPUs to forecast for beside this machine, by name, e.g. h100; estimates from their data sheets."""
    processes: int = 1
    """Devices that share the work."""
    json: str | None = None
    """File for the figures; - = the terminal, with nothing else on it; null = none."""

    def __post_init__(self) -> None:
        ExperimentRun.__post_init__(self)
        if self.steps < 0:
            raise ConfigError(f"steps: must not be negative, got {self.steps}; use 0 to measure nothing")
        if 0 < self.steps < 4:
            raise ConfigError(f"steps: too few to measure by, got {self.steps}; use 0 or e.g. 20")
        for name in ("rows", "processes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, got {getattr(self, name)}; use 1 or more")
        for name in self.machines:
            gpu(name)
        if len(set(self.machines)) != len(self.machines):
            raise ConfigError(f"machines: one is named twice, got {self.machines}; name each once")
        _check_path("json", self.json, "plan.json")


@dataclass(slots=True, kw_only=True)
class DoctorRun(ExperimentRun):
    """Checks target, data and head of a run before it starts, or that decoding is lossless; writes nothing of the run.

    Exit code 1 where a check found a fault, 2 for settings or files that cannot be used.
    """

    examples: int = 1
    """Rendered conversations that are shown on the terminal."""
    rows: int = 16
    """Conversations that are rendered, answered and checked."""
    check: str = "setup"
    """setup = target, data, head, export and resources; lossless = that drafts leave the text alone, on the prompts of `eval`;
    list = the names of the checks of setup, which are not run."""
    only: list[str] = field(default_factory=list)
    """Of check=setup: names of checks to run; [] = all."""
    skip: list[str] = field(default_factory=list)
    """Of check=setup: names of checks to leave out."""
    overfit_steps: int = 300
    """Optimizer steps at most in which the head must learn one text by heart."""
    overfit_seconds: float = 90.0
    """Seconds at most for that."""
    json: str | None = None
    """File for the findings; - = the terminal, with nothing else on it; null = none."""
    html: str | None = None
    """File for a page with the findings and the rows, their tokens coloured; null = none."""
    trained: str | None = None
    """Of check=lossless: folder or Hub id of a trained head; null = an untrained one of the settings of `head`."""
    samples: int = 200
    """Of check=lossless: answers that are drawn for each way of verifying."""

    def __post_init__(self) -> None:
        ExperimentRun.__post_init__(self)
        if self.check not in ("setup", "lossless", "list"):
            raise ConfigError(f"check: unknown, got {self.check!r}; use setup, lossless or list")
        if self.trained is not None and self.check != "lossless":
            raise ConfigError(f"trained: has no effect with check={self.check}, got {self.trained}; set check=lossless")
        for name in ("only", "skip"):
            if getattr(self, name) and self.check != "setup":
                raise ConfigError(
                    f"{name}: has no effect with check={self.check}, got {getattr(self, name)}; use check=setup"
                )
        if self.only and self.skip:
            raise ConfigError(f"skip: contradicts only ({self.only}), got {self.skip}; give one of them")
        if self.samples < 50:
            raise ConfigError(f"samples: too few for a test, got {self.samples}; use at least 50")
        self._check_amounts()
        self._check_files()

    def _check_amounts(self) -> None:
        for name in ("rows", "overfit_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, got {getattr(self, name)}; use e.g. 16")
        if not 0.0 < self.overfit_seconds < float("inf"):
            raise ConfigError(f"overfit_seconds: must be positive, got {self.overfit_seconds}; use e.g. 90")
        if not 0 <= self.examples <= self.rows:
            raise ConfigError(f"examples: must lie in 0..rows ({self.rows}), got {self.examples}; use 1")

    def _check_files(self) -> None:
        _check_path("json", self.json, "doctor.json")
        _check_path("html", self.html, "doctor.html")
        if self.html == STDOUT:
            raise ConfigError("html: needs a file, got -; use e.g. doctor.html")
        if self.html is not None and self.check != "setup":
            raise ConfigError(f"html: has no effect with check={self.check}, got {self.html}; use check=setup")
        if self.json is not None and self.check == "list":
            raise ConfigError(f"json: has no effect with check=list, got {self.json}; use null")
