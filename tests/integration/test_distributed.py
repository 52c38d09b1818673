"""Real processes (torchrun, gloo on the CPU) train as one process with as many rows a step does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from specdraft.heads.base import head_kinds
from specdraft.heads.storage import load_head
from specdraft.train.checkpoint import list_checkpoints, read_checkpoint
from specdraft.train.loop import train
from tests.tiny import tiny_target
from tests.training import make_rows, make_run, weights

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]


def start(folder: Path, kind: str, settings: dict[str, Any], num_processes: int = 2) -> subprocess.Popen[str]:
    """Processes that run ``train_job``."""
    settings = {**settings, "expect_processes": num_processes}
    return spawn(["-m", "tests.integration.train_job", str(folder), kind, json.dumps(settings)], num_processes)


def spawn(arguments: list[str], num_processes: int = 2, launcher: list[str] | None = None) -> subprocess.Popen[str]:
    """Processes of torchrun, or of another launcher that knows how many."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*(launcher or [*TORCHRUN, str(num_processes)]), *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 120) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, the line of every rank by rank, and stderr."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"the processes hang\n{out}\n{err}")
    results = [json.loads(line.split(" ", 1)[1]) for line in out.splitlines() if line.startswith("RESULT ")]
    return process.returncode, sorted(results, key=lambda result: int(result["rank"])), err


def metrics_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def metrics(folder: Path, name: str) -> list[float]:
    return [line[name] for line in metrics_lines(folder)]


@pytest.mark.parametrize("kind", list(head_kinds()))
def test_two_processes_equal_one_with_twice_the_accumulation(tmp_path: Path, kind: str) -> None:
    """Rows of unequal length, a last step in which one rank has no work, and a rank without supervision."""
    common = {"num_rows": 11, "masked": [0, 3, 4], "trainer": {"epochs": 2, "accumulation_steps": 2}}
    process = start(tmp_path / "two", kind, common)
    single = make_run(
        tmp_path / "one",
        kind=kind,
        rows=make_rows(11, masked=(0, 3, 4)),
        trainer={"epochs": 2, "accumulation_steps": 4},
    )
    train(single)
    code, results, err = finish(process)
    assert code == 0, err
    assert [result["rank"] for result in results] == [0, 1]
    assert results[0]["state"] == results[1]["state"]
    assert results[0]["state"]["step"] == 6
    assert results[0]["state"]["tokens"] == 2 * sum(len(row.input_ids) for row in make_rows(11))
    two = weights(load_head(tmp_path / "two/last"))
    start_weights = weights(make_run(tmp_path / "fresh", kind=kind).head)
    for name, value in weights(single.head).items():
        torch.testing.assert_close(two[name], value, atol=1e-5, rtol=1e-4)
    assert any(not torch.equal(value, start_weights[name]) for name, value in two.items())
    assert metrics(tmp_path / "two", "lr") == metrics(tmp_path / "one", "lr")
    for name in ("loss", "grad_norm", "expected_acceptance_length", "tokens"):
        assert metrics(tmp_path / "two", name) == pytest.approx(metrics(tmp_path / "one", name), rel=1e-4)
    assert {path.name for path in (tmp_path / "two").iterdir()} == {"checkpoints", "last", "best", "metrics.jsonl"}


@pytest.mark.parametrize(("settings", "atol"), [({}, 2e-5), ({"optimizer": "muon"}, 1e-3)], ids=["adamw", "muon"])
def test_four_processes_equal_one(tmp_path: Path, settings: dict[str, Any], atol: float) -> None:
    """Packed rows, averaged weights, and in the last step three ranks without work.

    Muon's iteration runs in bfloat16, which makes more of the order in which gradients are added up.
    """
    job = {"num_rows": 9, "capacity": 20, "optim": settings, "trainer": {"epochs": 2, "ema_decay": 0.5}}
    process = start(tmp_path / "four", "eagle3", job, 4)
    trainer = {"epochs": 2, "ema_decay": 0.5, "accumulation_steps": 4}
    single = make_run(tmp_path / "one", kind="eagle3", rows=make_rows(9), optim=settings, trainer=trainer, capacity=20)
    train(single)
    code, results, err = finish(process)
    assert code == 0, err
    assert [result["state"] for result in results] == [results[0]["state"]] * 4
    assert [result["threads"] for result in results] == [[]] * 4
    four = weights(load_head(tmp_path / "four/last"))
    for name, value in weights(single.head).items():
        torch.testing.assert_close(four[name], value, atol=atol, rtol=1e-3)
    assert metrics(tmp_path / "four", "loss") == pytest.approx(metrics(tmp_path / "one", "loss"), rel=1e-4)


