"""Where a measurement was made: versions, processor, accelerator, threads."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import specdraft

LIBRARIES = ("torch", "transformers", "accelerate", "huggingface-hub", "safetensors", "numpy")
CPU_INFO = Path("/proc/cpuinfo")


def environment() -> dict[str, Any]:
    """JSON values; holds no host name, user or path."""
    return {
        "specdraft": specdraft.__version__,
        "python": platform.python_version(),
        "libraries": {name: metadata.version(name) for name in LIBRARIES},
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "num_cpus": _usable_cpus(),
        "num_threads": torch.get_num_threads(),
        "accelerators": [
            torch.cuda.get_device_name(index)
            for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
        ],
        "cuda": torch.version.cuda,
    }


def cpu_name() -> str:
    """The processor's name as Linux gives it, else as Python does."""
    if CPU_INFO.is_file():
        for line in CPU_INFO.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _usable_cpus() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
