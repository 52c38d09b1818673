"""``specdraft compare``: several heads, each trained and measured in a process of its own, in one table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdraft.config.comparison import TRAINING_NAME, CompareRun, head_runs, read_training, settings_of_training
from specdraft.core.errors import SpecDraftError

if TYPE_CHECKING:
    from rich.console import Console

    from specdraft.config.experiment import PipelineRun

JSON_NAME, TABLE_NAME = "comparison.json", "comparison.md"
TASK, ERROR = "task.json", "error.txt"
INTERRUPTED = 130
POLL_S = 0.2


def run(cfg: CompareRun) -> None:
    """Trains and measures what is not finished, prints the table of all, and writes comparison.json and comparison.md.

    A process for each head: its peak memory is its own, and nothing of one head slows down the next.

    Raises:
        SpecDraftError: see the messages; heads that are finished stay finished.
        KeyboardInterrupt: stopped by a signal, after the checkpoint of the head in training.
    """
    from specdraft.cli.run import read_results
    from specdraft.eval.report import report_console

    console = report_console()
    wanted = head_runs(cfg)
    settings = {found.name: settings_of_training(cfg, found) for found in wanted}
    runs = _fitted(cfg, wanted, console) if cfg.compare.budget == "parameters" else wanted
    for number, found in enumerate(runs, 1):
        where = f"head {number} of {len(runs)}: {found.name}"
        if read_training(found.folder) is not None and read_results(found) is not None:
            console.print(f"{where} is finished", markup=False)
            continue
        console.print(f"{where}, in {found.folder}", markup=False)
        sys.stdout.flush()  # what follows is the other process's
        _in_own_process(found, settings[found.name])
    results = [_results(found) for found in runs]
    report(cfg, results, console)


def report(cfg: CompareRun, results: Sequence[dict[str, Any]], console: Console) -> None:
    """The tables on the terminal and in comparison.md, and everything in comparison.json."""
    from rich.console import Console

    from specdraft.eval.acceptance import SCHEMA
    from specdraft.eval.drift import drift_line
    from specdraft.eval.report import PLAIN_WIDTH, budget_table, print_notes, write_results

    budget = {"of": cfg.compare.budget, "value": cfg.compare.value}
    path = write_results({"schema": SCHEMA, "budget": budget, "results": results}, cfg.folder / JSON_NAME)
    title = f"Equal budget: {cfg.compare.value:,.10g} {cfg.compare.budget} for each head"
    table = cfg.folder / TABLE_NAME
    with table.open("w", encoding="utf-8") as file:
        for out in (Console(file=file, width=PLAIN_WIDTH, highlight=False), console):
            out.print(title, style="bold", markup=False)
            for set_name in results[0]["sets"]:
                out.print()
                out.print(set_name, markup=False)
                out.print()
                out.print(budget_table(results, out, set_name))
            for one in results:
                if "drift" in one:
                    out.print(f"{one['name']}: {drift_line(one['drift'])}", markup=False, soft_wrap=True)
    for set_name in results[0]["sets"]:
        for one in results:
            print_notes(f"{one['name']}, {set_name}", one["sets"][set_name], console)
    console.print(f"results: {path}, {table}", markup=False)


def _fitted(cfg: CompareRun, runs: Sequence[PipelineRun], console: Console) -> list[PipelineRun]:
    """The runs with heads of the size that was asked for; the target's files are read, it is not loaded."""
    from specdraft.targets.weights import TargetFiles
    from specdraft.train.sizing import fit_size, num_parameters

    assert cfg.compare.value is not None
    spec = TargetFiles(runs[0].target.name, runs[0].target.revision).spec()
    fitted = []
    for found in runs:
        head = fit_size(found.head, spec, int(cfg.compare.value))
        setting = str(head.size_setting)
        console.print(
            f"{found.name}: head.{setting}={getattr(head, setting)}, {num_parameters(head, spec):,} parameters",
            markup=False,
        )
        fitted.append(replace(found, head=head))
    return fitted


def _results(found: PipelineRun) -> dict[str, Any]:
    """Name, cost of training and figures of a finished head."""
    from specdraft.cli.run import read_results

    training, figures = read_training(found.folder), read_results(found)
    if training is None or figures is None:
        raise SpecDraftError(f"compare: {found.folder} was changed meanwhile, got no results there; start it again")
    return {"name": found.name, "training": {k: v for k, v in training.items() if k != "settings"}, **figures}


def _in_own_process(found: PipelineRun, settings: dict[str, Any]) -> None:
    """Trains and measures one head; a signal to stop goes on to it, so that it leaves a checkpoint.

    Raises:
        SpecDraftError: it failed; a mistake of the user in its own words.
        KeyboardInterrupt: it was stopped.
    """
    from specdraft.config.store import save_resolved

    save_resolved(found, found.folder)
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory(prefix="specdraft-") as folder:
        (Path(folder) / TASK).write_text(json.dumps({"folder": str(found.folder), "settings": settings}))
        command = [sys.executable, "-m", __name__, folder]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        # In a session of its own, a key pressed at the terminal reaches it once: through us.
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        code = _wait(process)
        error = Path(folder) / ERROR
        if error.is_file():
            raise SpecDraftError(f"heads: {found.name}: {error.read_text()}")
    if code == INTERRUPTED:
        sys.stderr.write("specdraft: stopped; the same command continues\n")
        raise KeyboardInterrupt
    if code:
        raise SpecDraftError(f"compare: the process of {found.name} failed, got exit code {code}; see its output above")


def _wait(process: subprocess.Popen[bytes]) -> int:
    """The exit code of ``process``, which is asked to stop when we are, and ended when we are asked twice."""
    from specdraft.train.state import StopSignal

    try:
        with StopSignal() as asked:
            told = False
            while True:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(timeout=POLL_S)
                if asked.requested and not told:
                    process.send_signal(signal.SIGTERM)
                    told = True
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """What the process of one head runs; the word is a folder with its task."""
    from specdraft.config.store import compose_config, to_run

    folder = Path((sys.argv[1:] if argv is None else argv)[0])
    task = json.loads((folder / TASK).read_text())
    try:
        found: PipelineRun = to_run(
            "run", compose_config("run", [], config_dirs=[task["folder"]], config_name="config")
        )
        return finish_head(found, task["settings"])
    except SpecDraftError as error:
        (folder / ERROR).write_text(str(error))
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED


def finish_head(found: PipelineRun, settings: dict[str, Any]) -> int:
    """Trains the head if that is not finished, notes what it cost, and measures it. Returns the exit code."""
    import gc

    from specdraft.cli import evaluate
    from specdraft.cli.run import eval_settings
    from specdraft.cli.train import train_head
    from specdraft.core.files import write_json

    if read_training(found.folder) is None:
        result = train_head(found)
        if result.stopped:
            return INTERRUPTED
        state = result.state
        cost = {
            "steps": state.step,
            "tokens": state.tokens,
            "seconds": state.seconds,
            "tokens_per_s": state.tokens / state.seconds if state.seconds else None,
            "peak_memory_gib": result.totals["peak_memory_gib"],
        }
        write_json(found.folder / TRAINING_NAME, {**cost, "settings": settings})
        del result
        gc.collect()  # models are held by cycles of hooks
    evaluate.run(eval_settings(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
