"""`make demo`: trains the three kinds of head for the embedded target, measures them, and prints one table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from specdraft.cli.main import guarded

EXPERIMENTS = ("smollm2_medusa", "smollm2_eagle", "smollm2_eagle3")
"""They share target and data settings, so the data is prepared once."""


def main(overrides: Sequence[str] | None = None) -> int:
    """Runs the demo with Hydra overrides for every experiment; what an earlier run left is reused.

    Returns 0, or 1 when a head changed the target's output, or as ``cli.main.main`` for errors.
    """
    words = list(sys.argv[1:] if overrides is None else overrides)
    return guarded(lambda: demo(words))


def demo(overrides: Sequence[str]) -> int:
    """See ``main``."""
    from specdraft.cli.run import read_results
    from specdraft.config.overrides import prepare_overrides
    from specdraft.config.store import compose_config, to_run
    from specdraft.eval.prompts import set_name

    words = prepare_overrides("run", ["resume=auto", *overrides])
    # All settings are checked before the first minute of work.
    runs = [to_run("run", compose_config("run", [f"experiment={name}", *words])) for name in EXPERIMENTS]
    everything: list[dict[str, Any]] = []
    for run in runs:
        results = read_results(run)
        everything.append(results if results is not None else _train_and_measure(run))
    return _show(everything, set_name(runs[0].eval.prompts[0]))


def _train_and_measure(run: Any) -> dict[str, Any]:
    """One experiment, from data to results."""
    from specdraft.cli import run as pipeline
    from specdraft.core.errors import SpecDraftError

    pipeline.run(run)
    results = pipeline.read_results(run)
    if results is None:
        raise SpecDraftError(
            f"demo: the run was stopped, got {run.name} unfinished; start the demo again to continue it"
        )
    return results


def _show(results: Sequence[dict[str, Any]], set_name: str) -> int:
    """The table of all heads; 1 when an output differed."""
    from specdraft.eval.report import comparison_table, report_console

    console = report_console()
    console.print()
    console.print(comparison_table(results, console, set_name))
    figures = [one["sets"][set_name] for one in results]
    same = all(one["identical_outputs"] == one["num_prompts"] for one in figures)
    console.print(f"identical_outputs: {'all' if same else 'NOT all'}, in {results[0]['decode']['dtype']}")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
