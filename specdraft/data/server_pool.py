"""Work shared among several servers: bounded, paced, retried with back-off, and kept away from those that fail."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from specdraft.core.errors import DataError
from specdraft.data._answers_config import AnswersConfig
from specdraft.data.server_client import FaultError, RefusedError

MAX_BACKOFF_S = 60.0
MAX_RETRY_AFTER_S = 3600.0
MAX_FAILED = 100
"""Requests given up after which the others are not tried any more."""
MAX_REFUSED = 20
"""Refusals in a row that say that the settings are wrong rather than the rows."""

logger = logging.getLogger(__name__)
J = TypeVar("J")
R = TypeVar("R")


@dataclass(eq=False)
class Endpoint:
    """One server. Times are those of the event loop, which no change of the clock touches."""

    url: str
    failures: int = 0
    """In a row; a request that fails again and again counts once."""
    rounds: int = 0
    """Failures so far; requests that were under way together fail as one."""
    resume_at: float = 0.0
    given_up: bool = False
    last_fault: str = ""
    failing: set[int] = field(default_factory=set)
    """Requests that failed in this row."""

    def check(self) -> None:
        """Raises FaultError while nothing should be sent there."""
        if self.given_up or self.resume_at > asyncio.get_running_loop().time():
            raise FaultError(self.last_fault, of_endpoint=True)

    def succeeded(self) -> None:
        """Ends a row of failures."""
        self.failures = 0
        self.failing.clear()


@dataclass
class _Task(Generic[J]):
    job: J
    failures: int = 0


class Pool(Generic[J, R]):
    """Has every job done by one of the endpoints.

    A failed request goes back to the others, at most ``retries`` times. An endpoint that fails as a whole, or again and
    again, pauses for longer and longer and is given up after so many failures in a row; a success ends the row.

    Args:
        settings: limits.
        endpoints: the servers.
        send: does a job at an endpoint; raises FaultError or RefusedError.
        refused: what stands for a job that a server refused.
        world_size: processes that share ``requests_per_minute``.
    """

    def __init__(
        self,
        settings: AnswersConfig,
        endpoints: Sequence[Endpoint],
        send: Callable[[Endpoint, J], Awaitable[R]],
        refused: Callable[[J], R],
        world_size: int = 1,
    ) -> None:
        self._settings = settings
        self._endpoints = endpoints
        self._send = send
        self._refuse = refused
        rate = settings.requests_per_minute
        self._interval = 60.0 * world_size / rate if rate else 0.0
        self._next_start = 0.0
        self._jitter = random.Random()

    async def run(self, jobs: Sequence[J], emit: Callable[[R], None]) -> None:
        """Does ``jobs``; ``emit`` takes each result.

        Raises:
            DataError: jobs were given up, or every endpoint was; the results of the others were emitted.
        """
        self._emit = emit
        self._loop = asyncio.get_running_loop()
        self._pending: asyncio.Queue[_Task[J]] = asyncio.Queue()
        self._left = len(jobs)
        self._failed: list[str] = []
        self._held: list[R] = []
        self._finished: asyncio.Future[None] = self._loop.create_future()
        for endpoint in self._endpoints:
            endpoint.failing.clear()
        for job in jobs:
            self._pending.put_nowait(_Task(job))
        count = min(self._settings.concurrency, len(jobs))
        alive = [endpoint for endpoint in self._endpoints if not endpoint.given_up]
        workers = [self._loop.create_task(self._work(endpoint)) for endpoint in alive for _ in range(count)]
        for worker in workers:
            worker.add_done_callback(self._worker_ended)
        try:
            if not jobs:
                return
            self._check_alive()
            await self._finished
        finally:
            # More than once: before Python 3.12 wait_for loses a cancellation that comes together with its result.
            while going := [worker for worker in workers if not worker.done()]:
                for worker in going:
                    worker.cancel()
                await asyncio.wait(going, timeout=0.1)
        for result in self._held:
            emit(result)
        if self._failed:
            raise DataError(
                f"data.answers.endpoints: {len(self._failed)} answers could not be had after {self._settings.retries} "
                f"retries, got {self._failed[-1]}; run again, all others are kept"
            )

    async def _work(self, endpoint: Endpoint) -> None:
        """One request after the other to an endpoint."""
        while not endpoint.given_up:
            wait = endpoint.resume_at - self._loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
                continue
            task = await self._pending.get()
            if endpoint.given_up or endpoint.resume_at > self._loop.time():
                self._pending.put_nowait(task)
                continue
            await self._pace()
            await self._try(endpoint, task)

    def _worker_ended(self, worker: asyncio.Task[None]) -> None:
        """Passes on what ended a worker: settings that are wrong, or a fault of ours."""
        error = None if worker.cancelled() else worker.exception()
        if error is not None and not self._finished.done():
            self._finished.set_exception(error)

    async def _pace(self) -> None:
        """Waits for the next start that the rate allows."""
        start = max(self._next_start, self._loop.time())
        self._next_start = start + self._interval
        if self._interval:
            await asyncio.sleep(start - self._loop.time())

    async def _try(self, endpoint: Endpoint, task: _Task[J]) -> None:
        rounds = endpoint.rounds
        try:
            result = await self._send(endpoint, task.job)
        except FaultError as fault:
            if rounds == endpoint.rounds and (fault.of_endpoint or id(task) not in endpoint.failing):
                self._endpoint_failed(endpoint, fault)
            endpoint.failing.add(id(task))
            self._retry(task, fault, endpoint)
        except RefusedError as error:
            endpoint.succeeded()
            # Refusals count when others succeed; else what is wrong is in every request.
            self._held.append(self._refuse(task.job))
            if len(self._held) >= MAX_REFUSED:
                raise DataError(
                    f"data.answers: {endpoint.url} refuses one request after the other, got {error}; check the settings"
                ) from error
            self._end_one()
        else:
            endpoint.succeeded()
            for held in (*self._held, result):
                self._emit(held)
            self._held = []
            self._end_one()

    def _endpoint_failed(self, endpoint: Endpoint, fault: FaultError) -> None:
        """Pauses an endpoint, or gives it up."""
        endpoint.rounds += 1
        endpoint.failures += 1
        endpoint.last_fault = str(fault)
        too_late = fault.retry_after is not None and fault.retry_after > MAX_RETRY_AFTER_S
        if endpoint.failures > self._settings.retries or too_late:
            endpoint.given_up = True
            logger.warning("answers: %s is given up for this run: %s", endpoint.url, fault)
            self._check_alive()
            return
        # One failed request in passing does not hold up the others.
        steps = endpoint.failures if fault.of_endpoint else endpoint.failures - 1
        endpoint.resume_at = self._loop.time() + max(self._backoff(steps), fault.retry_after or 0.0)

    def _check_alive(self) -> None:
        if any(not endpoint.given_up for endpoint in self._endpoints) or self._finished.done():
            return
        faults = "; ".join(f"{endpoint.url}: {endpoint.last_fault}" for endpoint in self._endpoints)
        self._finished.set_exception(
            DataError(
                f"data.answers.endpoints: no server answers any more, got {faults}; run again when one does, all "
                "answers so far are kept"
            )
        )

    def _retry(self, task: _Task[J], fault: FaultError, endpoint: Endpoint) -> None:
        """Puts a request back: at once where the endpoint was at fault, else after a wait of its own."""
        if fault.of_endpoint:
            self._pending.put_nowait(task)
            return
        task.failures += 1
        if task.failures <= self._settings.retries:
            self._loop.call_later(self._backoff(task.failures), self._pending.put_nowait, task)
            return
        self._failed.append(f"{endpoint.url}: {fault}")
        self._end_one()
        if len(self._failed) >= MAX_FAILED and not self._finished.done():
            self._finished.set_result(None)

    def _backoff(self, failures: int) -> float:
        """Seconds to wait after so many failures in a row, with a spread that keeps requests from coming back together."""
        if failures < 1:
            return 0.0
        wait: float = min(MAX_BACKOFF_S, self._settings.backoff_s * 2.0 ** (failures - 1))
        return wait * self._jitter.uniform(0.75, 1.25)

    def _end_one(self) -> None:
        self._left -= 1
        if self._left == 0 and not self._finished.done():
            self._finished.set_result(None)
