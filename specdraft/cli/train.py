"""``specdraft train``: puts a training run together from its settings and starts it."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from specdraft.config.schema import ExperimentRun
from specdraft.core.errors import ConfigError
from specdraft.data._answers_config import FREE as ANSWERS_FREE

if TYPE_CHECKING:
    from accelerate import Accelerator
    from rich.console import Console

    from specdraft.data.batching import BatchPlan
    from specdraft.data.prepared import PreparedData
    from specdraft.heads.base import DraftHead
    from specdraft.targets.hf import HFTarget
    from specdraft.train.inputs import TrainInputs, TrainResult
    from specdraft.train.state import EvalPoint


def run(cfg: ExperimentRun) -> None:
    """Trains a head; see ``train_head``."""
    train_head(cfg)


def train_head(cfg: ExperimentRun) -> TrainResult:
    """Loads the target, prepares the data where that was not done, trains, and says where the best head is.

    Every process of a launcher calls it. ``cfg.folder`` receives config.yaml, environment.json, the metrics,
    ``checkpoints/``, ``best/`` and ``last/``.

    Raises:
        ConfigError, DataError, CheckpointError, UnsupportedTargetError: see the messages.
        SpecDraftError: loss or gradient is not finite.
    """
    from rich.console import Console

    from specdraft.cli.plan import announce
    from specdraft.config.paths import check_output
    from specdraft.config.store import save_resolved
    from specdraft.core.files import write_json
    from specdraft.eval.environment import environment
    from specdraft.targets.lora import check_peft
    from specdraft.train.compiling import check_compiler
    from specdraft.train.inputs import make_accelerator
    from specdraft.train.loop import train
    from specdraft.train.optim import check_optimizer
    from specdraft.train.progress import parameter_table
    from specdraft.train.resuming import compare_with_checkpoint
    from specdraft.train.state import on_main
    from specdraft.train.trackers import check_tracker

    check_optimizer(cfg.optim)
    check_peft(cfg.adapter)
    accelerator = make_accelerator(cfg.trainer, cfg.target.device)
    if cfg.trainer.compile:
        check_compiler(accelerator.device)
    console = Console(quiet=not accelerator.is_main_process, highlight=False, soft_wrap=True)
    on_main(accelerator, lambda: check_tracker(cfg.tracker))
    on_main(accelerator, lambda: check_output(cfg.folder, cfg.resume))
    if cfg.resume != "never":
        changed = on_main(accelerator, lambda: compare_with_checkpoint(cfg.folder, asdict(cfg)))
        if changed:
            console.print(changed, markup=False)
    on_main(accelerator, lambda: announce(cfg, console, accelerator.num_processes))
    inputs, target = assemble(cfg, accelerator, console)

    def describe() -> None:
        try:
            save_resolved(cfg, cfg.folder)
            write_json(cfg.folder / "environment.json", environment() | {"processes": accelerator.num_processes})
        except OSError as error:
            raise ConfigError(f"output_dir: cannot be written, got {error}; free space or choose another") from error

    on_main(accelerator, describe)
    console.print(parameter_table(target.model, inputs.head))
    result = train(inputs)
    accelerator.end_training()
    report(cfg, result, console)
    return result


def assemble(
    cfg: ExperimentRun,
    accelerator: Accelerator,
    console: Console,
    loaded: tuple[HFTarget, PreparedData] | None = None,
) -> tuple[TrainInputs, HFTarget]:
    """Everything the loop needs, the same on every rank, and the target. ``loaded``: target and data that are there."""
    from accelerate.utils import set_seed

    from specdraft.cli.stored import load_both, open_store
    from specdraft.data.chat import pad_token_id
    from specdraft.heads.storage import check_source_kind
    from specdraft.losses.objectives import Objective
    from specdraft.train.inputs import TrainInputs
    from specdraft.train.joint import Alone, Joint, check_processes
    from specdraft.train.trackers import build_tracker

    rank, world_size = accelerator.process_index, accelerator.num_processes
    if cfg.trainer.warm_start is not None:
        check_source_kind(cfg.trainer.warm_start, cfg.head.kind)
    settings = replace(cfg.target, device=str(accelerator.device))
    if cfg.adapter.rank is not None:
        check_processes(world_size)
        settings = replace(settings, pack_weights=False)  # packed weights take no adapter
    target, data = loaded or load_both(cfg, settings, accelerator)
    for line in data_lines(data.manifest):
        console.print(line, markup=False)
    set_seed(cfg.seed)  # the same first weights on every rank
    head = build_head(cfg, target, data, console)
    plan = batch_plan(cfg, data, rank, world_size)
    console.print(
        f"batches: {plan.num_steps(0):,} steps an epoch, {plan.padding_share():.1%} of their positions padding"
    )
    store = open_store(cfg, target, data, accelerator, console)
    # After the head is initialised from the target's plain layers.
    joint = Alone() if cfg.adapter.rank is None else Joint(target, cfg.adapter)
    assert target.tokenizer is not None
    inputs = TrainInputs(
        accelerator=accelerator,
        target=target,
        head=head,
        objective=Objective(cfg.loss),
        rows=data.rows,
        plan=plan,
        pad_id=pad_token_id(target.tokenizer),
        optim=cfg.optim,
        trainer=cfg.trainer,
        tracker=build_tracker(cfg.tracker, cfg.folder, accelerator.is_main_process),
        folder=cfg.folder,
        settings=asdict(cfg),
        provenance=provenance(cfg, data.manifest),
        seed=cfg.seed,
        resume=cfg.resume,
        joint=joint,
        store=store,
        evaluate=acceptance(cfg, target, head),
    )
    return inputs, target


def batch_plan(cfg: ExperimentRun, data: PreparedData, rank: int, world_size: int) -> BatchPlan:
    """Which rows meet in which batch, in training and where their features are stored before it."""
    from specdraft.data.batching import BatchPlan

    return BatchPlan(
        lengths=data.lengths,
        batch_size=cfg.data.batch_size,
        accumulation_steps=cfg.trainer.accumulation_steps,
        world_size=world_size,
        rank=rank,
        seed=cfg.data.seed,
        bucket=cfg.data.bucket,
        capacity=cfg.data.max_length if cfg.data.packing else None,
    )


def build_head(cfg: ExperimentRun, target: HFTarget, data: PreparedData, console: Console) -> DraftHead:
    """The untrained head, its draft vocabulary chosen from what is supervised, initialised from the target."""
    from specdraft.data.chat import ChatRenderer
    from specdraft.heads.storage import check_head_matches, load_head, start_from
    from specdraft.train.vocabulary import choose_vocabulary

    assert target.tokenizer is not None
    renderer = ChatRenderer(target.tokenizer, system=cfg.data.system, enable_thinking=cfg.data.enable_thinking)
    always = {*renderer.end_of_turn_ids, *renderer.marker_ids}
    vocabulary = choose_vocabulary(cfg.head, data, target.spec, always)
    head = vocabulary.config.build(target.spec)
    if head.vocab is not None and vocabulary.token_ids is not None:
        head.vocab.set_tokens(vocabulary.token_ids)
    for line in vocabulary.lines:
        console.print(line)
    head.to(target.device)
    head.init_from_target(target.embed, target.unembedding)
    started = head.init_layer(target.last_layer())
    if started is not None:
        console.print(started)
    if cfg.trainer.warm_start is not None:
        source = load_head(cfg.trainer.warm_start, device=target.device, dtype=head.dtype)
        check_head_matches(source, target.spec)
        console.print(start_from(head, source), markup=False)
    return head


def acceptance(cfg: ExperimentRun, target: HFTarget, head: DraftHead) -> Callable[[DraftHead], EvalPoint] | None:
    """Measures acceptance on held-out prompts as decoding will; None when no prompts are wanted.

    Raises:
        ConfigError: the head cannot draft the tree of ``cfg.decode``.
    """
    from specdraft.data.chat import ChatRenderer
    from specdraft.data.formats import Message
    from specdraft.decode.proposers import check_shape, draft_tree
    from specdraft.eval.acceptance import measure_acceptance
    from specdraft.eval.prompts import DEV_SET, load_prompts
    from specdraft.train.state import EvalPoint

    tree = draft_tree(cfg.decode, head.config.num_draft_tokens)
    check_shape(head, tree)
    if not cfg.trainer.eval_prompts:
        return None
    assert target.tokenizer is not None
    renderer = ChatRenderer(target.tokenizer, system=cfg.data.system, enable_thinking=cfg.data.enable_thinking)
    prompt_ids = []
    for prompt in load_prompts(DEV_SET, cfg.trainer.eval_prompts):
        message: Message = {"role": "user", "content": prompt.turns[0]}
        prompt_ids.append(renderer.prompt_ids([message]))

    def evaluate(trained: DraftHead) -> EvalPoint:
        point = measure_acceptance(target, trained, prompt_ids, tree, cfg.trainer.eval_max_new_tokens)
        return EvalPoint(point.acceptance_length, point.acceptance_rate, point.num_steps, point.num_tokens)

    return evaluate


def data_lines(manifest: dict[str, Any]) -> list[str]:
    """What the data set holds, and which rows were dropped for which reason."""
    dropped = ", ".join(f"{reason}: {count}" for reason, count in manifest["dropped"].items())
    return [
        f"data: {manifest['num_rows']:,} rows, {manifest['num_tokens']:,} tokens, "
        f"{manifest['supervised_share']:.1%} of them supervised, answers by the {manifest['responses']}",
        f"data: dropped rows: {dropped or 'none'}",
    ]


def provenance(cfg: ExperimentRun, manifest: dict[str, Any]) -> dict[str, Any]:
    """What a saved head says of its training. It may be published, so folders of this machine are left out."""
    from specdraft.data.files import public_name

    names = {name: [public_name(source) for source in getattr(cfg.data, name)] for name in ("sources", "held_out")}
    free = {key.rpartition(".")[2] for key in ANSWERS_FREE}  # addresses among them
    answers = {key: value for key, value in asdict(cfg.data.answers).items() if key not in free}
    counts = ("num_rows", "num_tokens", "num_supervised_tokens", "responses")
    return {
        "name": cfg.name,
        "seed": cfg.seed,
        "data": {key: manifest[key] for key in counts},
        "settings": {
            "data": asdict(cfg.data) | names | {"cache_dir": None, "answers": answers},
            "features": {"mode": cfg.features.mode, "precision": cfg.features.precision},
            "loss": asdict(cfg.loss),
            "optim": asdict(cfg.optim),
            "trainer": asdict(cfg.trainer),
            "adapter": asdict(cfg.adapter),
        },
    }


def report(cfg: ExperimentRun, result: TrainResult, console: Console) -> None:
    """The last lines on the terminal: what was done, where the time went, the best head and how to measure it."""
    state, totals = result.state, result.totals
    if result.stopped:
        return
    shares = ", ".join(f"{name.partition('/')[2]} {share:.0%}" for name, share in totals.items() if "/" in name)
    rate = totals["tokens"] / totals["seconds"] if totals["seconds"] else 0.0
    console.print(
        f"trained: {state.step:,} steps, {state.tokens:,} tokens, {rate:,.0f} tokens/s in this process's "
        f"{totals['seconds']:,.0f} s ({shares}), peak memory {totals['peak_memory_gib']:.2f} GiB",
        markup=False,
    )
    best = (
        f"acceptance length {state.best_value:.2f}, step {state.best_step}" if state.best_step >= 0 else "the last step"
    )
    console.print(f"best head: {cfg.folder / 'best'} ({best})", markup=False)
    console.print(f"measure it: specdraft eval {shlex.quote('head=' + str(cfg.folder / 'best'))}", markup=False)


def main() -> int:
    """The entry of ``train.py``, for ``accelerate launch train.py`` and torchrun."""
    from specdraft.cli.main import train_main

    return train_main()
