"""Small training runs on a tiny random target, for the tests of the loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor

from specdraft.core.tree import DraftTree
from specdraft.core.types import FeatureRequest, Features, TokenBatch
from specdraft.data.batching import BatchPlan
from specdraft.data.chat import TokenRow
from specdraft.eval.acceptance import measure_acceptance
from specdraft.heads.base import DraftHead, head_config
from specdraft.losses._config import LossConfig
from specdraft.losses.objectives import Objective
from specdraft.targets.hf import HFTarget
from specdraft.train._config import OptimConfig, TrackerConfig, TrainerConfig
from specdraft.train.inputs import TrainInputs, make_accelerator
from specdraft.train.state import EvalPoint
from specdraft.train.trackers import build_tracker
from tests.tiny import VOCAB_SIZE, tiny_target

SETTINGS: dict[str, dict[str, Any]] = {
    "eagle": {"input_noise": 0.0},
    "eagle3": {"draft_vocab_size": 48},
    "dflash": {"num_layers": 2},
    "peagle": {"num_layers": 2, "keep_ratio": 1.0},
}
"""Settings beside the defaults of a kind: no random noise, so that runs can be compared."""


@cache
def target() -> HFTarget:
    return tiny_target("llama")


def make_rows(count: int = 12, masked: tuple[int, ...] = ()) -> list[TokenRow]:
    """Rows of 8 to 19 tokens whose second half is supervised; rows ``masked`` have nothing supervised."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for i in range(count):
        length = 8 + (5 * i) % 12
        ids = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        rows.append(TokenRow(ids, [t >= length // 2 and i not in masked for t in range(length)]))
    return rows


def make_head(kind: str = "medusa", **settings: Any) -> DraftHead:
    """A head with the weights that training starts from."""
    torch.manual_seed(0)
    head = head_config(kind, {"num_draft_tokens": 3, **SETTINGS.get(kind, {}), **settings}).build(target().spec)
    if head.vocab is not None:
        head.vocab.set_tokens(range(0, 2 * head.vocab.d2t.numel(), 2))
    head.init_from_target(target().embed, target().unembedding)
    return head


def reset_accelerator() -> None:
    """Accelerate keeps precision and device for the life of a process; a test may want others."""
    if AcceleratorState._shared_state and AcceleratorState().distributed_type.value == "NO":
        AcceleratorState._reset_state(reset_partial_state=True)


def make_run(
    folder: Path,
    *,
    kind: str = "medusa",
    rows: list[TokenRow] | None = None,
    batch_size: int = 1,
    optim: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    tracker: str = "jsonl",
    resume: str = "never",
    loss: dict[str, Any] | None = None,
    evaluate: Callable[[DraftHead], EvalPoint] | None = None,
    head: DraftHead | None = None,
    capacity: int | None = None,
) -> TrainInputs:
    """A run in this process (and in its peers under a launcher)."""
    reset_accelerator()
    settings = TrainerConfig(**{"mixed_precision": "no", "log_every": 1, "prefetch": 0, **(trainer or {})})
    accelerator = make_accelerator(settings, "cpu")
    data = rows if rows is not None else make_rows()
    return TrainInputs(
        accelerator=accelerator,
        target=target(),
        head=head if head is not None else make_head(kind),
        objective=Objective(LossConfig(**(loss or {}))),
        rows=lambda ids: [data[i] for i in ids],
        plan=BatchPlan(
            lengths=[len(row.input_ids) for row in data],
            batch_size=batch_size,
            accumulation_steps=settings.accumulation_steps,
            world_size=accelerator.num_processes,
            rank=accelerator.process_index,
            capacity=capacity,
        ),
        pad_id=0,
        optim=OptimConfig(**{"lr": 1e-2, **(optim or {})}),
        trainer=settings,
        tracker=build_tracker(TrackerConfig(kind=tracker), folder, accelerator.is_main_process),
        folder=folder,
        settings={"test": True},
        provenance={"name": folder.name},
        resume=resume,
        evaluate=evaluate,
    )


def acceptance(measured: Any) -> Callable[[DraftHead], EvalPoint]:
    """Measures acceptance as training does, on two prompts."""

    def evaluate(head: DraftHead) -> EvalPoint:
        tree = DraftTree.chain(head.config.num_draft_tokens)
        point = measure_acceptance(measured, head, [[5, 6, 7], [8, 9]], tree, 6)
        return EvalPoint(point.acceptance_length, point.acceptance_rate, point.num_steps, point.num_tokens)

    return evaluate


def weights(head: DraftHead) -> dict[str, Tensor]:
    """A copy of the head's weights."""
    return {name: value.detach().clone() for name, value in head.state_dict().items()}


def with_trainer(run: TrainInputs, **changes: Any) -> TrainInputs:
    """The run with other trainer settings."""
    return replace(run, trainer=replace(run.trainer, **changes))


def count_captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Receives the rows of every target forward over a training batch from now on, until ``monkeypatch`` is undone."""
    found: list[int] = []
    original = HFTarget.capture

    def counted(self: HFTarget, tokens: TokenBatch, request: FeatureRequest) -> Features:
        found.append(tokens.input_ids.shape[0])
        return original(self, tokens, request)

    monkeypatch.setattr(HFTarget, "capture", counted)
    return found
