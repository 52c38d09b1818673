"""Launches with FSDP 2 (gloo on the CPU): the target is sharded, and training is that of one process."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from specdraft.cli.main import main
from specdraft.config.paths import config_dir
from specdraft.heads.storage import load_head
from specdraft.train.checkpoint import list_checkpoints, read_checkpoint
from specdraft.train.loop import train
from tests.integration.test_distributed import (
    ROOT,
    children_of,
    finish,
    metrics,
    metrics_lines,
    spawn,
    start,
    wait_for_steps,
)
from tests.tiny import tiny_target
from tests.training import acceptance, make_rows, make_run, target, weights

KINDS = ["llama", "gemma2", "gpt2", "mixtral"]
"""A plain one; scaled embeddings, soft-caps and windows; tied weights and buffers in the layers; packed experts."""
LIMIT_S = 300
CONSTANT = {"schedule": "constant", "warmup_ratio": 0.0}


@pytest.fixture(autouse=True)
def _launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``accelerate launch`` sets with configs/accelerate/fsdp2.yaml, for the processes that are started."""
    monkeypatch.setenv("FSDP_VERSION", "2")


@pytest.fixture
def sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is run in this process, which would read it, too."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")


def save(kind: str, folder: Path) -> None:
    saved = tiny_target(kind)
    assert saved.tokenizer is not None
    saved.model.save_pretrained(folder)
    saved.tokenizer.save_pretrained(folder)


def test_what_a_sharded_target_computes(tmp_path: Path, sharded: None) -> None:
    """Bit by bit what the whole one does, from half of the layers' weights each, with other numbers of forwards."""
    for kind in KINDS:
        save(kind, tmp_path / kind)
    code, results, err = finish(spawn(["-m", "tests.integration.sharding_job", str(tmp_path), *KINDS]), LIMIT_S)
    assert code == 0, err
    assert [result["rank"] for result in results] == [0, 1]
    for result in results:
        for kind in KINDS:
            found = result["found"][kind]
            assert all(found["equal"]), kind
            assert len(found["equal"]) == 4 - result["rank"]
            assert found["share"] == pytest.approx(0.5, abs=0.02), kind
            assert found["spec"], kind
            assert found["last_layer"] is (True if kind == "llama" else None), kind
            assert found["error"] == "rank 0: failed, got nothing; try again"
            assert found["after"], kind


def single(folder: Path, num_rows: int, masked: tuple[int, ...] = (), **settings: Any) -> Any:
    """The run of one process with a whole target."""
    run = make_run(folder, kind="eagle3", rows=make_rows(num_rows, masked), evaluate=acceptance(target()), **settings)
    train(run)
    return run


