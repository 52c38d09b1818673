"""``specdraft run``: prepare, train and measure in one go."""

from __future__ import annotations

import gc
from dataclasses import asdict
from typing import Any

from specdraft.config.schema import EvalRun, PipelineRun
from specdraft.config.sources import HeadSource


def run(cfg: PipelineRun) -> None:
    """Trains a head (the data is prepared on the way) and measures the best one; prints its tables.

    Under a launcher every process trains and the first one measures. A run that a signal stopped is not measured.

    Raises:
        ConfigError, DataError, CheckpointError, UnsupportedTargetError: see the messages.
    """
    from specdraft.cli import evaluate

    measure = train_best(cfg)
    gc.collect()  # models are held by cycles of hooks: the target of training goes before that of the measurement comes
    if measure:
        evaluate.run(eval_settings(cfg))
    gc.collect()


def train_best(cfg: PipelineRun) -> bool:
    """Trains; whether this process should measure the best head now."""
    from accelerate import PartialState

    from specdraft.cli.train import train_head
    from specdraft.train.sharding import refuse_to_shard

    refuse_to_shard("measuring", "launch train.py, then call specdraft eval with target.device_map=auto")
    result = train_head(cfg)
    return not result.stopped and bool(PartialState().is_main_process)


def eval_settings(cfg: PipelineRun) -> EvalRun:
    """What ``specdraft eval`` would be called with for the best head of a run."""
    best = HeadSource(path=str(cfg.folder / "best"))
    return EvalRun(head=best, target=cfg.target, decode=cfg.decode, eval=cfg.eval)


def read_results(cfg: PipelineRun) -> dict[str, Any] | None:
    """results.json of the best head, if it is about this head, these prompts and these settings; else None.

    Raises:
        DataError: a set of prompts cannot be read.
    """
    import json

    from specdraft.core.files import file_sha256
    from specdraft.core.tree import TreeGrowth
    from specdraft.decode.proposers import draft_tree
    from specdraft.eval.prompts import load_sets, prompts_hash
    from specdraft.heads.storage import WEIGHTS_NAME

    weights, path = cfg.folder / "best" / WEIGHTS_NAME, cfg.folder / "best" / "results.json"
    if not path.is_file() or not weights.is_file():
        return None
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    sets = load_sets(cfg.eval.prompts, cfg.eval.limit, cfg.eval.seed)
    hashes = {name: prompts_hash(prompts) for name, prompts in sets.items()}
    settings = {key: getattr(cfg.decode, key) for key in ("max_new_tokens", "ignore_eos")} | {
        key: getattr(cfg.eval, key) for key in ("turns", "repeats", "bootstrap_samples", "seed", "batch_size")
    }
    shape = draft_tree(cfg.decode, cfg.head.num_draft_tokens)
    dtype = cfg.eval.dtype or cfg.target.dtype
    # What `eval` wrote there with other settings is not what this run measures.
    settings |= {"temperature": 0.0, "sampling": None}
    settings |= {"dtype": dtype, "head_dtype": cfg.decode.head_dtype or dtype, "tree": cfg.decode.tree}
    settings |= {
        "num_draft_tokens": shape.max_depth,
        "dynamic": asdict(shape) if isinstance(shape, TreeGrowth) else None,
    }
    same = (
        results["head"]["sha256"] == file_sha256(weights)
        and {name: figures["prompts_hash"] for name, figures in results["sets"].items()} == hashes
        and all(results["decode"].get(key) == value for key, value in settings.items())
    )
    return results if same else None
