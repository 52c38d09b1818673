"""This machine's arithmetic and bandwidth, by two short measurements."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch

from specdraft.plan.machines import CUDA_CONTEXT_BYTES, GPU_STEP_S, Machine, host_memory_bytes

PROBE_S = 0.03
"""Of each measurement."""
CPU_SIDE, GPU_SIDE = 512, 4096
MATRIX_BYTES = {"cpu": 1 << 26, "cuda": 1 << 29}
USED = 0.7
"""Share of what such products reach that a model reaches, with its norms, copies and small products between them."""
CPU_STEP_S = 4e-3


@cache
def this_machine(device: str, dtype: str) -> Machine:
    """The machine of ``device`` (cpu, or a CUDA device) for a target of ``dtype``."""
    place = torch.device(device)
    if place.type == "cuda":
        name, memory = torch.cuda.get_device_name(place), float(torch.cuda.get_device_properties(place).total_memory)
    else:
        name, memory = "this machine", host_memory_bytes()
    flops, bandwidth = _measure(place, getattr(torch, dtype))
    return Machine(
        name=name,
        memory_bytes=memory,
        reserved_bytes=CUDA_CONTEXT_BYTES if place.type == "cuda" else 0.0,
        flops=flops * USED,
        bandwidth=bandwidth * USED,
        step_s=GPU_STEP_S if place.type == "cuda" else CPU_STEP_S,
        measured=True,
        device=place.type,
    )


@torch.no_grad()
def _measure(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Operations a second of a square product; bytes a second read by a product with one vector."""
    side = GPU_SIDE if device.type == "cuda" else CPU_SIDE
    square = torch.full((side, side), 0.01, dtype=dtype, device=device)
    per_product = _seconds(lambda: square @ square, device)
    rows = MATRIX_BYTES[device.type] // (2048 * square.element_size())
    matrix = torch.full((rows, 2048), 0.01, dtype=dtype, device=device)
    vector = matrix[0].clone()
    per_read = _seconds(lambda: matrix @ vector, device)
    return 2.0 * side**3 / per_product, matrix.numel() * matrix.element_size() / per_read


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of the runs that fit into PROBE_S, and of one at least."""
    work()
    start = time.perf_counter()
    found: list[float] = []
    while not found or time.perf_counter() - start < PROBE_S:
        before = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - before)
    return min(found)
