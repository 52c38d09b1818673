"""What more than one integration test needs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def own_graphs() -> Iterator[None]:
    """No graph that another test compiled; the test is skipped where nothing can be compiled."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
