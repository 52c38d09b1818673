"""The micro-batches of every optimizer step, put together ahead of their use by a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from itertools import count, islice
from typing import Generic, TypeVar

from specdraft.core.threads import background_thread
from specdraft.core.types import TokenBatch
from specdraft.data.batching import MicroBatch, collate
from specdraft.data.features import FeatureMemory
from specdraft.train.inputs import TrainInputs
from specdraft.train.progress import Meter
from specdraft.train.state import TrainState

T = TypeVar("T")
R = TypeVar("R")


def windows(
    run: TrainInputs, state: TrainState, meter: Meter, memory: FeatureMemory | None = None
) -> Generator[list[TokenBatch], None, None]:
    """This rank's micro-batches of every optimizer step from ``state`` on. Close it when leaving early.

    They bring their features along where ``run.store`` has them and ``memory`` has not. The phase ``data`` is the time that
    training waits for them.
    """
    planned = islice(_planned(run, state.epoch, state.step_in_epoch), max(0, run.total_steps - state.step))

    on_cpu = run.accelerator.device.type == "cpu"

    def make(micro_batches: list[MicroBatch]) -> list[TokenBatch]:
        made = []
        for rows in micro_batches:
            ids = [place for row in rows for place in row]
            made.append(collate(run.rows(ids), run.pad_id, ids, [len(row) for row in rows], on_cpu))
        if run.store is not None:
            made = [tokens if memory and memory.holds(tokens) else run.store.attach(tokens) for tokens in made]
        return [tokens.pinned() for tokens in made] if run.accelerator.device.type == "cuda" else made

    if not run.trainer.prefetch:
        for micro_batches in planned:
            with meter.phase("data"):
                window = make(micro_batches)
            yield window
        return
    ahead = Ahead(planned, make, run.trainer.prefetch)
    try:
        while True:
            with meter.phase("data"):
                found = ahead.take()
            if found is None:
                return
            yield found
    finally:
        ahead.close()


def _planned(run: TrainInputs, epoch: int, step_in_epoch: int) -> Iterator[list[MicroBatch]]:
    """Rows of every micro-batch, step by step, from a position on; without end."""
    for number in count(epoch):
        steps = run.plan.epoch(number)
        yield from (steps[i] for i in range(step_in_epoch if number == epoch else 0, len(steps)))


class Ahead(Generic[T, R]):
    """``make(item)`` for every item, in order, by a thread that is at most ``depth`` results ahead."""

    def __init__(self, items: Iterator[T], make: Callable[[T], R], depth: int) -> None:
        self._items, self._make = items, make
        self._pool = background_thread("prefetch")
        self._results = deque(self._pool.submit(self._next) for _ in range(depth))

    def _next(self) -> R | None:
        """The single thread runs these one after the other, so the items keep their order."""
        for item in self._items:
            return self._make(item)
        return None

    def take(self) -> R | None:
        """The next result; None after the last.

        Raises:
            whatever ``make`` raised for it.
        """
        self._results.append(self._pool.submit(self._next))
        return self._results.popleft().result()

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown(cancel_futures=True)
