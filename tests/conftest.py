"""What holds for every test: one thread, fixed seeds, no network, no trace of an earlier test's Hydra."""

from __future__ import annotations

import ipaddress
import logging
import os
import random
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Libraries read these when first imported, and processes started by a test inherit them.
os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_DATASETS_DISABLE_PROGRESS_BARS="1",
    TQDM_DISABLE="1",
    WANDB_MODE="offline",
    WANDB_SILENT="true",
)

TIERS = {"engines": "engines", "golden": "golden", "gpu": "gpu", "integration": "integration"}
"""Folder under tests -> the marker that each test in it gets."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in TIERS:
            item.add_marker(TIERS[folder])
        needed = 2 if item.get_closest_marker("multi_gpu") else 1 if item.get_closest_marker("gpu") else 0
        if needed and num_gpus() < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {num_gpus()}"))


def num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Seed what has been imported so far: a test that needs no torch does not pay for its import."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh_hydra() -> Iterator[None]:
    """Hydra keeps its search path in a process-wide singleton, which a failed test would leave initialised.

    And `--info` logs to the stdout of that time, which later tests find closed.
    """
    root = logging.getLogger()
    before = list(root.handlers)
    yield
    for handler in root.handlers[:]:
        if handler not in before:
            root.removeHandler(handler)
    if "hydra.core.global_hydra" in sys.modules:
        sys.modules["hydra.core.global_hydra"].GlobalHydra.instance().clear()


class NetworkBlockedError(RuntimeError):
    """A test without the marker `network` tried to reach another machine."""


def stays_here(family: int, address: Any) -> bool:
    """Whether a socket's address is on this machine; a host name other than localhost counts as outside."""
    if family not in (socket.AF_INET, socket.AF_INET6):
        return True
    host = address[0]
    try:
        return host in ("", "localhost") or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@pytest.fixture(autouse=True)
def no_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse connections and name look-ups that leave this machine, in this process."""
    if request.node.get_closest_marker("network"):
        return

    def guarded(name: str, address_at: int) -> Any:
        original = getattr(socket.socket, name)

        def call(self: socket.socket, *args: Any) -> Any:
            if not stays_here(self.family, args[address_at]):
                raise NetworkBlockedError(f"socket.{name} to {args[address_at]}; mark the test `network` if it must")
            return original(self, *args)

        return call

    look_up = socket.getaddrinfo

    def guarded_look_up(host: Any, *args: Any, **kwargs: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name is not None and not stays_here(socket.AF_INET, (name,)):
            raise NetworkBlockedError(f"look-up of {name}; mark the test `network` if it must")
        return look_up(host, *args, **kwargs)

    for name, address_at in (("connect", 0), ("connect_ex", 0), ("sendto", -1)):
        monkeypatch.setattr(socket.socket, name, guarded(name, address_at))
    monkeypatch.setattr(socket, "getaddrinfo", guarded_look_up)
