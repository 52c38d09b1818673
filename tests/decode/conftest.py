"""The target and the text most decode tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specdraft.targets.hf import HFTarget
from tests.decode.oracle import greedy, prompt_ids
from tests.decode.probes import only_new_objects
from tests.tiny import tiny_target

PROMPT = prompt_ids(9)
LENGTH = 30


@pytest.fixture(scope="session")
def llama() -> HFTarget:
    return tiny_target("llama")


@pytest.fixture(scope="session")
def answer(llama: HFTarget) -> list[int]:
    """The target's greedy text after ``PROMPT``, long enough to draft beyond ``LENGTH``."""
    return greedy(llama, PROMPT, LENGTH + 8)


@pytest.fixture
def fresh_memory() -> Iterator[None]:
    """``probes.live_storages`` sees only what the test makes."""
    with only_new_objects():
        yield
