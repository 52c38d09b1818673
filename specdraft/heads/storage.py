"""A head on disk: config.json and model.safetensors in one folder, written atomically and read strictly."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from specdraft.core.errors import CheckpointError, ConfigError
from specdraft.core.files import sync
from specdraft.core.types import AdapterWeights, TargetSpec
from specdraft.heads._config import HeadConfig
from specdraft.heads.base import DraftHead, head_config, head_kinds

FORMAT = 1
CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
ADAPTER_NAME = "adapter.safetensors"
"""Of a head whose target was trained with it."""


def save_head(
    head: DraftHead, folder: str | Path, extra: dict[str, Any] | None = None, adapter: AdapterWeights | None = None
) -> Path:
    """Writes ``head`` to ``folder``, replacing a head that is there; a kill at any moment leaves the old or the new one.

    config.json holds the format version, the kind, its settings and the target's spec; ``extra`` adds keys of the run
    (data, training) that the head itself does not need. ``adapter``: of the target that was trained with the head.

    Raises:
        CheckpointError: the files cannot be written (disk full, no permission); what was there is untouched.
    """
    folder = Path(folder)
    config = {
        **(extra or {}),
        "model_type": "specdraft",
        "format": FORMAT,
        "kind": head.config.kind,
        "head": asdict(head.config),
        "target": asdict(head.spec),
        "dtype": str(head.dtype).removeprefix("torch."),
    }
    if adapter is not None:
        config["adapter"] = {"scale": adapter.scale, "num_parameters": adapter.num_parameters}
    tensors = {name: value.detach().cpu().contiguous() for name, value in head.state_dict().items()}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            save_file(tensors, temporary / WEIGHTS_NAME, metadata={"format": "pt"})
            if adapter is not None:
                save_file(adapter.tensors, temporary / ADAPTER_NAME, metadata={"format": "pt"})
            (temporary / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
            for path in temporary.iterdir():
                path.chmod(0o644)  # safetensors writes for its user alone
                sync(path)
            temporary.chmod(0o755)
            _swap(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"head: could not be saved, got {folder} ({error}); free space or choose another output_dir"
        ) from error
    return folder


def _swap(new: Path, folder: Path) -> None:
    """Puts ``new`` in the place of ``folder``. A folder cannot be replaced in one call, so the old one is moved first."""
    old = folder.with_name(f".{folder.name}-old")
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def resolve_head(source: str | Path, revision: str | None = None) -> Path:
    """The local folder of a head given as folder or Hub id (downloaded: config, weights, results only).

    Raises:
        CheckpointError: neither a folder with a head nor a Hub repository that can be reached.
    """
    folder = Path(source)
    recovered = folder.with_name(f".{folder.name}-old")
    if not folder.exists() and (recovered / CONFIG_NAME).is_file():
        folder = recovered  # a kill fell between the two renames of ``_swap``
    if (folder / CONFIG_NAME).is_file():
        return folder
    if folder.exists() or str(source).count("/") != 1 or str(source).startswith((".", "/", "~")):
        raise CheckpointError(f"head: no {CONFIG_NAME} there, got {source}; give the folder of a head or a Hub id")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(
            snapshot_download(
                str(source),
                revision=revision,
                allow_patterns=[CONFIG_NAME, WEIGHTS_NAME, ADAPTER_NAME, "results.json", "README.md"],
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"head: neither a folder nor a reachable Hub id, got {source} ({reason}); check the name and the network"
        ) from error


def read_head_config(folder: Path) -> dict[str, Any]:
    """config.json of a head's folder, with its format checked.

    Raises:
        CheckpointError: missing, torn, or not written by specdraft.
    """
    try:
        config = json.loads((folder / CONFIG_NAME).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"head: {CONFIG_NAME} cannot be read, got {folder} ({error}); save the head again"
        ) from error
    if not isinstance(config, dict) or config.get("format") != FORMAT or not {"kind", "head", "target"} <= set(config):
        raise CheckpointError(f"head: not a specdraft head of format {FORMAT}, got {folder}; import or save it again")
    return config


def read_adapter(folder: Path) -> AdapterWeights | None:
    """The adapter that the head in ``folder`` needs its target to have; None = the target as it is.

    Raises:
        CheckpointError: the config speaks of one that is not there or torn.
    """
    recorded = read_head_config(folder).get("adapter")
    if recorded is None:
        return None
    try:
        return AdapterWeights(load_file(folder / ADAPTER_NAME), float(recorded["scale"]))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"head: {ADAPTER_NAME} is missing or torn, got {folder} ({error}); use another checkpoint"
        ) from error


def load_head(
    source: str | Path,
    *,
    revision: str | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    mapped: bool = False,
) -> DraftHead:
    """The head in a folder or Hub repository, in eval mode; dtype None keeps the saved one.

    mapped: the weights stay in their file, of which pages are read as they are needed, rather than being copied.

    Raises:
        CheckpointError: a file is missing, torn, or holds other tensors than the head's own, no more and no less.
    """
    folder = resolve_head(source, revision)
    config = read_head_config(folder)
    try:
        settings = {key: value for key, value in config["head"].items() if key != "kind"}
        target: dict[str, Any] = {**config["target"], "eos_token_ids": tuple(config["target"]["eos_token_ids"])}
        spec = TargetSpec(**target)
        kind = head_kinds().get(config["kind"], HeadConfig)
        head = head_config(config["kind"], kind.from_saved(settings, spec)).build(spec)
    except (ConfigError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"head: {CONFIG_NAME} does not describe a head, got {folder} ({error}); save it again"
        ) from error
    try:
        tensors = load_file(folder / WEIGHTS_NAME)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"head: {WEIGHTS_NAME} is missing or torn, got {folder} ({error}); use another checkpoint"
        ) from error
    load_tensors(head, tensors, folder, assign=mapped)
    return head.to(device=device, dtype=dtype).eval()


def load_tensors(
    head: DraftHead, tensors: dict[str, torch.Tensor], source: str | Path, *, assign: bool = False
) -> None:
    """Copies ``tensors`` into ``head``, strictly, in the dtype they were saved in; ``assign``: makes them the head's own.

    Raises:
        CheckpointError: names or shapes differ, or the draft-vocabulary map contradicts itself.
    """
    expected = head.state_dict()
    wrong = sorted(set(expected) ^ set(tensors)) or sorted(k for k in expected if expected[k].shape != tensors[k].shape)
    if wrong:
        what = (
            "missing" if wrong[0] not in tensors else "unexpected" if wrong[0] not in expected else "of another shape"
        )
        raise CheckpointError(f"head: tensor {wrong[0]} is {what}, got {source}; the file belongs to another head")
    floating = next((t.dtype for t in tensors.values() if t.is_floating_point()), None)
    if floating is not None:
        head.to(dtype=floating)
    head.load_state_dict(tensors, strict=True, assign=assign)
    if head.vocab is not None:
        head.vocab.check()


def check_source_kind(source: str | Path, kind: str) -> None:
    """Raises CheckpointError or ConfigError unless ``source`` is a head of ``kind`` to start training from."""
    given = read_head_config(resolve_head(source))["kind"]
    if "adapter" in read_head_config(resolve_head(source)):
        raise ConfigError(
            f"trainer.warm_start: the head was trained with a target of its own, got {source} with an adapter; use null"
        )
    if given != kind:
        raise ConfigError(
            f"trainer.warm_start: the head to start from is of another kind, got {given} for {kind}; use head={given}"
        )


def start_from(head: DraftHead, source: DraftHead) -> str:
    """Copies the weights of ``source``, of the same kind, into ``head``, whose draft vocabulary may be another.

    Rows of tokens that both can draft are copied; those of new tokens stay what ``init_from_target`` made them.

    Returns:
        A line for the log.

    Raises:
        ConfigError: settings that give the weights other names or shapes.
    """
    mine, given = dict(head.named_parameters()), dict(source.named_parameters())
    by_token = set(head.vocabulary_parameters())
    wrong = sorted(set(mine) ^ set(given)) or sorted(
        name for name in mine if mine[name].shape[name in by_token :] != given[name].shape[name in by_token :]
    )
    if wrong:
        raise ConfigError(
            f"trainer.warm_start: the heads differ in {wrong[0]}, got settings of another shape; use those of the head to "
            "start from, but for the draft vocabulary"
        )
    every = torch.arange(head.spec.vocab_size)
    ids = every if head.vocab is None else head.vocab.draft_token_ids().cpu()
    places = ids if source.vocab is None else source.vocab.to_draft(ids.to(source.vocab.t2d.device)).cpu()
    known = places >= 0
    with torch.no_grad():
        for name, parameter in mine.items():
            value = given[name].to(parameter)
            if name in by_token:
                rows = known.nonzero().flatten().to(parameter.device)
                parameter.index_copy_(0, rows, value.index_select(0, places[known].to(value.device)))
            else:
                parameter.copy_(value)
        for name, buffer in head.named_buffers():
            if name in head.state_dict() and not name.startswith("vocab."):
                buffer.copy_(source.get_buffer(name))
    kept = f"; {int(known.sum()):,} of {ids.numel():,} draft tokens were known to it" if by_token else ""
    return f"weights: start from the given {source.config.kind} head{kept}"


def check_head_matches(head: DraftHead, spec: TargetSpec) -> None:
    """Raises CheckpointError when ``head`` was trained for another target than ``spec`` describes."""
    mine = head.spec
    for name in ("hidden_size", "vocab_size", "num_hidden_layers"):
        if getattr(mine, name) != getattr(spec, name):
            raise CheckpointError(
                f"head: was trained for a target with {name} {getattr(mine, name)}, got {getattr(spec, name)} "
                f"({spec.name}); load it with {mine.name}"
            )
    if mine.fingerprint != spec.fingerprint:
        raise CheckpointError(
            f"head: was trained for {mine.name} (fingerprint {mine.fingerprint}), got {spec.name} ({spec.fingerprint}); "
            "the weights differ, so load it with its own target or train it again"
        )
