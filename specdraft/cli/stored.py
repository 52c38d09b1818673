"""The feature store of a run: written by prepare, or by train where that was not done, and opened for training."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from specdraft.config.schema import ExperimentRun
from specdraft.core.errors import ConfigError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from rich.console import Console
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from specdraft.data.chat import ChatRenderer
    from specdraft.data.feature_store import FeatureStore, StoreIdentity
    from specdraft.data.feature_writer import FeatureWriter
    from specdraft.data.features import StoredRows
    from specdraft.data.prepared import PreparedData
    from specdraft.targets._config import TargetConfig
    from specdraft.targets.hf import HFTarget

GIB = 1 << 30


def write_features(
    cfg: ExperimentRun,
    source: HFTarget | PreTrainedTokenizerBase,
    data: PreparedData,
    console: Console,
    *,
    rank: int = 0,
    world_size: int = 1,
) -> None:
    """What ``specdraft prepare`` adds with features=offline: the whole store, its shards checked, torn ones made anew.

    ``source``: the target, or its tokenizer where the target was not loaded.

    Raises:
        ConfigError: the store does not fit the budget or the disk.
        DataError: it is for something else, is being written by another run, or cannot be written.
    """
    if cfg.features.mode != "offline":
        return
    from specdraft.targets.hf import HFTarget, load_target

    target = source if isinstance(source, HFTarget) else load_target(cfg.target)
    _fill(cfg, target, data, console, (rank, world_size, _barrier(world_size)), verify=True)


def _barrier(world_size: int) -> Callable[[], None]:
    """Returns when all processes of the launcher have called it."""
    if world_size == 1:
        return lambda: None
    from datetime import timedelta

    from torch import distributed

    if not distributed.is_initialized():
        # One process may have much more to capture than another.
        distributed.init_process_group("gloo", timeout=timedelta(days=7))

    def barrier() -> None:
        distributed.barrier()

    return barrier


def open_store(
    cfg: ExperimentRun, target: HFTarget, data: PreparedData, accelerator: Accelerator, console: Console
) -> StoredRows | None:
    """The store as the run's training uses it, made complete first with features=offline; None with features=online.

    Raises:
        ConfigError, DataError: see ``write_features``.
    """
    if cfg.features.mode == "online":
        return None
    from specdraft.data.feature_store import FeatureStore
    from specdraft.data.features import StoredRows
    from specdraft.train.state import on_main

    identity = identity_of(cfg, target, data)
    ranks = accelerator.process_index, accelerator.num_processes, accelerator.wait_for_everyone
    if cfg.features.mode == "hybrid":
        writer = _writer(cfg, identity, ranks[0], ranks[1])
        accelerator.wait_for_everyone()
        store = FeatureStore(folder_of(cfg, identity), identity, target.dtype)
        console.print(f"features: {store.num_rows:,} of {len(data):,} rows stored in {store.folder}", markup=False)
        return StoredRows(store, writer)
    if not on_main(accelerator, lambda: is_complete(cfg, target, data)):
        return StoredRows(_fill(cfg, target, data, console, ranks))
    store = FeatureStore(folder_of(cfg, identity), identity, target.dtype)
    console.print(f"features: {store.num_bytes / GIB:.2f} GiB in {store.folder}", markup=False)
    return StoredRows(store)


def load_both(cfg: ExperimentRun, settings: TargetConfig, accelerator: Accelerator) -> tuple[HFTarget, PreparedData]:
    """The target as ``settings`` have it, sharded where the launch asks for that, and its prepared data.

    Where the store of the run is complete and no acceptance is measured, the layers of the target are not loaded.

    Raises:
        ConfigError, DataError, CheckpointError, UnsupportedTargetError: see ``load_target`` and ``prepare``.
    """
    from specdraft.cli.answers import answer_writer, needs_target
    from specdraft.data.prepare import prepare
    from specdraft.targets.ends import load_ends
    from specdraft.targets.hf import load_target
    from specdraft.train.sharding import asks_to_shard, load_sharded
    from specdraft.train.state import on_main

    rank, world_size = accelerator.process_index, accelerator.num_processes
    target: HFTarget | None = None
    runs_nothing = cfg.features.mode == "offline" and not cfg.trainer.eval_prompts
    if runs_nothing and on_main(accelerator, lambda: _is_ready(cfg, settings)):
        target = load_ends(settings)
    writes: HFTarget | None = None
    if target is None and world_size > 1 and asks_to_shard():
        target = sharded = load_sharded(settings, accelerator)
        if needs_target(cfg):
            on_main(accelerator, lambda: _need_prepared(cfg, sharded))
            writes = target
    else:
        target = writes = target or load_target(settings)
    assert target.tokenizer is not None
    source, writer = writes or target.tokenizer, answer_writer(cfg, writes, world_size)
    data = prepare(cfg.data, source, cfg.data_dir, rank=rank, world_size=world_size, make_writer=writer)
    return target, data


def _need_prepared(cfg: ExperimentRun, target: HFTarget) -> None:
    """Raises ConfigError where the data would have to be answered, or their answers checked, by a sharded target."""
    from specdraft.data.prepare import prepare

    def refuse(renderer: ChatRenderer) -> NoReturn:
        raise ConfigError(
            "data.regenerate: a sharded target would gather all its weights for every token of an answer, got data that are "
            "not prepared; run specdraft prepare first, with data.answers.by=server or target.device_map=auto"
        )

    prepare(cfg.data, target, cfg.data_dir, make_writer=refuse)


def _is_ready(cfg: ExperimentRun, settings: TargetConfig) -> bool:
    """Whether data and store of a run are complete, found out without the layers of the target."""
    from specdraft.cli.answers import answer_writer
    from specdraft.data.feature_store import STORE_NAME
    from specdraft.data.prepare import prepare
    from specdraft.targets.ends import LayersNeededError, load_ends

    folders = cfg.data_dir.glob("features-*") if cfg.features.dir is None else [Path(cfg.features.dir)]
    if not any((folder / STORE_NAME).exists() for folder in folders):
        return False  # so that the data are not prepared by one process alone
    ends = load_ends(settings)
    if ends is None:
        return False
    try:
        data = prepare(cfg.data, ends, cfg.data_dir, make_writer=answer_writer(cfg, ends, 1))
        return is_complete(cfg, ends, data)
    except LayersNeededError:
        return False


def is_complete(cfg: ExperimentRun, target: HFTarget, data: PreparedData) -> bool:
    """Whether the store of a run holds all rows.

    Raises:
        DataError: it is for something else, or torn.
    """
    from specdraft.data.feature_store import STORE_NAME, FeatureStore

    identity = identity_of(cfg, target, data)
    folder = folder_of(cfg, identity)
    if not (folder / STORE_NAME).exists():
        return False
    return not _lacking(FeatureStore(folder, identity, target.dtype), _row_counts(data, identity))


def identity_of(cfg: ExperimentRun, target: HFTarget, data: PreparedData) -> StoreIdentity:
    """What the run's store is of."""
    import torch

    from specdraft.data.feature_store import store_identity

    with torch.device("meta"):
        request = cfg.head.build(target.spec).features()
    return store_identity(target.spec, target.dtype, request, cfg.features.precision, data.manifest, len(data))


