"""``specdraft tune``: chooses the shape of a head's drafts for this machine and writes it beside the head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdraft.cli.trained import load_trained
from specdraft.config.schema import TuneRun
from specdraft.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from specdraft.eval.prompts import Prompt
    from specdraft.targets.hf import HFTarget


def run(cfg: TuneRun) -> None:
    """Measures, predicts, measures the best, and writes decode.json.

    Raises:
        ConfigError, CheckpointError, DataError, UnsupportedTargetError: see the messages; nothing is written then.
    """
    from specdraft.core.files import file_sha256
    from specdraft.decode._config import DecodeConfig
    from specdraft.eval.environment import environment
    from specdraft.eval.prompts import load_sets, prompts_hash
    from specdraft.eval.report import report_console, write_results
    from specdraft.eval.shapes import describe_json
    from specdraft.eval.tune import Tuner
    from specdraft.eval.tuned import SCHEMA, machine, with_known_batches
    from specdraft.heads.storage import WEIGHTS_NAME, resolve_head

    assert cfg.head.path is not None
    folder = resolve_head(cfg.head.path, cfg.head.revision)
    output = tuned_path(cfg, folder)
    try:
        sets = load_sets(cfg.tune.prompts, cfg.tune.limit, cfg.tune.seed)
    except DataError as error:
        raise DataError(str(error).replace("eval.prompts:", "tune.prompts:", 1)) from error
    chosen = replace(cfg.target, dtype=cfg.tune.dtype or cfg.target.dtype)
    trained = load_trained(folder, chosen, DecodeConfig(head_dtype=cfg.tune.head_dtype))
    target, head = trained.target, trained.head
    prompts = [prompt for rows in sets.values() for prompt in rows]
    console = report_console()
    tuner = Tuner(
        target,
        head,
        prompt_ids(target, prompts),
        cfg.tune,
        lambda line: console.print(line, markup=False, soft_wrap=True),
    )
    body = tuner.run()
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": machine(target.device, target.dtype, head.dtype),
        "target": {"name": target.spec.name, "fingerprint": target.spec.fingerprint},
        "head": {"kind": head.config.kind, "sha256": file_sha256(folder / WEIGHTS_NAME)},
        "batches": {
            str(cfg.tune.batch_size): {
                **body,
                "prompts": {name: prompts_hash(rows) for name, rows in sets.items()},
                "environment": environment(),
            }
        },
    }
    write_results(with_known_batches(output, result), output)
    shape, measured = body["shape"], body["measured"]
    if shape["plain"]:
        console.print("plain decoding is the fastest here: no shape of draft was faster", markup=False)
    else:
        console.print(
            f"chosen: {describe_json(shape)}, {measured['speedup']:.2f}x plain decoding; speed-up over acceptance length "
            f"{measured['efficiency']:.2f}",
            markup=False,
        )
    console.print(f"shape: {output}", markup=False, soft_wrap=True)


def prompt_ids(target: HFTarget, prompts: list[Prompt]) -> list[list[int]]:
    """Token ids of the first turns that the chat template takes and that leave room for an answer.

    Raises:
        DataError: none does, or the tokenizer has no chat template.
    """
    from specdraft.data.chat import ChatRenderer, TemplateRefusedError
    from specdraft.data.formats import Message

    assert target.tokenizer is not None
    renderer = ChatRenderer(target.tokenizer)
    found = []
    for prompt in prompts:
        messages: list[Message] = [{"role": "user", "content": prompt.turns[0]}]
        if prompt.system is not None:
            messages.insert(0, {"role": "system", "content": prompt.system})
        try:
            ids = renderer.prompt_ids(messages)
        except TemplateRefusedError:
            continue
        if len(ids) < target.spec.max_position_embeddings:
            found.append(ids)
    if not found:
        raise DataError(f"tune.prompts: no prompt can be decoded, got {len(prompts)}; use another set")
    return found


def tuned_path(cfg: TuneRun, folder: Path) -> Path:
    """The file that is written: as told, else beside the head, else here for a head from the Hub.

    Raises:
        ConfigError: it is a folder.
    """
    from specdraft.eval.tuned import TUNED_NAME

    is_local = cfg.head.path is not None and Path(cfg.head.path).exists()
    path = Path(cfg.output) if cfg.output is not None else folder / TUNED_NAME if is_local else Path(TUNED_NAME)
    if path.is_dir():
        raise ConfigError(f"output: is a folder, got {path}; give a file such as {path / TUNED_NAME}")
    return path
