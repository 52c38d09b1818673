"""What a run shows of itself: metrics, where the time goes, the bar, and the table of parameters."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from torch import nn

from specdraft.heads.base import DraftHead
from specdraft.losses.metrics import StepStats
from specdraft.train.state import sum_over_ranks

PHASES = ("data", "target", "draft", "optimizer")


class Meter:
    """Collects what is logged between two lines of metrics, in this process.

    Phases: data (collating a window), target (its forward), draft (head, loss and their backward), optimizer.
    On CUDA they are timed by events on the stream, so that the host does not wait; elsewhere by the clock.
    num_depths: ``HeadConfig.trained_depths``.
    """

    def __init__(self, device: torch.device, num_depths: int) -> None:
        self._cuda = device.type == "cuda"
        self._zeros = StepStats.zeros(num_depths).pack().to(device)
        self._total = dict.fromkeys((*PHASES, "seconds", "tokens"), 0.0)
        self._reset()

    def _reset(self) -> None:
        self._stats = self._zeros.clone()
        self._loss = self._tokens = 0.0
        self._steps = 0
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times what runs inside."""
        if self._cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
        else:
            start = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside (saving, measuring acceptance) counts in no rate and no share."""
        start = time.perf_counter()
        yield
        self._start += time.perf_counter() - start

    @property
    def seconds(self) -> float:
        """Time of training in this process, without what was paused."""
        return self._total["seconds"] + time.perf_counter() - self._start

    def add_stats(self, stats: StepStats) -> None:
        """Counts of one micro-batch of this rank."""
        self._stats += stats.pack()

    def add_step(self, loss: float, tokens: float) -> None:
        """An optimizer step: its loss and its tokens, both over all ranks."""
        self._loss += loss
        self._tokens += tokens
        self._steps += 1

    def collect(self, accelerator: Accelerator) -> dict[str, float]:
        """Metrics since the last call, over all ranks (time and memory: of this one). Every rank must call it."""
        packed = sum_over_ranks(accelerator, self._stats.flatten().tolist())
        stats = StepStats.unpack(torch.tensor(packed, dtype=torch.float64).view_as(self._zeros))
        if self._cuda:
            torch.cuda.synchronize()
        for name, begin, end in self._events:
            self._seconds[name] += begin.elapsed_time(end) / 1000
        elapsed = time.perf_counter() - self._start
        values = {"loss": self._loss / max(1, self._steps)}
        values |= {f"agreement/{k + 1}": value for k, value in enumerate(stats.agreement)}
        values["expected_acceptance_length"] = stats.expected_acceptance_length
        values["tokens_per_s"] = self._tokens / elapsed
        values |= {f"time/{name}": seconds / elapsed for name, seconds in self._seconds.items()}
        values["peak_memory_gib"] = peak_memory_bytes(self._cuda) / 2**30
        for name, amount in {**self._seconds, "seconds": elapsed, "tokens": self._tokens}.items():
            self._total[name] += amount
        self._reset()
        return values

    def totals(self) -> dict[str, float]:
        """Up to the last ``collect``: seconds of training without what was paused, tokens, shares of time, peak memory."""
        seconds = self._total["seconds"]
        shares = {f"time/{name}": self._total[name] / seconds if seconds else 0.0 for name in PHASES}
        memory = peak_memory_bytes(self._cuda) / 2**30
        return {"seconds": seconds, "tokens": self._total["tokens"], "peak_memory_gib": memory, **shares}


def peak_memory_bytes(cuda: bool) -> float:
    """The most memory that this process has held so far: allocated on its CUDA device, else resident on the host."""
    if cuda:
        return float(torch.cuda.max_memory_allocated())
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


class Display:
    """Lines of metrics and, on a terminal, a bar with the estimated time left below them. Rank 0 only."""

    def __init__(self, total_steps: int | None, step: int, is_main_process: bool) -> None:
        self._quiet = not is_main_process
        console = Console(quiet=self._quiet)
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=self._quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=total_steps, completed=step)

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self) -> None:
        """One optimizer step more."""
        self._bar.advance(self._task)

    def line(self, text: str) -> None:
        """A line above the bar."""
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One line of metrics; metrics per depth share one entry."""
        shown: dict[str, list[str]] = {}
        for name, value in values.items():
            base, _, last = name.rpartition("/")
            shown.setdefault(base if last.isdigit() else name, []).append(f"{value:.4g}")
        self.line(f"step {step}  " + "  ".join(f"{name} {' '.join(texts)}" for name, texts in shown.items()))


def parameter_table(target: nn.Module, head: DraftHead) -> Table:
    """What is trained, what is frozen and shared, and what a saved head holds; with parameter counts."""
    table = Table(title="Parameters")
    for column in ("module", "parameters", "trained", "saved with the head"):
        table.add_column(column, justify="right" if column == "parameters" else "left")

    def row(name: str, module: nn.Module, saved: bool) -> None:
        count = sum(p.numel() for p in module.parameters())
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        status = "yes" if count and trained == count else f"{trained:,}" if trained else "frozen"
        table.add_row(name, f"{count:,}", status, "yes" if saved else "no, shared with the target")

    row(f"target {head.spec.name}", target, False)
    for name, module in head.named_children():
        if any(True for _ in module.parameters()):
            row(f"head.{name}", module, True)
    table.add_row(
        "all of the head", f"{sum(p.numel() for p in head.parameters()):,}", f"{head.num_parameters:,}", "yes"
    )
    return table
