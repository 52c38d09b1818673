"""The order of rows: every row once, the same for any split over processes, and resumable from epoch and step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdraft.data.batching import POOL_STEPS, BatchPlan, collate
from specdraft.data.chat import TokenRow

LENGTHS = [(i * 37) % 101 + 3 for i in range(203)]


def plan(**changes: Any) -> BatchPlan:
    return BatchPlan(**{"lengths": LENGTHS, "batch_size": 4, "seed": 7, **changes})


def rows_of(steps: list[list[list[int]]]) -> list[int]:
    return [row for step in steps for micro_batch in step for row in micro_batch]


@pytest.mark.parametrize("bucket", [True, False])
@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_every_row_comes_once_an_epoch(bucket: bool, accumulation_steps: int) -> None:
    steps = plan(bucket=bucket, accumulation_steps=accumulation_steps)
    epoch = steps.epoch(0)
    assert sorted(rows_of(epoch)) == list(range(len(LENGTHS)))
    assert len(epoch) == steps.steps_per_epoch
    assert all(len(step) == accumulation_steps for step in epoch[:-1])
    assert all(len(rows) == 4 for step in epoch[:-1] for rows in step)


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    assert plan().epoch(1) == plan().epoch(1)
    orders = [rows_of(p.epoch(e)) for p, e in ((plan(), 0), (plan(), 1), (plan(seed=8), 0))]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]
    assert [len(plan().epoch(e)) for e in range(3)] == [plan().steps_per_epoch] * 3


@pytest.mark.parametrize("bucket", [True, False])
def test_processes_and_accumulation_give_the_same_steps(bucket: bool) -> None:
    one = plan(accumulation_steps=4, bucket=bucket).epoch(2)
    for world_size, accumulation_steps in ((2, 2), (4, 1)):
        ranks = [
            plan(world_size=world_size, accumulation_steps=accumulation_steps, rank=rank, bucket=bucket).epoch(2)
            for rank in range(world_size)
        ]
        assert [sorted(rows_of([step])) for step in one] == [
            sorted(row for rank in ranks for row in rows_of([rank[s]])) for s in range(len(one))
        ]


def test_every_process_runs_equally_often_in_the_last_step() -> None:
    ranks = [plan(lengths=[5] * 9, world_size=4, rank=rank).epoch(0) for rank in range(4)]
    assert [[len(step) for step in rank] for rank in ranks] == [[1]] * 4
    assert [len(rank[0][0]) for rank in ranks] == [4, 4, 1, 0]
    uneven = [plan(lengths=[5] * 9, world_size=2, accumulation_steps=4, rank=rank).epoch(0) for rank in range(2)]
    assert [[len(rows) for rows in rank[0]] for rank in uneven] == [[4, 1], [4, 0]]


def padding(steps: list[list[list[int]]]) -> int:
    return sum(max(LENGTHS[i] for i in rows) * len(rows) - sum(LENGTHS[i] for i in rows) for s in steps for rows in s)


def test_buckets_save_padding_without_running_from_short_to_long() -> None:
    bucketed = plan().epoch(0)
    assert padding(bucketed) < 0.25 * padding(plan(bucket=False).epoch(0))
    longest = [max(LENGTHS[i] for i in step[0]) for step in bucketed[:POOL_STEPS]]
    assert longest != sorted(longest)


def test_fewer_rows_than_a_batch() -> None:
    assert plan(lengths=[9, 4]).steps_per_epoch == 1
    assert sorted(rows_of(plan(lengths=[9, 4]).epoch(0))) == [0, 1]


def test_collate_pads_on_the_right() -> None:
    batch = collate([TokenRow([5, 6, 7], [False, True, True]), TokenRow([8], [True])], pad_id=9, row_ids=[4, 2])
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch.attention_mask.tolist() == [[True] * 3, [True, False, False]]
    assert batch.loss_mask.tolist() == [[False, True, True], [True, False, False]]
    assert batch.position_ids.tolist() == [[0, 1, 2]] * 2
    assert batch.document_ids.tolist() == [[0, 0, 0], [0, -1, -1]]
    assert batch.row_ids.tolist() == [4, 2]
    assert (batch.input_ids.dtype, batch.row_ids.dtype, batch.loss_mask.dtype) == (torch.int64, torch.int64, torch.bool)


def test_an_empty_micro_batch_supervises_nothing() -> None:
    batch = collate([], pad_id=9, row_ids=[])
    assert batch.input_ids.tolist() == [[9, 9]]
    assert bool(batch.attention_mask.all())
    assert not bool(batch.loss_mask.any())
    assert batch.row_ids.tolist() == [-1]
    with pytest.raises(ValueError, match="one for each row"):
        collate([TokenRow([1], [True])], 0, row_ids=[1, 2])
