"""The target and the text most decode tests share."""

from __future__ import annotations

import pytest

from specdraft.targets.hf import HFTarget
from tests.decode.oracle import greedy, prompt_ids
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
