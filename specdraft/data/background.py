"""An event loop in a thread of its own, and what comes out of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

GROUP, GROUP_S = 256, 0.2
"""Results that are handed on together, and how long the first of them waits for others."""

R = TypeVar("R")
Work = Callable[[Callable[[R], None]], Coroutine[Any, Any, None]]
"""A coroutine function that is given where to put its results."""


def in_background(work: Work[R]) -> Generator[list[R], None, None]:
    """Runs ``work(emit)`` in a thread; yields what it emits, in groups, while it goes on. Closing cancels it.

    The caller may itself be inside an event loop, as in a notebook. What ``work`` raises is raised here, after its
    results.
    """
    results: SimpleQueue[R | None] = SimpleQueue()
    begun = threading.Event()
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = []

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        running.append((asyncio.get_running_loop(), task))
        begun.set()
        await work(results.put)

    with ThreadPoolExecutor(1, "specdraft-answers") as executor:
        future = executor.submit(lambda: asyncio.run(main()))
        future.add_done_callback(lambda _: results.put(None))
        try:
            going = True
            while going:
                group, going = _group(results)
                if group:
                    yield group
        finally:
            while not (begun.wait(0.1) or future.done()):
                pass
            for loop, task in running:
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(task.cancel)
        future.result()


def _group(results: SimpleQueue[R | None]) -> tuple[list[R], bool]:
    """Results that are there or come within ``GROUP_S`` of the first, and whether more may follow."""
    found: list[R] = []
    item = results.get()
    until = time.monotonic() + GROUP_S
    while item is not None:
        found.append(item)
        if len(found) >= GROUP:
            return found, True
        try:
            item = results.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            return found, True
    return found, False
