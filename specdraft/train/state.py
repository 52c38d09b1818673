"""Where a training run stands: counters, random states, the request to stop, agreement of the ranks."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from specdraft.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    SpecDraftError,
    UnsupportedTargetError,
)

T = TypeVar("T")

_ERRORS = (CheckpointError, ConfigError, DataError, UnsupportedTargetError, SpecDraftError)


@dataclass
class TrainState:
    """Counters of a run; a checkpoint holds them. The learning rate is a function of ``step``."""

    step: int = 0
    """Optimizer steps done, skipped ones included."""
    epoch: int = 0
    """Epochs completed."""
    step_in_epoch: int = 0
    """Optimizer steps done in the present epoch: with ``epoch`` the position in the data."""
    tokens: int = 0
    """Real tokens seen by all ranks, prompts included."""
    seconds: float = 0.0
    """Time of training, without measuring and saving, of all processes that continued it (a mean over ranks)."""
    skipped: int = 0
    """Steps without an update: not finite, or nothing supervised."""
    evaluated_step: int = -1
    """The step of the last measurement of acceptance."""
    best_value: float = 0.0
    """Highest measured acceptance length; 0 before the first measurement."""
    best_step: int = -1
    """The step of the best head."""
    stale: int = 0
    """Measurements since then."""

    def advance(self, steps_of_epoch: int) -> None:
        """One optimizer step more, in an epoch of so many."""
        self.step += 1
        self.step_in_epoch += 1
        if self.step_in_epoch == steps_of_epoch:
            self.epoch, self.step_in_epoch = self.epoch + 1, 0

    def is_due(self, every: int | None) -> bool:
        """Whether what is done every so many steps (None: at the end of every epoch) is due."""
        return self.step_in_epoch == 0 if every is None else self.step % every == 0


@dataclass(frozen=True)
class EvalPoint:
    """Acceptance measured by decoding held-out prompts.

    acceptance_length: tokens per target forward, the bonus token included, pooled over steps.
    acceptance_rate: per depth, accepted given that all before were.
    num_steps, num_tokens: speculative steps and the tokens they emitted.
    """

    acceptance_length: float
    acceptance_rate: list[float]
    num_steps: int
    num_tokens: int

    def values(self) -> dict[str, float]:
        """The metrics under the names they are logged with."""
        rates = {f"eval/acceptance_rate/{k + 1}": rate for k, rate in enumerate(self.acceptance_rate)}
        return {"eval/acceptance_length": self.acceptance_length, "eval/num_tokens": self.num_tokens, **rates}


def rng_state() -> dict[str, Any]:
    """The states of the generators of python, numpy and torch in this process, as JSON values."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
        "cuda": [bytes(state.tolist()).hex() for state in torch.cuda.get_rng_state_all()],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Inverse of ``rng_state``; the states of accelerators are set for as many as there are."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_bytes_tensor(state["torch"]))
    for device, value in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
        torch.cuda.set_rng_state(_bytes_tensor(value), device)


def _bytes_tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)


@contextmanager
def kept_rng() -> Iterator[None]:
    """Whatever draws random numbers inside leaves the generators as they were."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


class StopSignal:
    """Inside it, SIGTERM and SIGINT ask the run to stop after the step; a second one ends it at once."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        # Python delivers signals to the main thread only and refuses handlers elsewhere.
        for number in self.SIGNALS if threading.current_thread() is threading.main_thread() else ():
            self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


def on_main(accelerator: Accelerator, action: Callable[[], T], inside: AbstractContextManager[None] | None = None) -> T:
    """Runs ``action`` on rank 0 while the others wait; every rank gets its result, or raises its error.

    inside: every rank enters it, around the action or nothing. The result is pickled for the other ranks: return something
    small. Without the exchange, a rank that meets a user's error (a full disk, an occupied folder) would leave the others
    waiting.
    """
    if accelerator.num_processes == 1:
        return action()
    box: list[Any] = [None, None, None]
    with inside or nullcontext():
        if accelerator.is_main_process:
            try:
                box[0] = action()
            except SpecDraftError as error:
                box[1:] = [type(error).__name__, str(error)]
    broadcast_object_list(box, from_process=0)
    if box[1] is not None:
        raise next((e for e in _ERRORS if e.__name__ == box[1]), SpecDraftError)(box[2])
    result: T = box[0]
    return result


def sum_over_ranks(accelerator: Accelerator, values: list[float]) -> list[float]:
    """Element-wise sum of a few numbers over all ranks."""
    if accelerator.num_processes == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=accelerator.device)
    total: list[float] = accelerator.reduce(tensor, reduction="sum").tolist()
    return total
