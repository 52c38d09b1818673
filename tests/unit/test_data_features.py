"""Features kept in memory: the same states in another batch, within the limit, without a second target forward."""

from __future__ import annotations

import pytest
import torch

from specdraft.core.types import FeatureRequest, TokenBatch
from specdraft.data.batching import collate
from specdraft.data.chat import TokenRow
from specdraft.data.features import FeatureMemory
from specdraft.targets.hf import HFTarget
from tests.tiny import tiny_target
from tests.training import count_captures

ROWS = [TokenRow(list(range(3, 3 + n)), [False] + [True] * (n - 1)) for n in (9, 6, 12, 7)]
REQUEST = FeatureRequest((1, 3))


def batch(rows: list[int]) -> TokenBatch:
    return collate([ROWS[i] for i in rows], 0, rows)


@pytest.fixture
def target() -> HFTarget:
    return tiny_target()


@pytest.fixture
def calls(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Batch sizes of every target forward; those of the check of a new target are over by then."""
    return count_captures(monkeypatch)


def test_a_second_use_needs_no_forward_and_gives_the_same_states(target: HFTarget, calls: list[int]) -> None:
    memory = FeatureMemory(target, REQUEST, 2**20)
    memory.capture(batch([0, 1]))
    memory.capture(batch([2, 3]))
    again = memory.capture(batch([3, 0]))
    assert calls == [2, 2]
    expected = HFTarget.capture(target, batch([3, 0]), REQUEST)
    real = batch([3, 0]).attention_mask
    assert again.aux_hidden is not None and expected.aux_hidden is not None
    torch.testing.assert_close(again.last_hidden[real], expected.last_hidden[real])
    torch.testing.assert_close(again.aux_hidden[real], expected.aux_hidden[real])
    assert not again.last_hidden[~real].any()


def test_the_limit_holds_and_what_does_not_fit_is_captured_again(target: HFTarget, calls: list[int]) -> None:
    row_bytes = 9 * 32 * 3 * 4  # tokens, hidden size, last and two layers, float32
    memory = FeatureMemory(target, REQUEST, row_bytes)
    for _ in range(2):
        memory.capture(batch([0, 1]))
    assert memory.num_bytes == row_bytes
    assert calls == [2, 2]
    memory.capture(batch([0]))
    assert calls == [2, 2]


def test_zero_keeps_nothing_and_stand_in_rows_are_never_kept(target: HFTarget, calls: list[int]) -> None:
    tokens = batch([0])
    nothing = FeatureMemory(target, FeatureRequest(), 0)
    for _ in range(2):
        nothing.capture(tokens)
    assert nothing.num_bytes == 0 and calls == [1, 1]
    idle = collate([ROWS[0]], 0, [-1])
    memory = FeatureMemory(target, FeatureRequest(), 2**20)
    memory.capture(idle)
    assert memory.num_bytes == 0
