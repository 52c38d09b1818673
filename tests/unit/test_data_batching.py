"""The order of rows: every row once, the same for any split over processes, and resumable from epoch and step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specdraft.data.batching import POOL_STEPS, BatchPlan, MicroBatch, collate, pack
from specdraft.data.chat import TokenRow

LENGTHS = [(i * 37) % 101 + 3 for i in range(203)]


def plan(**changes: Any) -> BatchPlan:
    return BatchPlan(**{"lengths": LENGTHS, "batch_size": 4, "seed": 7, **changes})


def rows_of(steps: Sequence[list[MicroBatch]]) -> list[int]:
    return [place for step in steps for micro_batch in step for row in micro_batch for place in row]


def tokens_of(row: list[int]) -> int:
    return sum(LENGTHS[place] for place in row)


@pytest.mark.parametrize("capacity", [None, 128])
@pytest.mark.parametrize("bucket", [True, False])
@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_every_row_comes_once_an_epoch(bucket: bool, accumulation_steps: int, capacity: int | None) -> None:
    steps = plan(bucket=bucket, accumulation_steps=accumulation_steps, capacity=capacity)
    epoch = steps.epoch(0)
    assert sorted(rows_of(epoch)) == list(range(len(LENGTHS)))
    assert len(epoch) == steps.num_steps(0)
    assert all(len(step) == accumulation_steps for step in epoch[:-1])
    assert all(len(rows) == 4 for step in epoch[:-1] for rows in step)


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    assert list(plan().epoch(1)) == list(plan().epoch(1))
    orders = [rows_of(p.epoch(e)) for p, e in ((plan(), 0), (plan(), 1), (plan(seed=8), 0))]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]
    assert [len(plan().epoch(e)) for e in range(3)] == [plan().num_steps(e) for e in range(3)]


@pytest.mark.parametrize("capacity", [None, 150])
@pytest.mark.parametrize("bucket", [True, False])
def test_processes_and_accumulation_give_the_same_steps(bucket: bool, capacity: int | None) -> None:
    one = plan(accumulation_steps=4, bucket=bucket, capacity=capacity).epoch(2)
    for world_size, accumulation_steps in ((2, 2), (4, 1)):
        ranks = [
            plan(
                world_size=world_size,
                accumulation_steps=accumulation_steps,
                rank=rank,
                bucket=bucket,
                capacity=capacity,
            ).epoch(2)
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


def padding(steps: Sequence[list[MicroBatch]]) -> int:
    sizes = [[tokens_of(row) for row in rows] for step in steps for rows in step]
    return sum(max(own) * len(own) - sum(own) for own in sizes)


def test_buckets_save_padding_without_running_from_short_to_long() -> None:
    bucketed = plan().epoch(0)
    assert padding(bucketed) < 0.25 * padding(plan(bucket=False).epoch(0))
    longest = [max(map(tokens_of, step[0])) for step in bucketed[:POOL_STEPS]]
    assert longest != sorted(longest)


@pytest.mark.parametrize("num_rows", [8, 12, 16, 40, 64])
def test_a_small_data_set_has_other_buckets_in_every_epoch(num_rows: int) -> None:
    """All of it would be one sorted pool; two rows that met in one epoch need not meet in the next."""
    steps = plan(lengths=LENGTHS[:num_rows])
    assert steps.num_steps(0) <= POOL_STEPS
    epochs = [{frozenset(rows_of([step])) for step in steps.epoch(e)} for e in range(3)]
    assert not epochs[0] & epochs[1] & epochs[2]
    if num_rows >= 40:
        assert padding(steps.epoch(0)) < 0.5 * padding(plan(lengths=LENGTHS[:num_rows], bucket=False).epoch(0))


def test_packing_fills_rows_and_saves_more_padding_than_buckets() -> None:
    packed = plan(capacity=128).epoch(0)
    rows = [row for step in packed for rows in step for row in rows]
    assert max(map(tokens_of, rows)) <= 128
    assert len(rows) <= 1.1 * sum(LENGTHS) / 128
    assert padding(packed) < 0.5 * padding(plan().epoch(0))
    assert plan(capacity=128).padding_share() == pytest.approx(padding(packed) / (padding(packed) + sum(LENGTHS)))


def test_packing_differs_by_epoch_and_may_change_the_number_of_steps() -> None:
    steps = plan(capacity=40, batch_size=1)
    epochs = [{frozenset(rows_of([step])) for step in steps.epoch(e)} for e in range(2)]
    shared = {row for row in epochs[0] & epochs[1] if len(row) > 1}
    assert len(shared) < 0.5 * len(epochs[0])
    assert [steps.num_steps(e) for e in range(4)] == [len(steps.epoch(e)) for e in range(4)]


def test_first_fit_decreasing() -> None:
    assert pack([0, 1, 2, 3, 4], [3, 7, 5, 4, 11], 10) == [[4], [1, 0], [2, 3]]
    assert pack([], [], 10) == []


def test_fewer_rows_than_a_batch() -> None:
    assert plan(lengths=[9, 4]).num_steps(0) == 1
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


def test_collate_packs_documents_behind_each_other() -> None:
    rows = [TokenRow([5, 6, 7], [False, True, True]), TokenRow([8, 9], [True, False]), TokenRow([4], [True])]
    batch = collate(rows, 0, [4, 2, 7], sizes=[2, 1])
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9], [4, 0, 0, 0, 0]]
    assert batch.loss_mask.tolist() == [[False, True, True, True, False], [True] + [False] * 4]
    assert batch.attention_mask.tolist() == [[True] * 5, [True] + [False] * 4]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1], [0, -1, -1, -1, -1]]
    assert batch.row_ids.tolist() == [[4, 2], [7, -1]]
    with pytest.raises(ValueError, match="must add up to the 3 rows"):
        collate(rows, 0, sizes=[1, 1])


def test_an_empty_micro_batch_supervises_nothing() -> None:
    batch = collate([], pad_id=9, row_ids=[])
    assert batch.input_ids.tolist() == [[9, 9]]
    assert bool(batch.attention_mask.all())
    assert not bool(batch.loss_mask.any())
    assert batch.row_ids.tolist() == [-1]
    with pytest.raises(ValueError, match="one for each row"):
        collate([TokenRow([1], [True])], 0, row_ids=[1, 2])
