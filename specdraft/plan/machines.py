"""What a machine has: memory, arithmetic and bandwidth, of this one as measured and of GPUs by their public data sheets."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from specdraft.core.errors import ConfigError

GIB, GB = 2**30, 10**9
COMPUTE_SHARE = 0.4
"""Of a data sheet's arithmetic that training and prefill of such models reach; assumed, common values are 0.3 to 0.5."""
BANDWIDTH_SHARE = 0.6
"""Of a data sheet's bandwidth that decoding reaches; assumed."""
GPU_STEP_S = 2e-3
"""What a decoding step takes on a GPU besides reading weights: the launches of its kernels from Python; assumed."""
CUDA_CONTEXT_BYTES = GIB
"""What CUDA and its libraries take of a device for themselves; assumed."""
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class Machine:
    """What estimates know of a machine.

    memory_bytes: of one device, of which reserved_bytes are taken by what is no tensor. flops, bandwidth: operations
    and bytes a second that are expected in use. step_s: what a decoding step takes besides. measured: False = from a
    data sheet, with an assumed share of its peak. device: cpu or cuda.
    """

    name: str
    memory_bytes: float
    reserved_bytes: float
    flops: float
    bandwidth: float
    step_s: float
    measured: bool
    device: str


_SHEETS: dict[str, tuple[float, float, float]] = {
    "rtx3090": (24, 71, 936),
    "rtx4090": (24, 165, 1008),
    "rtx5090": (32, 209, 1792),
    "l4": (24, 121, 300),
    "a10": (24, 125, 600),
    "l40s": (48, 362, 864),
    "a100_40gb": (40, 312, 1555),
    "a100_80gb": (80, 312, 2039),
    "h100": (80, 989, 3350),
    "h200": (141, 989, 4800),
    "b200": (180, 2250, 7700),
    "mi300x": (192, 1307, 5300),
}
"""Name -> memory in GB, dense bfloat16 TFLOP/s (float32 accumulation), bandwidth in GB/s, as their makers publish them."""
GPUS = tuple(_SHEETS)


def gpu(name: str) -> Machine:
    """A GPU of the table.

    Raises:
        ConfigError: it is not in the table.
    """
    if name not in _SHEETS:
        raise ConfigError(f"machines: no such GPU in the table, got {name!r}; use {', '.join(GPUS)}")
    memory, tflops, bandwidth = _SHEETS[name]
    return Machine(
        name=name,
        memory_bytes=memory * GB,
        reserved_bytes=CUDA_CONTEXT_BYTES,
        flops=tflops * 1e12 * COMPUTE_SHARE,
        bandwidth=bandwidth * GB * BANDWIDTH_SHARE,
        step_s=GPU_STEP_S,
        measured=False,
        device="cuda",
    )


def free_disk_bytes(folder: Path) -> int:
    """Free space where ``folder`` is or will be."""
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(place).free


def host_memory_bytes() -> float:
    """Memory that this process may have: the machine's, or less where a container limits it."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in CGROUP_LIMITS:
        if path.is_file():
            text = path.read_text().strip()
            if text.isdigit():
                total = min(total, float(text))
    return total


def resident_bytes() -> float:
    """Memory that this process holds now; 0 where the system does not say."""
    path = Path("/proc/self/statm")
    if not path.is_file():
        return 0.0
    return float(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def size_text(count: float) -> str:
    """Bytes for people: ``0 B``, ``12.3 MB``, ``1.23 GB``."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def time_text(seconds: float) -> str:
    """Seconds for people: ``12 s``, ``3.4 min``, ``5.6 h``, ``2.1 days``."""
    for unit, scale in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
