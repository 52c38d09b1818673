"""``specdraft eval``: measures a head, or another proposer, against plain decoding of its target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdraft.cli.trained import load_trained
from specdraft.config.schema import EvalRun
from specdraft.core.errors import ConfigError
from specdraft.targets._config import TargetConfig

if TYPE_CHECKING:
    from specdraft.eval.prompts import Prompt
    from specdraft.targets.hf import HFTarget


def run(cfg: EvalRun) -> None:
    """Loads head and target, decodes the prompts both ways, prints tables and writes results.json.

    Raises:
        ConfigError, CheckpointError, DataError, UnsupportedTargetError: see the messages; nothing is written then.
    """
    from specdraft.core.files import file_sha256
    from specdraft.eval.acceptance import evaluate_head
    from specdraft.eval.prompts import load_sets
    from specdraft.eval.report import print_results, report_console, write_results
    from specdraft.eval.tuned import machine, with_tuned_shape
    from specdraft.heads.storage import WEIGHTS_NAME, resolve_head

    if cfg.compares:
        from specdraft.cli import eval_several

        eval_several.run(cfg)
        return
    if cfg.proposer.kind != "head":
        _run_method(cfg)
        return
    assert cfg.head.path is not None
    folder = resolve_head(cfg.head.path, cfg.head.revision)
    output = results_path(cfg, folder)
    prompt_sets = load_sets(cfg.eval.prompts, cfg.eval.limit, cfg.eval.seed)
    trained = load_trained(folder, replace(cfg.target, dtype=cfg.eval.dtype or cfg.target.dtype), cfg.decode)
    target, head = trained.target, trained.head
    console = report_console()
    tuned = with_tuned_shape(
        folder,
        cfg.decode,
        machine(target.device, target.dtype, head.dtype),
        cfg.sampling.verifier == "block",
        cfg.eval.batch_size,
    )
    if tuned.note:
        own = "; measured is the head's own chain" if tuned.plain else ""
        console.print(f"{tuned.note}{own}", markup=False)
    results = evaluate_head(
        target,
        head,
        prompt_sets,
        tuned.decode,
        cfg.eval,
        sampling=cfg.sampling,
        head_sha256=file_sha256(folder / WEIGHTS_NAME),
        console=console,
    )
    if trained.adapted:
        results["drift"] = _drift(cfg, trained.config, target, prompt_sets)
    write_results(results, output)
    print_results(results, console)
    console.print(f"results: {output}", markup=False)


def _drift(
    cfg: EvalRun, config: TargetConfig, adapted: HFTarget, prompt_sets: Mapping[str, Sequence[Prompt]]
) -> dict[str, Any]:
    """How far the adapted target is from the original, which is loaded beside it, on the first prompts of the sets."""
    from specdraft.cli.tune import prompt_ids
    from specdraft.eval.drift import PROMPTS, drift
    from specdraft.eval.summary import Bootstrap
    from specdraft.targets.hf import load_target

    original = load_target(config)
    share = max(1, PROMPTS // len(prompt_sets))
    prompts = [prompt for prompts in prompt_sets.values() for prompt in prompts[:share]]
    bootstrap = Bootstrap(cfg.eval.bootstrap_samples, cfg.eval.seed)
    return drift(original, adapted, prompt_ids(original, prompts), cfg.decode.max_new_tokens, bootstrap)


def _run_method(cfg: EvalRun) -> None:
    """The same for a proposer without a trained head."""
    from specdraft.eval.acceptance import evaluate
    from specdraft.eval.prompts import load_sets
    from specdraft.eval.report import print_results, report_console, write_results
    from specdraft.eval.subjects import method_subject
    from specdraft.targets.hf import load_target

    output = results_path(cfg, None)
    prompt_sets = load_sets(cfg.eval.prompts, cfg.eval.limit, cfg.eval.seed)
    target = load_target(replace(cfg.target, dtype=cfg.eval.dtype or cfg.target.dtype))
    subject = method_subject(target, cfg.proposer)
    console = report_console()
    results = evaluate(target, subject, prompt_sets, cfg.decode, cfg.eval, cfg.sampling, console)
    write_results(results, output)
    print_results(results, console)
    console.print(f"results: {output}", markup=False)


def results_path(cfg: EvalRun, folder: Path | None) -> Path:
    """The file that is written: as told, else in the head's own ``folder``, else here, for a head from the Hub or none.

    Raises:
        ConfigError: it is a folder.
    """
    is_local = cfg.head.path is not None and Path(cfg.head.path).exists()
    path = Path(cfg.output or "results.json")
    if cfg.output is None and folder is not None and is_local:
        path = folder / "results.json"
    if path.is_dir():
        raise ConfigError(f"output: is a folder, got {path}; give a file such as {path / 'results.json'}")
    return path
