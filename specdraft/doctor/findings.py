"""What a check found, and the registry of checks."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from specdraft.core.errors import ConfigError, SpecDraftError

if TYPE_CHECKING:
    from specdraft.doctor.case import Case

VERDICTS = ("ok", "warning", "fault")


@dataclass(frozen=True)
class Finding:
    """One result. verdict: ok, warning or fault. evidence: the figures, in words. fix: what to do; empty where nothing is.

    numbers: the same figures for programs. rows: places of the sample's rows that it is about. check, seconds: of the check
    that found it.
    """

    name: str
    verdict: str
    evidence: str
    fix: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)
    rows: tuple[int, ...] = ()
    check: str = ""
    seconds: float = 0.0


CheckFunction = Callable[["Case"], Iterable[Finding]]


@dataclass(frozen=True)
class Check:
    """A check by its name. order: checks run from low to high. summary: the first line of its docstring."""

    name: str
    order: int
    function: CheckFunction

    @property
    def summary(self) -> str:
        """What it looks at."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]


_CHECKS: dict[str, Check] = {}


def check(name: str, order: int) -> Callable[[CheckFunction], CheckFunction]:
    """Decorator that enters a function which yields findings of a case."""

    def enter(function: CheckFunction) -> CheckFunction:
        if name in _CHECKS:
            raise ValueError(f"two checks are called {name!r}")
        _CHECKS[name] = Check(name, order, function)
        return function

    return enter


@cache
def all_checks() -> dict[str, Check]:
    """Every check by name, in the order they run, found by importing each module of ``specdraft.doctor.checks``."""
    package = importlib.import_module("specdraft.doctor.checks")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"specdraft.doctor.checks.{module.name}")
    return {found.name: found for found in sorted(_CHECKS.values(), key=lambda found: found.order)}


def choose_checks(only: Sequence[str], skip: Sequence[str]) -> list[Check]:
    """The checks that are named, or all but those to skip.

    Raises:
        ConfigError: a name that no check has.
    """
    known = all_checks()
    for key, names in (("only", only), ("skip", skip)):
        for name in names:
            if name not in known:
                raise ConfigError(f"{key}: no such check, got {name!r}; use {', '.join(known)}")
    return [found for name, found in known.items() if (name in only if only else name not in skip)]


def run_checks(case: Case, checks: Sequence[Check], tell: Callable[[str], None] = lambda _: None) -> Iterator[Finding]:
    """The findings of every check, as they come. ``tell``: is told the name of the check that runs.

    An error that a user's settings or files cause in one check is its fault, and the others go on.
    """
    for found in checks:
        tell(found.name)
        start = time.perf_counter()
        try:
            findings = list(found.function(case))
        except SpecDraftError as error:
            problem, _, advice = str(error).rpartition("; ")
            findings = [Finding(found.name, "fault", problem or str(error), advice if problem else "")]
        seconds = (time.perf_counter() - start) / max(1, len(findings))
        yield from (replace(finding, check=found.name, seconds=seconds) for finding in findings)
