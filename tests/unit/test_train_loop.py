"""The loop: normalisation, precision, bad numbers, what is logged, signals, and which head is the best."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdraft.core.errors import ConfigError, SpecDraftError
from specdraft.data.features import FeatureMemory
from specdraft.heads.base import head_kinds
from specdraft.heads.storage import load_head
from specdraft.losses.objectives import LossResult
from specdraft.train import loop
from specdraft.train._config import TrainerConfig
from specdraft.train.checkpoint import list_checkpoints
from specdraft.train.inputs import TrainInputs, make_accelerator
from specdraft.train.keeper import Keeper
from specdraft.train.loop import train
from specdraft.train.progress import Meter, parameter_table
from specdraft.train.state import TrainState
from tests.training import make_head, make_rows, make_run, target, weights


def no_memory(run: TrainInputs) -> FeatureMemory:
    """Features that are captured anew in every batch."""
    return FeatureMemory(run.target, run.head.features(), 0)


KINDS = list(head_kinds())


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def gradients(run: TrainInputs) -> dict[str, Tensor]:
    """The gradient of the run's first step, where weights that start from zero hide none behind them."""
    run.head.train()
    generator = torch.Generator().manual_seed(0)
    for parameter in run.head.parameters():
        if not parameter.any():
            parameter.data.normal_(std=0.02, generator=generator)
    meter = Meter(torch.device("cpu"), run.head.config.num_draft_tokens)
    window = next(loop.windows(run, TrainState(), meter))
    denominator = sum(float(run.objective.denominator(tokens)) for tokens in window)
    loop.backward(run, run.head, no_memory(run), run.teacher(), window, denominator, meter)
    return {name: p.grad.clone() for name, p in run.head.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("normalize", ["token", "sequence"])
@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_changes_no_gradient(tmp_path: Path, kind: str, normalize: str) -> None:
    """Four micro-batches of one row, one of them without supervision, are one batch of four."""
    rows = make_rows(4, masked=(2,))
    loss = {"normalize": normalize}
    small = gradients(make_run(tmp_path, kind=kind, rows=rows, loss=loss, trainer={"accumulation_steps": 4}))
    large = gradients(make_run(tmp_path, kind=kind, rows=rows, loss=loss, batch_size=4))
    assert small.keys() == large.keys()
    for name, gradient in large.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(small[name], gradient, atol=3e-6, rtol=1e-5)


def test_accumulation_changes_no_weight(tmp_path: Path) -> None:
    small = make_run(
        tmp_path / "a",
        kind="eagle3",
        trainer={"accumulation_steps": 4, "epochs": 2},
        loss={"terms": {"hard_ce": 1.0}},
    )
    large = make_run(
        tmp_path / "b", kind="eagle3", batch_size=4, trainer={"epochs": 2}, loss={"terms": {"hard_ce": 1.0}}
    )
    assert train(small).state.step == train(large).state.step == 6
    for name, value in weights(large.head).items():
        torch.testing.assert_close(weights(small.head)[name], value, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_masked_micro_batch_still_runs_backward(tmp_path: Path, kind: str) -> None:
    """DDP waits for the gradient of every parameter, so a batch without anchors must reach all of them."""
    run = make_run(
        tmp_path,
        kind=kind,
        rows=make_rows(1, masked=(0,)),
        loss={"terms": {"hard_ce": 1.0, "smooth_l1": 1.0}},
    )
    meter = Meter(torch.device("cpu"), 3)
    window = next(loop.windows(run, TrainState(), meter))
    assert loop.backward(run, run.head, no_memory(run), run.teacher(), window, 1.0, meter) == 0.0
    for name, parameter in run.head.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


@pytest.mark.parametrize(("kind", "trained"), [("eagle", 1), ("eagle", 2), ("eagle3", 2)])
def test_metrics_are_those_of_the_depths_that_are_trained(tmp_path: Path, kind: str, trained: int) -> None:
    """A head may be trained on fewer depths than it drafts; what was not trained is not reported."""
    run = make_run(
        tmp_path,
        head=make_head(kind, unroll_steps=trained),
        loss={"step_weights": [1.0] * trained},
        trainer={"max_steps": 2, "log_every": 1},
    )
    assert run.head.config.num_draft_tokens > trained
    train(run)
    for line in metrics(tmp_path):
        found = [name for name in line if name.startswith("agreement/")]
        assert found == [f"agreement/{depth + 1}" for depth in range(trained)]
        assert line["expected_acceptance_length"] <= 1 + trained


def test_masked_step_leaves_the_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = make_run(tmp_path, rows=make_rows(2, masked=(0, 1)), optim={"weight_decay": 0.1})
    before = weights(run.head)
    state = train(run).state
    assert state.skipped == state.step == 2
    assert all(torch.equal(before[name], value) for name, value in weights(run.head).items())
    assert "nothing is supervised" in caplog.text
    assert metrics(tmp_path)[-1]["skipped_steps"] == 2


def test_only_the_head_moves(tmp_path: Path) -> None:
    before = {name: value.clone() for name, value in target().model.state_dict().items()}
    run = make_run(tmp_path, trainer={"max_steps": 2})
    start = weights(run.head)
    train(run)
    assert all(torch.equal(before[name], value) for name, value in target().model.state_dict().items())
    assert any(not torch.equal(start[name], value) for name, value in weights(run.head).items())


def test_bf16_keeps_fp32_weights(tmp_path: Path) -> None:
    """Products run in bf16 (the loss differs a little), weights and their updates stay fp32."""
    seen = []
    runs = []
    for precision in ("no", "bf16"):
        run = make_run(
            tmp_path / precision,
            kind="eagle",
            trainer={"mixed_precision": precision, "max_steps": 4},
            batch_size=3,
        )
        hook = run.head.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
        train(run)
        hook.remove()
        runs.append(run)
        assert {value.dtype for value in run.head.parameters()} == {torch.float32}
    assert seen == [False] * 4 + [True] * 4
    exact, rough = (metrics(tmp_path / name)[0]["loss"] for name in ("no", "bf16"))
    assert 0 < abs(exact - rough) < 0.05 * exact


def test_fp16_on_the_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^trainer\.mixed_precision: needs an accelerator, got fp16 on the CPU"):
        make_accelerator(TrainerConfig(mixed_precision="fp16"), "cpu")


def test_learning_rate_follows_optimizer_steps(tmp_path: Path) -> None:
    """The curve is the same whether a step is one micro-batch or four."""
    curves = []
    for accumulation, batch_size in ((1, 4), (4, 1)):
        folder = tmp_path / str(accumulation)
        settings = {"accumulation_steps": accumulation, "epochs": 4}
        train(make_run(folder, batch_size=batch_size, trainer=settings, optim={"warmup_ratio": 0.25}))
        curves.append([line["lr"] for line in metrics(folder)])
    assert curves[0] == curves[1]
    assert len(curves[0]) == 12
    assert max(curves[0]) == curves[0][3] == 1e-2
    assert curves[0][:4] == sorted(curves[0][:4])
    assert curves[0][3:] == sorted(curves[0][3:], reverse=True)
    assert curves[0][-1] < 5e-4


class Poisoned:
    """An objective whose loss or gradient is not finite from the given step on."""

    def __init__(self, inner: Any, step: int, where: str) -> None:
        self.inner, self.step, self.where, self.calls = inner, step, where, 0
        self.denominator = inner.denominator

    def __call__(self, *args: Any) -> LossResult:
        self.calls += 1
        result: LossResult = self.inner(*args)
        if self.calls != self.step:
            return result
        if self.where == "loss":
            return replace(result, loss_sum=result.loss_sum * math.nan)
        hooked = result.loss_sum * 1.0
        hooked.register_hook(lambda gradient: gradient * math.inf)
        return replace(result, loss_sum=hooked)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_not_finite_stops_before_the_weights_move(tmp_path: Path, where: str) -> None:
    run = make_run(tmp_path, trainer={"save_every": 1, "keep_checkpoints": 9})
    run = replace(run, objective=Poisoned(run.objective, 3, where))  # type: ignore[arg-type]
    with pytest.raises(SpecDraftError, match=r"^optim.lr: loss or gradient is not finite at step 3, got .*; lower it"):
        train(run)
    newest = list_checkpoints(tmp_path / "checkpoints")[0]
    assert newest.name == "step-000002"
    saved = load_head(tmp_path / "last")
    assert all(torch.equal(saved.state_dict()[name], value) for name, value in weights(run.head).items())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_not_finite_can_be_skipped(tmp_path: Path) -> None:
    run = make_run(tmp_path, trainer={"skip_nonfinite": True, "max_steps": 4})
    run = replace(run, objective=Poisoned(run.objective, 2, "gradient"))  # type: ignore[arg-type]
    state = train(run).state
    assert (state.step, state.skipped) == (4, 1)
    assert [line["skipped_steps"] for line in metrics(tmp_path)] == [0, 1, 1, 1]
    assert metrics(tmp_path)[1]["grad_norm"] is None
    assert all(bool(value.isfinite().all()) for value in run.head.parameters())


def test_what_is_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = make_rows(6)
    train(make_run(tmp_path, rows=rows, batch_size=2, trainer={"log_every": 3}))
    (line,) = metrics(tmp_path)
    names = {
        "step",
        "loss",
        "lr",
        "grad_norm",
        "expected_acceptance_length",
        "tokens_per_s",
        "peak_memory_gib",
        "epoch",
        "tokens",
        "skipped_steps",
    }
    phases = {f"time/{name}" for name in ("data", "target", "draft", "optimizer")}
    assert set(line) == names | phases | {f"agreement/{k}" for k in (1, 2, 3)}
    assert line["step"] == 3
    assert line["epoch"] == 1
    assert line["tokens"] == sum(len(row.input_ids) for row in rows)
    assert all(line[name] > 0 for name in phases)
    assert sum(line[name] for name in phases) <= 1
    assert 1 <= line["expected_acceptance_length"] <= 4
    assert 0.05 < line["peak_memory_gib"] < 100
    assert "step 3  loss" in capsys.readouterr().out


def test_logged_loss_is_the_mean_over_what_is_supervised(tmp_path: Path) -> None:
    """Medusa starts as the target's own distribution, so that its first loss is known."""
    rows = make_rows(4)
    run = make_run(
        tmp_path,
        rows=rows,
        batch_size=2,
        trainer={"accumulation_steps": 2, "max_steps": 1},
        loss={"terms": {"hard_ce": 1.0}, "step_decay": 1.0},
    )
    train(run)
    total, count = 0.0, 0
    for row in rows:
        ids = torch.tensor([row.input_ids])
        logs = target().model(ids).logits[0].log_softmax(-1)
        for t in range(len(row.input_ids) - 2):
            if row.loss_mask[t + 2]:
                count += 1
                labels = [t + k for k in (2, 3, 4) if t + k < len(row.input_ids)]
                total -= sum(float(logs[t, ids[0, label]]) for label in labels)
    assert metrics(tmp_path)[0]["loss"] == pytest.approx(total / count, rel=1e-4)


def test_epochs_see_every_row_once(tmp_path: Path) -> None:
    rows = make_rows(7)
    seen: list[int] = []
    run = make_run(tmp_path, rows=rows, trainer={"epochs": 2, "accumulation_steps": 2})
    original = run.rows
    run = replace(run, rows=lambda ids: (seen.extend(ids), original(ids))[1])  # type: ignore[func-returns-value]
    state = train(run).state
    assert (state.step, state.epoch) == (8, 2)
    assert sorted(seen[:7]) == sorted(seen[7:]) == list(range(7))
    assert seen[:7] != seen[7:]


def test_totals_add_up_over_lines(tmp_path: Path) -> None:
    totals = train(make_run(tmp_path, trainer={"log_every": 5})).totals
    lines = metrics(tmp_path)
    assert len(lines) == 3
    assert totals["tokens"] == lines[-1]["tokens"]
    assert totals["seconds"] > 0
    shares = [totals[f"time/{name}"] for name in ("data", "target", "draft", "optimizer")]
    assert all(share > 0 for share in shares)
    assert 0.5 < sum(shares) <= 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_stops(tmp_path: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    original = run.rows

    def rows(ids: Any) -> Any:
        if keeper_steps() == 2:
            os.kill(os.getpid(), number)
        return original(ids)

    def keeper_steps() -> int:
        path = tmp_path / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    result = train(replace(run, rows=rows))
    assert result.stopped
    assert result.state.step == 3
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-000003"]
    assert "stopped by a signal after step 3; continue with resume=auto" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_bar_only_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(make_run(tmp_path / "a", trainer={"max_steps": 2}))
    assert "2/2" not in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    train(make_run(tmp_path / "b", trainer={"max_steps": 2}))
    out = capsys.readouterr().out
    assert "2/2" in out
    assert "left" in out


def test_parameter_table_says_what_is_trained_and_shared() -> None:
    head = make_head("medusa")
    table = parameter_table(target().model, head)
    cells = list(zip(*(column.cells for column in table.columns), strict=True))
    count = f"{head.num_parameters:,}"
    assert cells[0][2:] == ("frozen", "no, shared with the target")
    assert cells[1] == ("head.blocks", count, "yes", "yes")
    assert cells[-1] == ("all of the head", count, count, "yes")


def test_due_moments() -> None:
    state = TrainState()
    for _ in range(5):
        state.advance(5)
    assert (state.step, state.epoch, state.step_in_epoch) == (5, 1, 0)
    assert state.is_due(None)
    assert state.is_due(5)
    assert not state.is_due(2)
    state.advance(5)
    assert not state.is_due(None)
    assert state.is_due(2)


def test_max_steps_only_shortens(tmp_path: Path) -> None:
    assert make_run(tmp_path, trainer={"max_steps": 100}).total_steps == 12
    run = make_run(tmp_path, trainer={"max_steps": 5, "epochs": 3})
    assert run.total_steps == 5
    assert Keeper(run, torch.optim.SGD(run.head.parameters())).progress(TrainState(step_in_epoch=3))["epoch"] == 0.25
