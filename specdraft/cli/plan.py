"""``specdraft plan``: what a run will take, and the first lines of every long command."""

from __future__ import annotations

import io
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdraft.config.doctor import STDOUT, PlanRun
from specdraft.config.experiment import ExperimentRun
from specdraft.core.errors import ConfigError, DataError
from specdraft.data._features_config import FeaturesConfig

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from specdraft.plan.forecast import Forecast, Outlook
    from specdraft.plan.job import Job
    from specdraft.plan.times import Measured
    from specdraft.plan.workload import Workload

DECODED_PROMPTS = 2
"""Held-out prompts that are decoded to measure how long a measurement of acceptance takes."""


def run(cfg: PlanRun) -> None:
    """Prints the forecast; with ``steps`` the times are those of a short run of the same settings.

    Raises:
        ConfigError: the run fits neither here nor on a machine that was named; the setting to change is in the message.
        DataError, UnsupportedTargetError: the data or the target cannot be had.
    """
    from rich.console import Console

    from specdraft.plan.forecast import forecast
    from specdraft.plan.machines import gpu, size_text

    machines = [gpu(name) for name in cfg.machines]
    console = Console(highlight=False, soft_wrap=True, stderr=cfg.json == STDOUT)
    found = forecast(job_of(cfg, cfg.processes), machines)
    if cfg.steps and found.here.fits:
        console.print(f"measuring {cfg.steps} steps on {cfg.rows} conversations", markup=False)
        measured, workload = measure(cfg, found)
        found = found.with_measured(measured, workload)
    for line in found.lines():
        console.print(line, markup=False)
    console.print(outlook_table(found))
    if found.measured is not None:
        text = f"measured: peak memory {size_text(found.measured.peak_bytes)} in {found.measured.steps} steps on the sample"
        console.print(text, markup=False)
    write_json(cfg.json, found.as_dict())
    found.refuse(memory=not cfg.machines)
    check_machines(found)


def check_machines(found: Forecast) -> None:
    """Raises ConfigError where none of the machines that were named can take the run."""
    from specdraft.plan.forecast import memory_problem

    problems = [memory_problem(outlook, found.job) for outlook in found.outlooks[1:]]
    if problems and all(problems):
        raise ConfigError(str(problems[-1]))


def job_of(cfg: ExperimentRun, processes: int = 1) -> Job:
    """The settings that estimates need."""
    from specdraft.plan.job import Job
    from specdraft.train.sharding import asks_to_shard

    return Job(
        target=cfg.target,
        head=cfg.head,
        data=cfg.data,
        features=cfg.features,
        loss=cfg.loss,
        optim=cfg.optim,
        trainer=cfg.trainer,
        decode=cfg.decode,
        eval=cfg.eval,
        folder=cfg.folder,
        data_dir=cfg.data_dir,
        settings=asdict(cfg),
        processes=processes,
        is_sharded=processes > 1 and asks_to_shard(),
    )


def announce(cfg: ExperimentRun, console: Console, processes: int = 1) -> None:
    """The forecast from the settings alone, as the first lines of a long command.

    Raises:
        ConfigError, UnsupportedTargetError: the run cannot fit, and the setting to change; or the target cannot be had.
    """
    from specdraft.plan.forecast import forecast

    try:
        found = forecast(job_of(cfg, processes))
    except DataError:
        return  # preparing the data comes next, and says of each row what is wrong
    for line in found.lines():
        console.print(line, markup=False)
    found.refuse()


def outlook_table(found: Forecast) -> Table:
    """One column for each machine."""
    from rich.table import Table

    from specdraft.plan.machines import size_text, time_text

    def title(outlook: Outlook) -> str:
        if found.measured is not None and outlook is found.here:
            return f"{outlook.machine.name}\n({found.measured.steps} steps measured)"
        return f"{outlook.machine.name}\n({'estimated' if outlook.machine.measured else 'estimated, data sheet'})"

    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for outlook in found.outlooks:
        table.add_column(title(outlook), justify="right")
    rows: list[tuple[str, Sequence[str]]] = []
    names = [*asdict(found.here.memory), "peak"]
    memories = [outlook.memory.as_dict() for outlook in found.outlooks]
    rows += [(f"memory: {name.replace('_', ' ')}", [size_text(one[name]) for one in memories]) for name in names]
    rows.append(("memory: the device has", [size_text(outlook.machine.memory_bytes) for outlook in found.outlooks]))
    verdicts = ["yes" if o.fits and not o.is_tight else "barely" if o.fits else "no" for o in found.outlooks]
    rows.append(("fits", verdicts))
    times = [outlook.times.as_dict() for outlook in found.outlooks]
    rows += [(f"time: {name}", [time_text(one[name]) for one in times]) for name in times[0]]
    for name, cells in rows:
        table.add_row(name, *cells)
    return table


