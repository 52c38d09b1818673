"""Whether the run fits: disk, memory and time as forecast, and versions of libraries that are known to break."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from specdraft.doctor.case import Case
from specdraft.doctor.findings import Finding, check
from specdraft.plan.forecast import TIGHT, memory_problem
from specdraft.plan.machines import size_text, time_text


@check("disk", 70)
def disk(case: Case) -> Iterator[Finding]:
    """What the run leaves on the disk fits."""
    found = case.forecast
    text = f"{size_text(found.disk.peak)} of {size_text(found.free_disk)} free in the folder of the run"
    numbers = {"peak_bytes": found.disk.peak, "free_bytes": found.free_disk}
    problem = found.disk_problem()
    if problem is not None:
        evidence, _, fix = problem.rpartition("; ")
        yield Finding("disk", "fault", evidence, fix, numbers)
    elif found.disk.peak > TIGHT * found.free_disk:
        yield Finding("disk", "warning", text, "free space, or choose another output_dir", numbers)
    else:
        yield Finding("disk", "ok", text, "", numbers)


@check("memory", 71)
def memory(case: Case) -> Iterator[Finding]:
    """Target, head, gradients, optimizer, activations and cache fit into the device."""
    here = case.forecast.here
    limit = here.machine.memory_bytes
    own = size_text(here.memory.least - here.memory.target)
    text = (
        f"peak {size_text(here.memory.peak)} of {size_text(limit)} on {here.machine.name}; target "
        f"{size_text(here.memory.target)}, head with gradients and optimizer {own}"
    )
    numbers = here.memory.as_dict() | {"limit": limit}
    problem = memory_problem(here, case.job)
    if problem is not None:
        evidence, _, fix = problem.rpartition("; ")
        yield Finding("memory", "fault", evidence, fix, numbers)
    elif here.is_tight:
        fix = "lower data.batch_size, set trainer.gradient_checkpointing=true, or lower trainer.feature_memory_gib"
        yield Finding("memory", "warning", text, fix, numbers)
    else:
        yield Finding("memory", "ok", text, "", numbers)


@check("time", 72)
def time(case: Case) -> Iterator[Finding]:
    """How long the run will take, from this machine's speed; `specdraft plan` measures it."""
    found = case.forecast
    times, steps = found.here.times, found.schedule.steps
    text = (
        f"about {time_text(times.total)}: answers {time_text(times.prepare)}, target {time_text(times.features)}, head "
    )
    text += f"{time_text(times.training)}, measurements {time_text(times.evaluation)}"
    text += "" if steps is None else f"; {steps:,} optimizer steps"
    yield Finding("time", "ok", text, "", times.as_dict() | {"optimizer_steps": steps})


@dataclass(frozen=True)
class KnownBreak:
    """Versions of a package that break something of ours, and why. verdict: fault, or warning where it depends."""

    package: str
    versions: str
    verdict: str
    reason: str
    fix: str


KNOWN_BREAKS = (
    KnownBreak(
        "transformers",
        "<5.0",
        "fault",
        "assistant masks of truncated turns are wrong and caches cannot be cut as decoding needs (crop with a negative length)",
        "pip install 'transformers>=5'",
    ),
    KnownBreak(
        "torch",
        "<2.6",
        "fault",
        "loads of checkpoints are unsafe and attention masks differ",
        "pip install 'torch>=2.6'",
    ),
    KnownBreak(
        "hydra-core",
        "<1.3.8",
        "fault",
        "a configuration file can make it call any function of Python (_target_)",
        "pip install 'hydra-core>=1.3.8,<1.4'",
    ),
    KnownBreak(
        "hydra-core",
        ">=1.4.dev0",
        "fault",
        "version_base, which keeps Hydra from changing folders, is gone",
        "pip install 'hydra-core>=1.3.8,<1.4'",
    ),
    KnownBreak(
        "accelerate",
        "<1.10",
        "warning",
        "learning rates and seeds differ between one process and several",
        "pip install 'accelerate>=1.10'",
    ),
    KnownBreak(
        "huggingface-hub",
        "<1.0",
        "fault",
        "errors of the Hub have other names there",
        "pip install 'huggingface-hub>=1'",
    ),
)
"""Known from the reports of users of such tools, and from our own tests."""


def broken_versions(installed: Mapping[str, str]) -> list[tuple[KnownBreak, str]]:
    """The entries of the table that ``installed`` (package -> version) falls under, with the version."""
    return [
        (entry, installed[entry.package])
        for entry in KNOWN_BREAKS
        if entry.package in installed
        and SpecifierSet(entry.versions, prereleases=True).contains(Version(installed[entry.package]))
    ]


def installed_versions() -> dict[str, str]:
    """Version of every package of the table that is installed."""
    found = {}
    for name in {entry.package for entry in KNOWN_BREAKS}:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@check("versions", 73)
def versions(case: Case) -> Iterator[Finding]:
    """No installed library is of a version that is known to break something."""
    installed = installed_versions()
    broken = broken_versions(installed)
    for entry, version in broken:
        yield Finding(
            f"version of {entry.package}",
            entry.verdict,
            f"{version} is installed: {entry.reason}",
            entry.fix,
            {"version": version},
        )
    if not broken:
        listed = ", ".join(f"{name} {version}" for name, version in sorted(installed.items()))
        yield Finding("versions", "ok", listed, "", installed)
    if torch.version.cuda is None and _has_nvidia_gpu():
        yield Finding(
            "torch without CUDA",
            "warning",
            f"there is an NVIDIA GPU, and torch {torch.__version__} is built for the CPU",
            "install torch's CUDA build",
        )


def _has_nvidia_gpu() -> bool:
    from pathlib import Path

    return Path("/proc/driver/nvidia/version").exists()
