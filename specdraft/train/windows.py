"""The micro-batches of every optimizer step, put together ahead of their use by a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from itertools import count, islice
from typing import Generic, TypeVar

from specdraft.core.types import TokenBatch
from specdraft.data.batching import MicroBatch, collate
from specdraft.train.inputs import TrainInputs
from specdraft.train.progress import Meter
from specdraft.train.state import TrainState

T = TypeVar("T")
R = TypeVar("R")

_POLL_S = 0.1
"""How often a thread that waits for room looks whether it is still wanted."""


def windows(run: TrainInputs, state: TrainState, meter: Meter) -> Generator[list[TokenBatch], None, None]:
    """This rank's micro-batches of every optimizer step from ``state`` on. Close it when leaving early.

    The phase ``data`` is the time that training waits for them.
    """
    planned = islice(_planned(run, state.epoch, state.step_in_epoch), max(0, run.total_steps - state.step))

    def make(micro_batches: list[MicroBatch]) -> list[TokenBatch]:
        made = []
        for rows in micro_batches:
            ids = [place for row in rows for place in row]
            made.append(collate(run.rows(ids), run.pad_id, ids, [len(row) for row in rows]))
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
        yield from run.plan.epoch(number)[step_in_epoch if number == epoch else 0 :]


class Ahead(Generic[T, R]):
    """``make(item)`` for every item, in order, by a thread that is at most ``depth`` results ahead."""

    def __init__(self, items: Iterator[T], make: Callable[[T], R], depth: int) -> None:
        self._items, self._make = items, make
        self._ready: queue.Queue[R | BaseException | None] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            for item in self._items:
                if not self._put(self._make(item)):
                    return
            self._put(None)
        except BaseException as error:  # noqa: BLE001 - raised again where the result is taken
            self._put(error)

    def _put(self, result: R | BaseException | None) -> bool:
        """Waits for room; False when nobody wants results any more."""
        while not self._closed.is_set():
            try:
                self._ready.put(result, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False

    def take(self) -> R | None:
        """The next result; None after the last.

        Raises:
            whatever ``make`` raised for it.
        """
        result = self._ready.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._thread.join()