def write_json(where: str | None, value: Any) -> None:
    """To a file or, for ``-``, to stdout.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = json.dumps(value, indent=2, default=str) + "\n"
    if where == STDOUT:
        sys.stdout.write(text)
    elif where is not None:
        write_text("json", where, text)


def write_text(key: str, where: str, text: str) -> None:
    """Writes a file that the user named with the setting ``key``.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        Path(where).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{key}: cannot be written, got {where} ({error}); choose another file") from error


def measure(cfg: PlanRun, found: Forecast) -> tuple[Measured, Workload]:
    """Prepares a sample, trains ``steps`` steps on it and decodes held-out prompts, in a folder that is removed again.

    What the run would say of its steps is not shown.
    """
    import time

    from rich.console import Console

    from specdraft.cli.answers import answer_writer
    from specdraft.cli.train import acceptance, assemble
    from specdraft.data.prepare import prepare
    from specdraft.plan.measuring import Recorder, rates
    from specdraft.plan.times import answering_seconds
    from specdraft.plan.workload import sampled_workload
    from specdraft.targets.hf import load_target
    from specdraft.train.inputs import make_accelerator
    from specdraft.train.loop import train
    from specdraft.train.progress import peak_memory_bytes

    total = found.schedule.workload.num_conversations
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        sample = short_run(cfg, Path(folder), min(cfg.rows, total))
        accelerator = make_accelerator(sample.trainer, sample.target.device)
        target = load_target(replace(sample.target, device=str(accelerator.device)))
        start = time.perf_counter()
        data = prepare(sample.data, target, sample.data_dir, make_writer=answer_writer(cfg, target))
        prepared_s = time.perf_counter() - start
        inputs, target = assemble(sample, accelerator, Console(quiet=True), (target, data))
        recorder = Recorder()
        if train(replace(inputs, tracker=recorder)).stopped:
            raise KeyboardInterrupt
        decode_s = None
        evaluate = acceptance(
            replace(sample, trainer=replace(sample.trainer, eval_prompts=DECODED_PROMPTS)), target, inputs.head
        )
        if cfg.trainer.eval_prompts and evaluate is not None:
            start = time.perf_counter()
            tokens = evaluate(inputs.head).num_tokens
            decode_s = (time.perf_counter() - start) / max(1, tokens)
        workload = sampled_workload(
            data.lengths, data.manifest["num_supervised_tokens"], sample.data.limit or total, total, found.job
        )
        if found.schedule.workload.is_prepared:
            workload = found.schedule.workload
        written = workload.num_rows * workload.answer * (sample.data.limit or total) / total
        peak = peak_memory_bytes(accelerator.device.type == "cuda")
        # Of a sample of which all is one batch, the padding is not that of the run, whose batches are sorted by length.
        own = replace(workload, num_rows=len(workload.lengths))
        estimated = 0.0
        if cfg.data.answers.head is None and not workload.is_prepared:
            estimated = answering_seconds(found.job, found.sizes, own, found.here.machine)
        factor = prepared_s / estimated if estimated else None
        return rates(recorder, prepared_s / max(1.0, written), decode_s, peak, factor), workload


def short_run(cfg: PlanRun, folder: Path, rows: int) -> PlanRun:
    """The settings of the run on a sample, without what is done between steps."""
    trainer = replace(
        cfg.trainer,
        epochs=10_000,
        max_steps=cfg.steps,
        max_tokens=None,
        max_minutes=None,
        log_every=1,
        eval_every=None,
        save_every=None,
        eval_prompts=0,
        early_stop=None,
        feature_memory_gib=0.0,
        warm_start=None,
    )
    data = replace(cfg.data, limit=rows, cache_dir=str(folder / "data"))
    features = FeaturesConfig()
    return replace(
        cfg, output_dir=str(folder), name="sample", resume="never", trainer=trainer, data=data, features=features
    )
