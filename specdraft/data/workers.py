"""Work on many parts of a data set by several processes, whose results come in the order of the parts."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from typing import Any, TypeVar

from specdraft.core.errors import DataError

MIN_JOBS = 16
"""With fewer jobs, starting other processes (which import torch) costs more than they save."""

J = TypeVar("J")
R = TypeVar("R")
_task: Callable[[Any], Any] | None = None


def spread(task: Callable[[J], R], jobs: Sequence[J], num_workers: int | None) -> Iterator[R]:
    """``task(job)`` of every job, in order, by as many processes as there are cores, or ``num_workers``.

    ``task`` and its results are pickled, the former once for each process. The processes are started afresh and not forked:
    this one may hold threads and a GPU.

    Raises:
        DataError: one of the processes ended without a result.
    """
    workers = min(len(jobs), num_workers or num_cores())
    if workers < 2 or len(jobs) < MIN_JOBS:
        yield from map(task, jobs)
        return
    waiting = iter(jobs)
    try:
        with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_begin, initargs=(task,)) as pool:
            running: deque[Future[Any]] = deque(pool.submit(_work, job) for job in islice(waiting, 2 * workers))
            try:
                while running:
                    result = running.popleft().result()
                    running.extend(pool.submit(_work, job) for job in islice(waiting, 1))
                    yield result
            finally:
                for future in running:
                    future.cancel()
    except BrokenProcessPool as error:
        raise DataError(
            f"data.num_workers: a process ended without a result, got {workers} processes; what they finished is kept: free "
            "memory or use data.num_workers=1, and run again"
        ) from error


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _begin(task: Callable[[Any], Any]) -> None:
    """The first thing a process does."""
    global _task
    _task = task
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread each: there is a process for every core
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that was killed cannot end its processes; they would wait for work for ever."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _work(job: Any) -> Any:
    assert _task is not None
    return _task(job)
