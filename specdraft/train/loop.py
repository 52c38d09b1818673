"""The training loop: a window of micro-batches, one optimizer step, and what is due after it."""

from __future__ import annotations

import math
from contextlib import closing, nullcontext

import torch
from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from specdraft.core.errors import SpecDraftError
from specdraft.core.types import TokenBatch
from specdraft.data.features import FeatureMemory
from specdraft.losses.alignment import build_draft_batch
from specdraft.losses.objectives import Teacher
from specdraft.train.average import WeightAverage
from specdraft.train.compiling import compiled
from specdraft.train.inputs import TrainInputs, TrainResult
from specdraft.train.keeper import Keeper
from specdraft.train.optim import build_optimizer, set_lr
from specdraft.train.progress import Display, Meter
from specdraft.train.state import StopSignal, TrainState, kept_rng, on_main, sum_over_ranks
from specdraft.train.windows import windows

logger = get_logger(__name__)


def train(run: TrainInputs) -> TrainResult:
    """Trains ``run.head`` and leaves checkpoints, the last and the best head in ``run.folder``.

    The loss of a step is a mean over all that is supervised in its window, of all micro-batches and ranks
    together, so neither accumulation nor the number of processes changes a gradient. All ranks take every
    branch together.

    Raises:
        CheckpointError: a checkpoint cannot be read or written.
        SpecDraftError: loss or gradient is not finite; weights and the last checkpoint stay as they were.
    """
    accelerator, head, trainer = run.accelerator, run.head, run.trainer
    head.to(device=accelerator.device, dtype=torch.float32).train()
    optimizer = build_optimizer(head, run.optim)
    average = None if trainer.ema_decay is None else WeightAverage(head, trainer.ema_decay)
    run.joint.join(optimizer)
    keeper = Keeper(run, optimizer, average)
    state = keeper.resume()
    head.recompute = trainer.gradient_checkpointing
    # Only the head is wrapped: the target has no gradient to exchange and is in no checkpoint.
    model, stepper = accelerator.prepare(head, optimizer)
    teacher, meter = run.teacher(), Meter(accelerator.device, head.config.trained_depths)
    memory = FeatureMemory(run.target, head.features(), int(trainer.feature_memory_gib * 2**30), run.store)
    with (
        closing(run.tracker),
        compiled(head, trainer.compile),
        StopSignal() as signal,
        Display(run.known_steps, state.step, accelerator.is_main_process) as display,
        nullcontext() if run.store is None else closing(run.store),
        closing(windows(run, state, meter, memory)) as stream,
    ):
        with kept_rng():
            on_main(accelerator, lambda: run.tracker.start(state.step, run.settings))
        if state.step:
            display.line(f"continuing after step {state.step} of {run.known_steps or 'as many as the time allows'}")
        if keeper.measures_now(state):
            keeper.evaluate(state, display)  # a kill fell between the checkpoint and the measurement
        stopped, before = False, state.seconds
        for window in stream if not (keeper.exhausted(state) or run.is_over(state)) else ():
            lr = set_lr(optimizer, run.optim, run.expected_steps(state), state.step)
            denominator, num_tokens = window_totals(run, window)
            run.joint.begin(run.progress(state), window)
            loss, grad_norm = 0.0, 0.0
            if denominator:
                local = backward(run, model, memory, teacher, window, denominator, meter)
                (loss,) = sum_over_ranks(accelerator, [local])
                with meter.phase("optimizer"):
                    skipped = state.skipped
                    grad_norm = update(run, stepper, state, loss)
                    if average is not None and state.skipped == skipped:
                        average.update(head, state.step + 1 - skipped)
            else:
                state.skipped += 1
                logger.warning("step %d: nothing is supervised in this step's rows; skipped", state.step + 1)
            state.advance(run.plan.num_steps(state.epoch))
            state.tokens += int(num_tokens)
            meter.add_step(loss, num_tokens)
            display.advance()
            stop, seconds = sum_over_ranks(accelerator, [float(signal.requested), meter.seconds])
            state.seconds = before + seconds / accelerator.num_processes
            stopped, done = bool(stop), run.is_over(state)
            if state.step % trainer.log_every == 0 or done:
                values = {
                    **meter.collect(accelerator),
                    **run.joint.collect(),
                    "lr": lr,
                    "grad_norm": grad_norm,
                    **keeper.progress(state),
                }
                keeper.log(state, values, display)
            with meter.paused():
                if close_step(run, keeper, state, display, stopped):
                    break
        keeper.finish(state)
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    head.eval()
    return TrainResult(state, stopped=stopped and not run.is_over(state), totals=meter.totals())


