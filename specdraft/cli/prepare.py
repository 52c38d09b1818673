"""``specdraft prepare``: makes the training data, answers of the target included, before any training."""

from __future__ import annotations

import os
import time
from typing import Any

from specdraft.config.schema import PrepareRun


def run(cfg: PrepareRun) -> None:
    """Prepares the data set of ``cfg.data`` for ``cfg.target``, or finds it prepared, and says what it holds.

    Every process of a launcher may call it; they share the work of answering.

    Raises:
        ConfigError, DataError, UnsupportedTargetError: see the messages. Answers already written are kept.
    """
    from rich.console import Console

    from specdraft.cli.answers import answer_writer, needs_target
    from specdraft.cli.plan import announce
    from specdraft.cli.stored import write_features
    from specdraft.cli.train import data_lines
    from specdraft.data.prepare import prepare
    from specdraft.targets.hf import load_target
    from specdraft.targets.loading import load_tokenizer

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if needs_target(cfg) or cfg.features.mode == "offline":
        from specdraft.train.sharding import refuse_to_shard

        refuse_to_shard("preparing", "use one process with target.device_map=auto, or configs/accelerate/ddp.yaml")
    console = Console(quiet=rank != 0, highlight=False, soft_wrap=True)
    if rank == 0:
        announce(cfg, console, world_size)
    start = time.perf_counter()
    target = load_target(cfg.target) if needs_target(cfg) else None
    source = target or load_tokenizer(cfg.target)
    writer = answer_writer(cfg, target, world_size)
    data = prepare(cfg.data, source, cfg.data_dir, rank=rank, world_size=world_size, make_writer=writer)
    for line in [*source_lines(data.manifest), *data_lines(data.manifest)]:
        console.print(line, markup=False)
    lengths = ", ".join(f"{length}: {count}" for length, count in data.manifest["length_histogram"].items())
    console.print(f"data: rows by tokens: {lengths}", markup=False)
    console.print(f"data: {data.folder} ({time.perf_counter() - start:.0f} s)", markup=False)
    write_features(cfg, source, data, console, rank=rank, world_size=world_size)


def source_lines(manifest: dict[str, Any]) -> list[str]:
    """What was read of every source, and how many of the conversations were kept."""
    lines = []
    for source in manifest["sources"]:
        commit = "" if source["revision"] is None else f" at {source['revision'][:12]}"
        files = f" in {source['num_files']} files" if source["num_files"] > 1 else ""
        lines.append(
            f"data: {source['source']}{commit}: {source['num_rows']:,} rows{files}, "
            f"{source['num_conversations']:,} conversations"
        )
    return [*lines, f"data: {manifest['num_conversations']:,} conversations drawn from all sources"]
