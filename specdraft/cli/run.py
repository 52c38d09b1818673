"""``specdraft run``: prepare, train and measure in one go."""

from __future__ import annotations

from typing import Any

from specdraft.config.schema import EvalRun, HeadSource, PipelineRun


def run(cfg: PipelineRun) -> None:
    """Trains a head (the data is prepared on the way) and measures the best one; prints its tables.

    Under a launcher every process trains and the first one measures. A run that a signal stopped is not measured.

    Raises:
        ConfigError, DataError, CheckpointError, UnsupportedTargetError: see the messages.
    """
    from specdraft.cli import evaluate

    if train_best(cfg):
        evaluate.run(eval_settings(cfg))


def train_best(cfg: PipelineRun) -> bool:
    """Trains; whether this process should measure the best head now."""
    from accelerate import PartialState

    from specdraft.cli.train import train_head

    result = train_head(cfg)
    return not result.stopped and bool(PartialState().is_main_process)


def eval_settings(cfg: PipelineRun) -> EvalRun:
    """What ``specdraft eval`` would be called with for the best head of a run."""
    best = HeadSource(path=str(cfg.folder / "best"))
    return EvalRun(head=best, target=cfg.target, decode=cfg.decode, eval=cfg.eval)


def read_results(cfg: PipelineRun) -> dict[str, Any] | None:
    """results.json of the best head, if it was measured after it was saved and on the sets of ``cfg``."""
    import json

    from specdraft.data.sources import file_sha256
    from specdraft.heads.storage import WEIGHTS_NAME

    folder = cfg.folder / "best"
    if not (folder / "results.json").is_file() or not (folder / WEIGHTS_NAME).is_file():
        return None
    results: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    same_head = results["head"]["sha256"] == file_sha256(folder / WEIGHTS_NAME)
    return results if same_head and list(results["sets"]) == cfg.eval.prompts else None
