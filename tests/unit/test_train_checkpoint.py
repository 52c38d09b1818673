"""Checkpoints: exact resume, atomic writes, torn files, retention, and which one a run continues from."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdraft.core.errors import CheckpointError
from specdraft.data.chat import TokenRow
from specdraft.heads import storage
from specdraft.heads.base import head_kinds
from specdraft.heads.storage import load_head
from specdraft.train import checkpoint as module
from specdraft.train.checkpoint import (
    HEAD_NAME,
    OPTIMIZER_NAME,
    RNG_NAME,
    STATE_NAME,
    Checkpoint,
    choose_checkpoint,
    list_checkpoints,
    optimizer_tensors,
    read_checkpoint,
    restore,
    save_checkpoint,
    update_state,
)
from specdraft.train.inputs import TrainInputs
from specdraft.train.loop import train
from specdraft.train.optim import build_optimizer
from specdraft.train.state import EvalPoint, TrainState, kept_rng, rng_state
from tests.training import make_head, make_rows, make_run, weights


class KilledError(Exception):
    """Stands for a kill: nothing between the step and the end of the process runs."""


def recorded(run: TrainInputs, stop_at: int | None = None) -> tuple[TrainInputs, list[int]]:
    """The run, noting the rows it asks for; asking for the window after ``stop_at`` of them ends it."""
    seen: list[int] = []

    def rows(ids: Sequence[int]) -> list[TokenRow]:
        if stop_at is not None and len(seen) >= stop_at:
            raise KilledError
        seen.extend(ids)
        return run.rows(ids)

    return replace(run, rows=rows), seen


def write(folder: Path, step: int, keep: int = 9) -> Path:
    """A checkpoint of an untrained head."""
    head = make_head()
    optimizer = build_optimizer(head, make_run(folder).optim)
    tensors = {name: value.clone() for name, value in head.state_dict().items()}
    saved = Checkpoint(TrainState(step=step), tensors, optimizer_tensors(head, optimizer), [rng_state()], {}, {})
    return save_checkpoint(folder / "checkpoints", saved, keep)


@pytest.mark.parametrize("kind", list(head_kinds()))
def test_resume_equals_the_uninterrupted_run(tmp_path: Path, kind: str) -> None:
    """Six steps straight, and four, a kill, fresh objects, and two more: bit by bit the same."""
    noise = {"input_noise": 0.3} if kind == "eagle" else {}
    common: dict[str, Any] = {"batch_size": 2, "rows": make_rows(9), "optim": {"weight_decay": 0.01}}
    trainer = {"epochs": 2, "save_every": 1, "accumulation_steps": 2, "max_steps": 6}

    def run(folder: str, resume: str = "never", stop_at: int | None = None) -> tuple[TrainInputs, list[int]]:
        head = make_head(kind, **noise)
        return recorded(make_run(tmp_path / folder, head=head, trainer=trainer, resume=resume, **common), stop_at)

    straight, straight_rows = run("straight")
    train(straight)
    first, first_rows = run("cut", stop_at=13)
    with pytest.raises(KilledError):
        train(first)
    assert [path.name for path in list_checkpoints(tmp_path / "cut/checkpoints")] == [
        "step-000004",
        "step-000003",
    ]
    torch.manual_seed(99)
    second, second_rows = run("cut", resume="must")
    state = train(second).state
    assert (state.step, state.epoch) == (6, 2)
    assert first_rows[:13] + second_rows == straight_rows
    assert all(torch.equal(value, weights(straight.head)[name]) for name, value in weights(second.head).items())
    states = [read_checkpoint(tmp_path / name / "checkpoints/step-000006") for name in ("straight", "cut")]
    assert states[0].optimizer.keys() == states[1].optimizer.keys() != set()
    assert all(torch.equal(value, states[1].optimizer[name]) for name, value in states[0].optimizer.items())
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("straight", "cut")]
    curves = [[(json.loads(line)["step"], json.loads(line)["loss"]) for line in each] for each in lines]
    assert curves[0] == curves[1]


def test_resume_of_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    def evaluate(head: Any) -> EvalPoint:
        calls.append(head)
        return EvalPoint(2.0, [1.0], 1, 1)

    calls: list[Any] = []
    first = make_run(tmp_path, trainer={"max_steps": 3}, evaluate=evaluate)
    train(first)
    second = make_run(tmp_path, trainer={"max_steps": 3}, evaluate=evaluate, resume="auto")
    state = train(second).state
    assert (state.step, state.best_step, state.best_value) == (3, 3, 2.0)
    assert len(calls) == 1
    assert all(torch.equal(value, weights(second.head)[name]) for name, value in weights(first.head).items())


def test_measurement_cut_short_is_done_again(tmp_path: Path) -> None:
    """A kill during an evaluation: the step is saved, and the resumed run measures it before it goes on."""

    def cut(head: Any) -> EvalPoint:
        raise KilledError

    settings = {"max_steps": 4, "eval_every": 2, "save_every": 2}
    with pytest.raises(KilledError):
        train(make_run(tmp_path, trainer=settings, evaluate=cut))
    state = train(
        make_run(tmp_path, trainer=settings, evaluate=lambda _: EvalPoint(1.5, [], 1, 1), resume="auto")
    ).state
    assert (state.step, state.best_step) == (4, 2)
    assert load_head(tmp_path / "best") is not None


def test_optimizer_state_follows_the_name(tmp_path: Path) -> None:
    """A parameter frozen before resuming does not shift the state of those after it."""
    run = make_run(tmp_path, kind="eagle", trainer={"max_steps": 2})
    train(run)
    saved = read_checkpoint(tmp_path / "checkpoints/step-000002")
    names = [name for name, _ in run.head.named_parameters()]
    assert {key.rpartition(":")[0] for key in saved.optimizer} == set(names)
    head = make_head("eagle")
    optimizer = build_optimizer(head, run.optim)
    restore(saved, head, optimizer, {}, 0)
    for name, parameter in head.named_parameters():
        assert torch.equal(optimizer.state[parameter]["exp_avg"], saved.optimizer[f"{name}:exp_avg"])
        assert float(optimizer.state[parameter]["step"]) == 2
    head.get_parameter(names[0]).requires_grad_(False)
    with pytest.raises(CheckpointError, match=rf"^resume: the head has no trained parameter {names[0]}, got optim"):
        restore(saved, head, build_optimizer(head, run.optim), {}, 0)


def test_random_states_round_trip() -> None:
    import random

    import numpy as np

    state = json.loads(json.dumps(rng_state()))
    draws = (random.random(), np.random.rand(), torch.rand(2).tolist())
    module.set_rng_state(state)
    assert (random.random(), np.random.rand(), torch.rand(2).tolist()) == draws
    before = torch.get_rng_state()
    with kept_rng():
        torch.rand(5)
    assert torch.equal(torch.get_rng_state(), before)


def test_retention_and_leftovers(tmp_path: Path) -> None:
    leftover = tmp_path / "checkpoints/.step-000009.tmp"
    leftover.mkdir(parents=True)
    for step in (100, 200, 1_000_000):
        write(tmp_path, step, keep=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-000200",
        "step-1000000",
    ]


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def half_then_full(tensors: Any, path: Path) -> None:
    path.write_bytes(b"half")
    full_disk()


@pytest.mark.parametrize("writer", [full_disk, half_then_full])
def test_full_disk_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: Callable[..., None]
) -> None:
    run = make_run(tmp_path, trainer={"max_steps": 4, "save_every": 2})
    train(with_steps(run, 2))
    before = {path: path.read_bytes() for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()}
    monkeypatch.setattr(module, "save_file", writer)
    with pytest.raises(CheckpointError) as caught:
        train(make_run(tmp_path, trainer={"max_steps": 4, "save_every": 2}, resume="auto"))
    message = str(caught.value)
    assert message.startswith("output_dir: the checkpoint of step 4 could not be saved, got [Errno 28] No space left")
    assert message.endswith("step-000002")
    assert "\n" not in message
    after = {path: path.read_bytes() for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()}
    assert after == before
    assert choose_checkpoint(tmp_path / "checkpoints", "must") == tmp_path / "checkpoints/step-000002"


def with_steps(run: TrainInputs, steps: int) -> TrainInputs:
    return replace(run, trainer=replace(run.trainer, max_steps=steps))


def test_full_disk_while_saving_a_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is complete before the head is written, and the head that was there stays."""
    train(make_run(tmp_path, trainer={"max_steps": 2}))
    before = weights(load_head(tmp_path / "last"))
    monkeypatch.setattr(storage, "save_file", full_disk)
    with pytest.raises(CheckpointError, match=r"^head: could not be saved, got .*No space left"):
        train(make_run(tmp_path, trainer={"max_steps": 4}, resume="auto"))
    assert list_checkpoints(tmp_path / "checkpoints")[0].name == "step-000004"
    assert all(torch.equal(value, before[name]) for name, value in weights(load_head(tmp_path / "last")).items())


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
@pytest.mark.parametrize("name", [HEAD_NAME, OPTIMIZER_NAME, RNG_NAME])
def test_torn_checkpoint_is_passed_over(
    tmp_path: Path, name: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    good, torn = write(tmp_path, 1), write(tmp_path, 2)
    damage(torn / name)
    with pytest.raises(CheckpointError, match=rf"^resume: .*step-000002.*{name}|{name}.*step-000002"):
        read_checkpoint(torn)
    with pytest.raises(CheckpointError, match=r"; use resume=auto to continue from the one before$"):
        choose_checkpoint(tmp_path / "checkpoints", "must")
    assert choose_checkpoint(tmp_path / "checkpoints", "auto") == good
    assert "trying the checkpoint before it" in caplog.text
    assert choose_checkpoint(tmp_path / "checkpoints", "never") is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 99}'])
