"""A forecast: what a run takes, whether it fits, and which setting to change where it does not."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from specdraft.core.errors import ConfigError
from specdraft.heads.base import DraftHead
from specdraft.plan.disk import Disk, disk
from specdraft.plan.head_cost import HeadCost, head_cost
from specdraft.plan.job import Job
from specdraft.plan.machines import Machine, free_disk_bytes, resident_bytes, size_text, time_text
from specdraft.plan.memory import Memory, memory
from specdraft.plan.probe import this_machine
from specdraft.plan.sizes import TargetSizes, target_sizes
from specdraft.plan.times import Measured, Times, estimated_times, measured_times
from specdraft.plan.workload import Schedule, Workload, estimated_workload, prepared_workload
from specdraft.targets.loading import load_tokenizer, resolve_device

TIGHT = 0.9
"""Share of what there is, above which a forecast is a warning."""
COVERAGE_SIZE = 8192
"""Stands for a draft vocabulary whose size a coverage will decide."""


@dataclass(frozen=True)
class Outlook:
    """What the run takes on one machine."""

    machine: Machine
    memory: Memory
    times: Times

    @property
    def fits(self) -> bool:
        """False where weights, gradients and optimizer alone are more than the device has."""
        return self.memory.least <= self.machine.memory_bytes

    @property
    def is_tight(self) -> bool:
        """Whether the peak comes near to what the device has, or above."""
        return self.memory.peak > TIGHT * self.machine.memory_bytes


@dataclass(frozen=True)
class Forecast:
    """All that is expected of a run. measured: the short run that the times of the first outlook are from, if any."""

    job: Job
    sizes: TargetSizes
    head: DraftHead
    cost: HeadCost
    schedule: Schedule
    disk: Disk
    free_disk: float
    outlooks: list[Outlook]
    measured: Measured | None = None

    @property
    def here(self) -> Outlook:
        """Of this machine."""
        return self.outlooks[0]

    def with_measured(self, found: Measured, workload: Workload) -> Forecast:
        """The forecast over other rows, this machine's times from what was measured on it."""
        schedule = Schedule(self.job, workload)
        updated = replace(
            self,
            schedule=schedule,
            disk=disk(self.job, self.head, schedule),
            outlooks=[self.outlook(outlook.machine, schedule) for outlook in self.outlooks],
            measured=found,
        )
        first = updated.here
        times = measured_times(self.job, self.head, schedule, found, first.times)
        return replace(updated, outlooks=[replace(first, times=times), *updated.outlooks[1:]])

    def outlook(self, machine: Machine, schedule: Schedule | None = None) -> Outlook:
        """What the run takes on ``machine``."""
        parts = self.job, self.sizes, self.head, self.cost, schedule or self.schedule, machine
        return Outlook(machine, memory(*parts), estimated_times(*parts))

    def lines(self) -> list[str]:
        """Two or three lines for the beginning of a run."""
        here, schedule = self.here, self.schedule
        steps = "as many as the time allows" if schedule.steps is None else f"{schedule.steps:,}"
        workload = schedule.workload
        parts = ", ".join(f"{name} {time_text(value)}" for name, value in asdict(here.times).items() if value >= 1.0)
        disk_text = f"disk {size_text(self.disk.total)} of {size_text(self.free_disk)} free"
        return [
            f"forecast: {workload.num_rows:,} rows, {workload.num_tokens:,} tokens ({workload.origin}); optimizer steps: "
            f"{steps}",
            f"forecast: memory {size_text(here.memory.peak)} of {size_text(here.machine.memory_bytes)}, {disk_text}, "
            f"time about {time_text(here.times.total)}{f' ({parts})' if parts else ''}",
        ]

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        schedule, workload = self.schedule, self.schedule.workload
        return {
            "rows": workload.num_rows,
            "tokens": workload.num_tokens,
            "supervised_share": workload.supervised_share,
            "origin": workload.origin,
            "optimizer_steps": schedule.steps,
            "steps_per_epoch": schedule.epoch_steps,
            "padding_share": schedule.padding,
            "target_parameters": self.sizes.num_parameters,
            "head_parameters": self.head.num_parameters,
            "disk_bytes": asdict(self.disk)
            | {"total": self.disk.total, "peak": self.disk.peak, "free": self.free_disk},
            "machines": [
                {
                    "name": outlook.machine.name,
                    "measured": outlook.machine.measured,
                    "memory_limit_bytes": outlook.machine.memory_bytes,
                    "memory_bytes": outlook.memory.as_dict(),
                    "seconds": outlook.times.as_dict(),
                    "fits": outlook.fits,
                }
                for outlook in self.outlooks
            ],
            "measured": None if self.measured is None else asdict(self.measured),
        }

    def refuse(self, *, memory: bool = True) -> None:
        """Raises ConfigError where the run cannot fit, naming the setting to change. ``memory``: of this machine, too."""
        problem = self.disk_problem() or (memory_problem(self.here, self.job) if memory else None)
        if problem is not None:
            raise ConfigError(problem)

    def disk_problem(self) -> str | None:
        """Why the disk cannot take the run, as an error says it; None = it can."""
        if self.disk.peak <= self.free_disk:
            return None
        parts = {name: value for name, value in asdict(self.disk).items() if name != "writing"}
        largest = max(parts, key=lambda name: parts[name])
        advice = {
            "features": "use features=online or fewer rows (data.limit)",
            "checkpoints": "lower trainer.keep_checkpoints, or choose another output_dir",
            "heads": "use a smaller head (head.draft_vocab_size), or choose another output_dir",
        }.get(largest, "use fewer rows (data.limit), or choose another output_dir")
        return (
            f"output_dir: the run needs {size_text(self.disk.peak)} on the disk, most of it for {largest} "
            f"({size_text(parts[largest])}), got {size_text(self.free_disk)} free; {advice}"
        )