def window_totals(run: TrainInputs, window: list[TokenBatch]) -> list[float]:
    """What the loss of a window is divided by, and its tokens, over all ranks."""
    work = [tokens for tokens in window if bool((tokens.row_ids >= 0).any())]
    return sum_over_ranks(
        run.accelerator,
        [
            sum(float(run.objective.denominator(tokens)) for tokens in work),
            sum(float(tokens.attention_mask.sum()) for tokens in work),
        ],
    )


def close_step(run: TrainInputs, keeper: Keeper, state: TrainState, display: Display, stopped: bool) -> bool:
    """Saves and measures what is due after a step; returns whether training ends here. ``stopped``: by a signal."""
    done = run.is_over(state)
    if stopped or done or state.is_due(run.trainer.save_every):
        keeper.save(state)  # before measuring, so that a kill there costs no step
    if stopped and not done:
        display.line(f"stopped by a signal after step {state.step}; continue with resume=auto")
        return True
    if keeper.measures_now(state):
        keeper.evaluate(state, display)
    if keeper.exhausted(state) and not done:
        display.line(f"stopped early after step {state.step}: {state.stale} measurements brought no new best")
        keeper.save(state)
        return True
    return done


def backward(
    run: TrainInputs,
    model: nn.Module,
    memory: FeatureMemory,
    teacher: Teacher,
    window: list[TokenBatch],
    denominator: float,
    meter: Meter,
) -> float:
    """Adds the gradient of every micro-batch; returns this rank's part of the loss.

    The gradients of the ranks meet once, in the last micro-batch, and every rank runs backward even without
    an anchor: the objective's zero is connected to the graph. DDP averages over ranks, which the factor takes
    back.
    """
    accelerator, target = run.accelerator, run.target
    total = torch.zeros((), dtype=torch.float64, device=accelerator.device)
    for i, tokens in enumerate(window):
        with meter.phase("target"):
            tokens = tokens.to(accelerator.device)
            with target.together():  # one rank may remember what another has to capture
                features = run.joint.capture(tokens, memory)
            batch = build_draft_batch(tokens, features, rounded=True)
        with meter.phase("draft"), nullcontext() if i + 1 == len(window) else accelerator.no_sync(model):
            with accelerator.autocast():
                result = run.objective(model(batch, target.embed, target.unembedding), batch, teacher)
            loss = run.joint.total(result.loss_sum / denominator, tokens, batch)
            accelerator.backward(loss * accelerator.num_processes)
        total += loss.detach()
        meter.add_stats(result.stats)
    return float(total)


def update(run: TrainInputs, stepper: AcceleratedOptimizer, state: TrainState, loss: float) -> float:
    """Moves the weights if loss and gradient are finite; returns the gradient's norm before clipping."""
    accelerator = run.accelerator
    limit = run.optim.max_grad_norm or math.inf
    grad_norm = float(accelerator.clip_grad_norm_([*run.head.parameters(), *run.joint.parameters], limit))
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    if not finite:
        # fp16 overflows now and then: the scaler then skips the step and lowers its factor, until that is
        # spent.
        overflow = accelerator.scaler is not None and math.isfinite(loss) and accelerator.scaler.get_scale() > 1.0
        if not overflow and not run.trainer.skip_nonfinite:
            raise SpecDraftError(
                f"optim.lr: loss or gradient is not finite at step {state.step + 1}, got loss {loss} and "
                f"gradient norm {grad_norm}; lower it or use trainer.skip_nonfinite=true, with resume=auto"
            )
        state.skipped += 1
        logger.warning("step %d: loss %s, gradient norm %s; skipped", state.step + 1, loss, grad_norm)
    if finite or accelerator.scaler is not None:
        stepper.step()
    stepper.zero_grad(set_to_none=True)
    return grad_norm