def test_state_file_of_another_kind(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, 3)
    (path / STATE_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=r"^resume: .*step-000003"):
        choose_checkpoint(tmp_path / "checkpoints", "must")
    with pytest.raises(CheckpointError, match=r"^resume: none of 1 checkpoints can be read, got "):
        choose_checkpoint(tmp_path / "checkpoints", "auto")


def test_torn_checkpoint_is_replaced_when_its_step_comes_again(tmp_path: Path) -> None:
    trainer = {"max_steps": 4, "save_every": 1, "keep_checkpoints": 9}
    straight = make_run(tmp_path / "straight", trainer=trainer)
    train(straight)
    train(make_run(tmp_path / "torn", trainer=trainer))
    truncate(tmp_path / "torn/checkpoints/step-000004" / HEAD_NAME)
    shutil.rmtree(tmp_path / "torn/checkpoints/step-000003")
    again = make_run(tmp_path / "torn", trainer=trainer, resume="auto")
    train(again)
    assert all(torch.equal(value, weights(straight.head)[name]) for name, value in weights(again.head).items())
    assert read_checkpoint(tmp_path / "torn/checkpoints/step-000004").state.step == 4


def test_must_needs_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^resume: there is no checkpoint to continue from, got must in "):
        train(make_run(tmp_path, resume="must"))
    assert train(make_run(tmp_path, resume="auto", trainer={"max_steps": 1})).state.step == 1


