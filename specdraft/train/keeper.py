"""What a run leaves on disk: checkpoints, the last head, and the best one by measured acceptance."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.utils import gather_object, set_seed
from torch import Tensor

from specdraft.heads.storage import save_head
from specdraft.train.average import WeightAverage
from specdraft.train.checkpoint import (
    Checkpoint,
    choose_checkpoint,
    optimizer_tensors,
    read_checkpoint,
    restore,
    save_checkpoint,
    update_state,
)
from specdraft.train.inputs import TrainInputs
from specdraft.train.progress import Display
from specdraft.train.state import EvalPoint, TrainState, kept_rng, on_main, rng_state


class Keeper:
    """Saves and restores a run. Every rank calls every method; rank 0 writes, all raise its errors."""

    def __init__(
        self, run: TrainInputs, optimizer: torch.optim.Optimizer, average: WeightAverage | None = None
    ) -> None:
        self.run = run
        self.optimizer = optimizer
        self.average = average
        self.folder = run.folder / "checkpoints"
        plan = run.plan
        self._must_agree: dict[str, Any] = {
            "rows": len(plan.lengths),
            "batch_size": plan.batch_size,
            "micro_batches_per_step": plan.accumulation_steps * plan.world_size,
            "data_seed": plan.seed,
            "bucket": plan.bucket,
            "packing_capacity": plan.capacity,
            "optimizer": run.optim.optimizer,
            "ema_decay": run.trainer.ema_decay,
            "adapter_rank": None if run.joint.adapter is None else run.joint.adapter.config.rank,
        }

    def resume(self) -> TrainState:
        """The state to start from; without a checkpoint, seeds what heads draw at random.

        Raises:
            CheckpointError: see ``choose_checkpoint`` and ``restore``.
        """
        accelerator = self.run.accelerator
        path = on_main(accelerator, lambda: choose_checkpoint(self.folder, self.run.resume))
        if path is None:
            set_seed(self.run.seed, device_specific=True)
            return TrainState()
        checkpoint = read_checkpoint(path)
        rank, adapter = accelerator.process_index, self.run.joint.adapter
        state = restore(checkpoint, self.run.head, self.optimizer, self._must_agree, rank, adapter)
        if accelerator.scaler is not None and checkpoint.scaler:
            accelerator.scaler.load_state_dict(checkpoint.scaler)
        if self.average is not None and checkpoint.average is not None:
            self.average.load(checkpoint.average)
        return state

    def save(self, state: TrainState) -> None:
        """A checkpoint and the last head.

        Raises:
            CheckpointError: they cannot be written; the checkpoint before is intact.
        """
        accelerator, head = self.run.accelerator, self.run.head
        rng = gather_object([rng_state()])
        scaler = accelerator.scaler.state_dict() if accelerator.scaler is not None else {}

        def write() -> None:
            tensors = _saved(head.state_dict())
            average = None if self.average is None else _saved(self.average.tensors)
            adapter = self.run.joint.adapter
            optimizer = optimizer_tensors(head, self.optimizer, adapter)
            beside = None if adapter is None else adapter.weights.tensors
            settings = self.run.settings
            checkpoint = Checkpoint(state, tensors, optimizer, rng, self._must_agree, scaler, average, beside, settings)
            save_checkpoint(self.folder, checkpoint, self.run.trainer.keep_checkpoints)
            self._save_head("last", state, None)

        on_main(accelerator, write)

    def measures_now(self, state: TrainState) -> bool:
        """Whether acceptance is to be measured after this step."""
        run = self.run
        due = run.is_over(state) or (state.step > 0 and state.is_due(run.trainer.eval_every))
        return run.evaluate is not None and due and state.evaluated_step < state.step

    def exhausted(self, state: TrainState) -> bool:
        """Whether acceptance has not grown for so long that training should end."""
        most = self.run.trainer.early_stop
        return most is not None and state.stale >= most

    def progress(self, state: TrainState) -> dict[str, float]:
        """How far the run is."""
        epoch = float(state.epoch)
        if state.step_in_epoch:
            epoch += state.step_in_epoch / self.run.plan.num_steps(state.epoch)
        return {"epoch": epoch, "tokens": state.tokens, "skipped_steps": state.skipped}

    def log(self, state: TrainState, values: dict[str, float], display: Display) -> None:
        """Metrics to the tracker and the terminal."""
        on_main(self.run.accelerator, lambda: self.run.tracker.log(state.step, values))
        display.metrics(state.step, values)

    def evaluate(self, state: TrainState, display: Display) -> None:
        """Measures acceptance on rank 0, keeps the best head, and notes both in the checkpoint."""
        run = self.run
        if run.evaluate is None:
            return
        measure = run.evaluate

        def act() -> float:
            run.head.eval()
            with self._averaged(), kept_rng(), torch.no_grad():
                point = measure(run.head)
            run.head.train()
            run.tracker.log(state.step, point.values())
            display.metrics(state.step, point.values())
            if point.acceptance_length > state.best_value:
                self._save_head("best", state, point)
            return point.acceptance_length

        value = on_main(run.accelerator, act, inside=run.target.together())
        state.evaluated_step = state.step
        if value > state.best_value:
            state.best_value, state.best_step, state.stale = value, state.step, 0
        else:
            state.stale += 1
        on_main(run.accelerator, lambda: update_state(self.folder, state))

    def finish(self, state: TrainState) -> None:
        """Without measurements the last head counts as the best. The head is left as the last one was saved."""
        if self.run.evaluate is None:
            on_main(self.run.accelerator, lambda: self._save_head("best", state, None))
        if self.average is not None:
            self.average.put(self.run.head)

    def _averaged(self) -> AbstractContextManager[None]:
        """The head has the averaged weights inside, if there are any."""
        return nullcontext() if self.average is None else self.average.inside(self.run.head)

    def _save_head(self, name: str, state: TrainState, point: EvalPoint | None) -> None:
        training: dict[str, Any] = {"step": state.step, "tokens": state.tokens, **self.run.provenance}
        if point is not None:
            training["acceptance_length"] = point.acceptance_length
        with self._averaged():
            adapter = self.run.joint.adapter
            weights = None if adapter is None else adapter.weights
            save_head(self.run.head, self.run.folder / name, {"training": training}, weights)


def _saved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors takes them."""
    return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