def test_a_checkpoint_continues_at_another_number_of_processes(tmp_path: Path) -> None:
    """Four ranks, then one, then two, each with as many rows a step: the losses of one process all along."""
    rows = make_rows(12)
    settings: dict[str, Any] = {"num_rows": 12}
    parts = ((4, 1, 2, "never"), (1, 4, 3, "must"), (2, 2, 6, "must"))
    for num_processes, accumulation_steps, max_steps, resume in parts:
        trainer = {"epochs": 2, "accumulation_steps": accumulation_steps, "max_steps": max_steps}
        schedule = {"schedule": "constant", "warmup_ratio": 0.0}
        if num_processes == 1:
            train(make_run(tmp_path / "run", kind="eagle3", rows=rows, trainer=trainer, resume=resume, optim=schedule))
            continue
        job = {**settings, "trainer": trainer, "resume": resume, "optim": schedule}
        code, results, err = finish(start(tmp_path / "run", "eagle3", job, num_processes))
        assert code == 0, err
        assert results[0]["state"]["step"] == max_steps
    trainer = {"epochs": 2, "accumulation_steps": 4}
    single = make_run(
        tmp_path / "one", kind="eagle3", rows=rows, trainer=trainer, optim={"schedule": "constant", "warmup_ratio": 0.0}
    )
    train(single)
    assert metrics(tmp_path / "run", "step") == list(range(1, 7))
    assert metrics(tmp_path / "run", "loss") == pytest.approx(metrics(tmp_path / "one", "loss"), rel=1e-4)
    saved = weights(load_head(tmp_path / "run/last"))
    for name, value in weights(single.head).items():
        torch.testing.assert_close(saved[name], value, atol=2e-5, rtol=1e-3)


def children_of(process: subprocess.Popen[str]) -> list[int]:
    return sorted(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))


def wait_for_steps(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while not (folder / "metrics.jsonl").exists() or len(metrics(folder, "step")) < count:
        assert time.monotonic() < deadline, "no step within a minute"
        time.sleep(0.1)


def test_killing_one_rank_ends_the_job_and_its_checkpoint_continues(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"batch_size": 2, "trainer": {"epochs": 50, "save_every": 1, "keep_checkpoints": 3}}
    process = start(tmp_path, "medusa", {**settings, "delay_s": 0.2})
    wait_for_steps(tmp_path, 3)
    killed = time.monotonic()
    os.kill(children_of(process)[-1], signal.SIGKILL)
    code, results, err = finish(process, timeout_s=60)
    assert time.monotonic() - killed < 60
    assert code != 0
    assert results == []
    assert "SIGKILL" in err or "Signal 9" in err
    step = read_checkpoint(list_checkpoints(tmp_path / "checkpoints")[0]).state.step
    assert step >= 2
    settings["trainer"]["max_steps"] = step + 2
    code, results, err = finish(start(tmp_path, "medusa", {**settings, "resume": "must"}))
    assert code == 0, err
    assert [result["state"]["step"] for result in results] == [step + 2] * 2


def test_a_signal_to_one_rank_stops_both(tmp_path: Path) -> None:
    """Both ranks save one checkpoint at the same step; two processes then continue from it."""
    process = start(tmp_path, "medusa", {"delay_s": 0.2, "trainer": {"epochs": 50}, "batch_size": 2})
    wait_for_steps(tmp_path, 2)
    os.kill(children_of(process)[-1], signal.SIGTERM)
    code, results, err = finish(process)
    assert code == 0, err
    assert [result["stopped"] for result in results] == [True, True]
    assert results[0]["state"] == results[1]["state"]
    (newest, *_) = list_checkpoints(tmp_path / "checkpoints")
    saved = read_checkpoint(newest)
    assert saved.state.step == results[0]["state"]["step"]
    assert len(saved.rng) == 2
    settings = {"trainer": {"epochs": 50, "max_steps": saved.state.step + 2}, "batch_size": 2}
    code, results, err = finish(start(tmp_path, "medusa", {**settings, "resume": "must"}))
    assert code == 0, err
    assert [result["state"]["step"] for result in results] == [saved.state.step + 2] * 2


def test_an_error_of_rank_0_ends_both(tmp_path: Path) -> None:
    """A checkpoint that cannot be written is one error, and no rank is left waiting."""
    (tmp_path / "checkpoints").write_text("in the way")
    code, results, err = finish(start(tmp_path, "medusa", {"trainer": {"max_steps": 1}}))
    assert code != 0
    assert results == []
    assert err.count("CheckpointError: output_dir: the checkpoint of step 1 could not be saved") == 2


def test_train_py_under_a_launcher_makes_one_folder(tmp_path: Path) -> None:
    """``torchrun train.py``: data prepared and answered by both ranks, one folder, and one refusal the second time."""
    target = tiny_target("llama")
    assert target.tokenizer is not None
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    arguments = [
        str(ROOT / "train.py"),
        "name=two",
        f"output_dir={tmp_path / 'outputs'}",
        f"target.name={tmp_path / 'target'}",
        "target.device=cpu",
        "head=medusa",
        "data.limit=8",
        "data.max_length=400",
        "data.max_new_tokens=8",
        "data.batch_size=2",
        "trainer.epochs=1",
        "trainer.eval_prompts=1",
        "trainer.eval_max_new_tokens=4",
        "trainer.log_every=1",
    ]
    code, _, err = finish(spawn(arguments))
    assert code == 0, err
    assert sorted(path.name for path in (tmp_path / "outputs").iterdir()) == ["data", "two"]
    assert json.loads((tmp_path / "outputs/two/environment.json").read_text())["processes"] == 2
    saved = read_checkpoint(list_checkpoints(tmp_path / "outputs/two/checkpoints")[0])
    assert len(saved.rng) == 2
    assert saved.run["micro_batches_per_step"] == 2
    assert len([line for line in metrics_lines(tmp_path / "outputs/two") if "loss" in line]) == saved.state.step
    code, _, err = finish(spawn(arguments))
    assert code != 0
    assert err.count("specdraft: error: resume: the run's folder") == 1
