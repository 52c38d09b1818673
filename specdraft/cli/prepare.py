"""``specdraft prepare``: makes the training data, answers of the target included, before any training."""

from __future__ import annotations

import os
import time

from specdraft.config.schema import PrepareRun


def run(cfg: PrepareRun) -> None:
    """Prepares the data set of ``cfg.data`` for ``cfg.target``, or finds it prepared, and says what it holds.

    Every process of a launcher may call it; they share the work of answering.

    Raises:
        ConfigError, DataError, UnsupportedTargetError: see the messages. Answers already written are kept.
    """
    from rich.console import Console

    from specdraft.cli.train import data_lines
    from specdraft.data.prepare import prepare
    from specdraft.targets.hf import load_target
    from specdraft.targets.loading import load_tokenizer

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    start = time.perf_counter()
    source = load_target(cfg.target) if cfg.data.regenerate else load_tokenizer(cfg.target)
    data = prepare(cfg.data, source, cfg.data_dir, rank=rank, world_size=world_size)
    console = Console(quiet=rank != 0, highlight=False, soft_wrap=True)
    for line in data_lines(data.manifest):
        console.print(line, markup=False)
    lengths = ", ".join(f"{length}: {count}" for length, count in data.manifest["length_histogram"].items())
    console.print(f"data: rows by tokens: {lengths}", markup=False)
    console.print(f"data: {data.folder} ({time.perf_counter() - start:.0f} s)", markup=False)
