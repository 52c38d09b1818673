"""Less memory, compiled forwards and batches made ahead: each trains the same head as the plain run."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdraft.core.errors import ConfigError, DataError
from specdraft.data.chat import TokenRow
from specdraft.heads.base import head_kinds
from specdraft.losses.alignment import build_draft_batch
from specdraft.train import compiling
from specdraft.train._config import TrainerConfig
from specdraft.train.loop import train
from specdraft.train.progress import Meter
from specdraft.train.state import TrainState
from specdraft.train.windows import Ahead, windows
from tests.training import make_head, make_rows, make_run, target, weights

KINDS = list(head_kinds())


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def prefetchers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "prefetch"]


def gradients(tmp_path: Path, kind: str, recompute: bool) -> tuple[dict[str, Tensor], int]:
    """The gradients of one batch, and the bytes that the forward kept for them."""
    run = make_run(tmp_path, kind=kind, batch_size=4)
    run.head.train().recompute = recompute
    tokens = next(windows(run, TrainState(), Meter(torch.device("cpu"), 3)))[0]
    batch = build_draft_batch(tokens, target().capture(tokens, run.head.features()))
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        steps = run.head(batch, target().embed, target().unembedding)
    run.objective(steps, batch, run.teacher()).loss_sum.backward()
    return {name: p.grad for name, p in run.head.named_parameters() if p.grad is not None}, sum(kept.values())


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_keeps_less_and_changes_no_gradient(tmp_path: Path, kind: str) -> None:
    plain, plain_bytes = gradients(tmp_path, kind, False)
    checkpointed, fewer_bytes = gradients(tmp_path, kind, True)
    assert fewer_bytes < 0.8 * plain_bytes
    assert plain.keys() == checkpointed.keys()
    for name, gradient in plain.items():
        assert torch.equal(checkpointed[name], gradient), name


def test_checkpointing_in_a_run(tmp_path: Path) -> None:
    """With dropout and bf16, whose random numbers and casts the second forward must repeat."""
    ends = []
    for on in (False, True):
        torch.manual_seed(0)
        run = make_run(
            tmp_path / str(on),
            head=make_head("hydra_chain", dropout=0.3),
            trainer={"gradient_checkpointing": on, "mixed_precision": "bf16", "max_steps": 3},
        )
        train(run)
        ends.append(weights(run.head))
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


@pytest.mark.parametrize("kind", ["medusa", "mlp"])
def test_compiled_training_equals_the_plain_run(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's tracing, without code generation; batches of another shape need no other graph."""
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    ends = []
    for on in (False, True):
        run = make_run(tmp_path / str(on), kind=kind, batch_size=2, trainer={"compile": on})
        train(run)
        ends.append(weights(run.head))
        assert run.head._compiled_call_impl is None
    assert losses(tmp_path / "True") == pytest.approx(losses(tmp_path / "False"), rel=1e-5)
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, atol=1e-5, rtol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_no_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "BACKEND", "no_such_backend")
    with pytest.raises(
        ConfigError, match=r"^trainer.compile: torch.compile does not work here, got Invalid backend.*; inst"
    ):
        compiling.check_compiler(torch.device("cpu"))
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    compiling.check_compiler(torch.device("cpu"))


def test_compiling_and_checkpointing_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"^trainer.gradient_checkpointing: torch.compile chooses itself .*; use one"):
        TrainerConfig(compile=True, gradient_checkpointing=True)


@pytest.mark.parametrize("depth", [1, 3])
def test_batches_made_ahead_are_the_same(tmp_path: Path, depth: int) -> None:
    ends, seen = [], []
    for ahead in (0, depth):
        run = make_run(tmp_path / str(ahead), trainer={"prefetch": ahead, "epochs": 2, "accumulation_steps": 2})
        asked: list[list[int]] = []
        rows = run.rows

        def noted(ids: Sequence[int], asked: list[list[int]] = asked, rows: Any = rows) -> list[TokenRow]:
            asked.append(list(ids))
            return rows(ids)  # type: ignore[no-any-return]

        train(replace(run, rows=noted))
        ends.append(weights(run.head))
        seen.append(asked)
    assert seen[0] == seen[1]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    assert losses(tmp_path / "0") == losses(tmp_path / str(depth))
    assert not prefetchers()


def test_an_error_of_the_thread_ends_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, trainer={"prefetch": 2})

    def failing(ids: Sequence[int]) -> list[TokenRow]:
        if 5 in ids:
            raise DataError("data: a row is gone, got 5; prepare the data again")
        return run.rows(ids)

    with pytest.raises(DataError, match="a row is gone"):
        train(replace(run, rows=failing))
    assert not prefetchers()


def test_the_thread_is_bounded_and_ends_with_a_run_cut_short(tmp_path: Path) -> None:
    made: list[int] = []
    ahead = Ahead(iter(range(100)), lambda i: made.append(i) or i, 3)  # type: ignore[func-returns-value]
    assert [ahead.take(), ahead.take()] == [0, 1]
    ahead.close()
    assert len(made) <= 2 + 3 + 1
    assert not prefetchers()
    run = make_run(tmp_path, trainer={"prefetch": 2, "max_steps": 10})
    stream = windows(run, TrainState(), Meter(torch.device("cpu"), 3))
    next(stream)
    stream.close()
    assert not prefetchers()


def test_a_resumed_run_starts_at_its_place(tmp_path: Path) -> None:
    """From every state: what is left, neither more nor less."""
    run = make_run(tmp_path, rows=make_rows(5), trainer={"prefetch": 2, "epochs": 2})
    meter = Meter(torch.device("cpu"), 3)
    whole = [window[0].row_ids.tolist() for window in windows(run, TrainState(), meter)]
    state = TrainState()
    for done in count():
        assert [window[0].row_ids.tolist() for window in windows(run, state, meter)] == whole[done:]
        if done == len(whole):
            break
        state.advance(run.plan.num_steps(state.epoch))
