"""Progress of long work on a terminal; silence elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress(label: str, total: int | None = None, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar under ``label``. Yields a function that is told how much was done since it was last told.

    shown: False = no bar on a terminal either.
    """
    console = Console(stderr=True)
    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)