def memory_problem(outlook: Outlook, job: Job) -> str | None:
    """Why a machine cannot take the run, as an error says it; None = it can."""
    if outlook.fits or job.target.device_map is not None:
        return None
    own = outlook.memory
    limit = f"got {size_text(outlook.machine.memory_bytes)} on {outlook.machine.name}"
    head = own.head + own.gradients + own.optimizer + own.average
    if own.target >= head:
        advice = "use target.dtype=bfloat16, target.quantization=int8 or int4, or target.device_map=auto"
        if outlook.machine.device == "cpu" and job.target.pack_weights:
            advice = f"use target.pack_weights=false, or {advice.removeprefix('use ')}"
        weights = f"the target's weights take {size_text(own.target)} and the head {size_text(head)}"
        return f"target.dtype: {weights}, {limit}; {advice}"
    return (
        f"head.draft_vocab_size: the head with its gradients and optimizer takes {size_text(head)} beside "
        f"{size_text(own.target)} of the target, {limit}; use a smaller head"
    )


def forecast(
    job: Job,
    machines: list[Machine] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    resident: float | None = None,
) -> Forecast:
    """From the settings alone: the sources are read and some conversations rendered, no weights are loaded.

    Rows that are prepared already count as they are.
    ``machines``: beside this one. ``tokenizer``: of the target, where it is at hand. ``resident``: memory of the process
    before anything was loaded; None = as it is now.

    Raises:
        ConfigError, DataError, UnsupportedTargetError: the target or the data cannot be had.
    """
    sizes = target_sizes(job.target)
    tokenizer = tokenizer or load_tokenizer(job.target)
    workload = prepared_workload(job, tokenizer) or estimated_workload(job, tokenizer)
    config = job.head
    if config.draft_vocab_coverage is not None:
        size = min(COVERAGE_SIZE, sizes.spec.vocab_size)
        config = replace(config, draft_vocab_size=size, draft_vocab_coverage=None)
        job = replace(job, head=config)
    with torch.device("meta"):
        head = config.build(sizes.spec)
    schedule = Schedule(job, workload)
    cost = head_cost(config, sizes.spec, workload.supervised_share, job.trainer.mixed_precision)
    device = resolve_device(job.target.device)
    found = Forecast(
        job=job,
        sizes=sizes,
        head=head,
        cost=cost,
        schedule=schedule,
        disk=disk(job, head, schedule),
        free_disk=float(free_disk_bytes(job.folder)),
        outlooks=[],
    )
    here = this_machine(str(device), job.target.dtype)
    if device.type == "cpu":
        here = replace(here, reserved_bytes=resident_bytes() if resident is None else resident)
    everywhere = [here, *(machines or [])]
    return replace(found, outlooks=[found.outlook(machine) for machine in everywhere])