@pytest.mark.parametrize(("num_processes", "optimizer", "atol"), [(2, "adamw", 2e-5), (4, "muon", 1e-3)])
def test_training_is_that_of_one_process(
    tmp_path: Path, num_processes: int, optimizer: str, atol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks without supervised tokens, without rows, with features in memory that others lack; acceptance on rank 0."""
    trainer = {"epochs": 2, "ema_decay": 0.5, "feature_memory_gib": 1e-5}
    common: dict[str, Any] = {"optim": {"optimizer": optimizer}, "capacity": 20}
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    job = {"num_rows": 9, "masked": [0, 3], "measure": True, "trainer": trainer, **common}
    process = start(tmp_path / "many", "eagle3", job, num_processes)
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    one = single(tmp_path / "one", 9, (0, 3), trainer={**trainer, "accumulation_steps": num_processes}, **common)
    code, results, err = finish(process, LIMIT_S)
    assert code == 0, err
    assert [result["state"] for result in results] == [results[0]["state"]] * num_processes
    assert [result["threads"] for result in results] == [[]] * num_processes
    many = weights(load_head(tmp_path / "many/last"))
    for name, value in weights(one.head).items():
        torch.testing.assert_close(many[name], value, atol=atol, rtol=1e-3)
    losses = [[line["loss"] for line in metrics_lines(tmp_path / run) if "loss" in line] for run in ("many", "one")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    measured = [line for line in metrics_lines(tmp_path / "many") if "eval/acceptance_length" in line]
    assert len(measured) == 2


def test_a_checkpoint_continues_sharded_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that share the target, one that has it whole, two again: the losses of one process all along."""
    for num_processes, max_steps, resume in ((2, 2, "never"), (1, 3, "must"), (2, 6, "must")):
        trainer = {"epochs": 2, "accumulation_steps": 4 // num_processes, "max_steps": max_steps}
        if num_processes == 1:
            rows = make_rows(12)
            train(make_run(tmp_path / "run", kind="eagle3", rows=rows, trainer=trainer, resume=resume, optim=CONSTANT))
            continue
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        process = start(
            tmp_path / "run", "eagle3", {"num_rows": 12, "trainer": trainer, "resume": resume, "optim": CONSTANT}
        )
        monkeypatch.delenv("ACCELERATE_USE_FSDP")
        code, results, err = finish(process, LIMIT_S)
        assert code == 0, err
        assert results[0]["state"]["step"] == max_steps
    one = make_run(
        tmp_path / "one",
        kind="eagle3",
        rows=make_rows(12),
        trainer={"epochs": 2, "accumulation_steps": 4},
        optim=CONSTANT,
    )
    train(one)
    assert metrics(tmp_path / "run", "loss") == pytest.approx(metrics(tmp_path / "one", "loss"), rel=1e-4)
    saved = weights(load_head(tmp_path / "run/last"))
    for name, value in weights(one.head).items():
        torch.testing.assert_close(saved[name], value, atol=2e-5, rtol=1e-3)


def test_killing_one_rank_ends_the_job(tmp_path: Path, sharded: None) -> None:
    """The other rank waits for weights that do not come; the launcher ends it, and a checkpoint is there."""
    trainer = {"epochs": 50, "save_every": 1}
    process = start(tmp_path, "medusa", {"batch_size": 2, "trainer": trainer, "delay_s": 0.2})
    wait_for_steps(tmp_path, 2)
    killed = time.monotonic()
    os.kill(children_of(process)[-1], signal.SIGKILL)
    code, results, err = finish(process, LIMIT_S)
    assert time.monotonic() - killed < 60
    assert (code != 0, results) == (True, [])
    assert "SIGKILL" in err or "Signal 9" in err
    assert read_checkpoint(list_checkpoints(tmp_path / "checkpoints")[0]).state.step >= 1


def test_accelerate_launch_with_the_shipped_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are refused in one line; with data that are prepared, a head of 2 processes comes out, and its features."""
    save("llama", tmp_path / "target")
    arguments = [
        "name=two",
        f"output_dir={tmp_path / 'outputs'}",
        f"target.name={tmp_path / 'target'}",
        "target.device=cpu",
        "head=eagle3",
        "head.draft_vocab_size=48",
        "data.limit=8",
        "data.max_length=400",
        "data.max_new_tokens=8",
        "features=offline",
        "trainer.epochs=1",
        "trainer.eval_prompts=1",
        "trainer.eval_max_new_tokens=4",
        "trainer.log_every=1",
    ]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    launcher += ["--config_file", str(config_dir() / "accelerate/fsdp2.yaml"), str(ROOT / "train.py")]
    code, _, err = finish(spawn(arguments, launcher=launcher), LIMIT_S)
    assert code != 0
    assert "specdraft: error: data.regenerate: a sharded target" in err
    assert main(["prepare", *(word for word in arguments if not word.startswith("features"))]) == 0
    launcher[-1] = str(ROOT / "tests/integration/launch_job.py")
    code, results, err = finish(spawn(arguments, launcher=launcher), LIMIT_S)
    assert code == 0, err
    assert [result["threads"] for result in results] == [[], []]
    run = tmp_path / "outputs/two"
    assert json.loads((run / "environment.json").read_text())["processes"] == 2
    saved = read_checkpoint(list_checkpoints(run / "checkpoints")[0])
    assert saved.run["micro_batches_per_step"] == 2
    assert "eval/acceptance_length" in (run / "metrics.jsonl").read_text()
    assert load_head(run / "best").config.kind == "eagle3"