def folder_of(cfg: ExperimentRun, identity: StoreIdentity) -> Path:
    """Where the run's store lies."""
    return Path(cfg.features.dir) if cfg.features.dir is not None else cfg.data_dir / f"features-{identity.digest}"


def _row_counts(data: PreparedData, identity: StoreIdentity) -> Tensor:
    import torch

    from specdraft.data.feature_layout import row_counts

    return torch.cat([row_counts(block.loss_mask, block.offsets, identity.request) for block in data.blocks()])


def _lacking(store: FeatureStore, counts: Tensor) -> list[int]:
    """Rows with something to store that are not stored."""
    return store.missing((counts[:, 0] > 0).nonzero().flatten().tolist())


def _writer(
    cfg: ExperimentRun, identity: StoreIdentity, rank: int, world_size: int, verify: bool = False
) -> FeatureWriter:
    from specdraft.data.feature_writer import FeatureWriter

    return FeatureWriter(
        folder_of(cfg, identity),
        identity,
        rank=rank,
        world_size=world_size,
        shard_bytes=cfg.features.shard_mib << 20,
        budget_bytes=None if cfg.features.budget_gib is None else int(cfg.features.budget_gib * GIB),
        verify=verify,
    )


def _fill(
    cfg: ExperimentRun,
    target: HFTarget,
    data: PreparedData,
    console: Console,
    ranks: tuple[int, int, Callable[[], None]],
    verify: bool = False,
) -> FeatureStore:
    """The whole store, what it lacks captured by the target. ranks: this process's, their number, and a barrier."""
    from specdraft.data.chat import pad_token_id
    from specdraft.data.feature_capture import capture_rows
    from specdraft.data.feature_layout import kept_counts, store_bytes
    from specdraft.data.feature_store import FeatureStore
    from specdraft.data.feature_writer import check_room
    from specdraft.data.progress import progress

    rank, world_size, barrier = ranks
    identity = identity_of(cfg, target, data)
    folder, counts = folder_of(cfg, identity), _row_counts(data, identity)
    features = cfg.features
    size = store_bytes(
        kept_counts(counts), identity.request, identity.hidden_size, features.precision, features.shard_mib << 20
    )
    check_room(folder, size, None if features.budget_gib is None else int(features.budget_gib * GIB))
    begin = time.perf_counter()
    writer = _writer(cfg, identity, rank, world_size, verify)
    try:
        barrier()
        store = FeatureStore(folder, identity, target.dtype)
        lacking = _lacking(store, counts)
        if lacking:  # in all processes or in none
            console.print(
                f"features: {size / GIB:.2f} GiB in {folder}; {len(lacking):,} of {len(data):,} rows to capture",
                markup=False,
            )
            from specdraft.cli.train import batch_plan

            assert target.tokenizer is not None
            plan = batch_plan(cfg, data, rank, world_size)
            batches = (batch for step in plan.epoch(0) for batch in step)
            with (
                progress("rows of features", -(-len(data) // world_size), not console.quiet) as advance,
                target.together(),
            ):
                capture_rows(target, data.rows, batches, writer, store, pad_token_id(target.tokenizer), advance)
        barrier()
        store.refresh()
    finally:
        writer.release()
    lacking = _lacking(store, counts)
    if lacking:
        from specdraft.core.errors import DataError

        raise DataError(f"features.dir: {len(lacking)} rows were not stored, got {folder}; start again")
    console.print(
        f"features: {store.num_bytes / GIB:.2f} GiB in {folder} ({time.perf_counter() - begin:.0f} s)", markup=False
    )
    return store
