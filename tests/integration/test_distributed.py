"""Two real processes (torchrun, gloo on the CPU) train as one process with twice the accumulation does."""

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
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]


def start(folder: Path, kind: str, settings: dict[str, Any]) -> subprocess.Popen[str]:
    """Two processes that run ``train_job``."""
    return spawn(["-m", "tests.integration.train_job", str(folder), kind, json.dumps(settings)])


def spawn(arguments: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*TORCHRUN, *arguments], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
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
    process = start(tmp_path / "two", kind, {**common, "expect_processes": 2})
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


def test_a_signal_to_one_rank_stops_both(tmp_path: Path) -> None:
    """Both ranks save one checkpoint at the same step; two processes then continue from it."""
    settings = {"expect_processes": 2, "delay_s": 0.2, "trainer": {"epochs": 50}, "batch_size": 2}
    process = start(tmp_path, "medusa", settings)
    deadline = time.monotonic() + 60
    while not (tmp_path / "metrics.jsonl").exists() or len(metrics(tmp_path, "step")) < 2:
        assert time.monotonic() < deadline, "no step within a minute"
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(max(map(int, children)), signal.SIGTERM)
    code, results, err = finish(process)
    assert code == 0, err
    assert [result["stopped"] for result in results] == [True, True]
    assert results[0]["state"] == results[1]["state"]
    (newest, *_) = list_checkpoints(tmp_path / "checkpoints")
    saved = read_checkpoint(newest)
    assert saved.state.step == results[0]["state"]["step"]
    assert len(saved.rng) == 2
    settings = {"expect_processes": 2, "trainer": {"epochs": 50, "max_steps": saved.state.step + 2}, "batch_size": 2}
    code, results, err = finish(start(tmp_path, "medusa", {**settings, "resume": "must"}))
    assert code == 0, err
    assert [result["state"]["step"] for result in results] == [saved.state.step + 2] * 2


def test_an_error_of_rank_0_ends_both(tmp_path: Path) -> None:
    """A checkpoint that cannot be written is one error, and no rank is left waiting."""
    (tmp_path / "checkpoints").write_text("in the way")
    code, results, err = finish(start(tmp_path, "medusa", {"expect_processes": 2, "trainer": {"max_steps": 1}}))
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