def test_other_data_or_other_head_is_refused(tmp_path: Path) -> None:
    train(make_run(tmp_path, trainer={"max_steps": 1}))
    with pytest.raises(CheckpointError, match=r"^resume: rows differs from the checkpoint's 12, got 5; continue with"):
        train(make_run(tmp_path, rows=make_rows(5), resume="auto"))
    with pytest.raises(
        CheckpointError, match=r"^resume: micro_batches_per_step differs from the checkpoint's 1, got 2"
    ):
        train(make_run(tmp_path, resume="auto", trainer={"accumulation_steps": 2}))
    with pytest.raises(
        CheckpointError, match=r"^head: tensor .* is (missing|unexpected|of another shape), got the check"
    ):
        train(make_run(tmp_path, kind="eagle", resume="auto"))


def test_counters_can_be_noted_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, 5)
    update_state(tmp_path / "checkpoints", TrainState(step=5, best_value=3.5))
    assert read_checkpoint(path).state.best_value == 3.5
    update_state(tmp_path / "checkpoints", TrainState(step=6))
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-000005"]
    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(CheckpointError, match=r"^output_dir: .*state.json could not be updated, got .*No space"):
        update_state(tmp_path / "checkpoints", TrainState(step=5, best_value=9.0))
    assert read_checkpoint(path).state.best_value == 3.5
    assert sorted(p.name for p in path.iterdir()) == sorted([HEAD_NAME, OPTIMIZER_NAME, RNG_NAME, STATE_NAME])


def test_checkpoint_holds_the_head_only(tmp_path: Path) -> None:
    run = make_run(tmp_path, trainer={"max_steps": 1})
    train(run)
    saved = read_checkpoint(tmp_path / "checkpoints/step-000001")
    assert set(saved.head) == set(run.head.state_dict())
    size = sum(path.stat().st_size for path in (tmp_path / "checkpoints/step-000001").glob("*.safetensors"))
    parameters = 4 * run.head.num_parameters
    assert 3 * parameters <= size <= 3 * parameters + 8192
