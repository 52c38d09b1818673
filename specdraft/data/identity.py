"""What a prepared data set is known by, so that other settings never mix with it, and whether one lies there already."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdraft.data._config import DataConfig
from specdraft.data.answering import answers_identity
from specdraft.data.chat import ChatRenderer, tokenizer_hash
from specdraft.data.collect import open_sources, selection_identity
from specdraft.data.prepared import FORMAT, MANIFEST_NAME, PreparedData, load_prepared
from specdraft.data.sources import RowSource


def data_identity(
    config: DataConfig, renderer: ChatRenderer, sources: Sequence[RowSource], writer: Mapping[str, Any]
) -> dict[str, Any]:
    """All that decides the rows. Data sets with equal identities are the same data set."""
    tokenizer, template = tokenizer_hash(renderer.tokenizer), renderer.template_hash
    answers: dict[str, Any] = {"by": "dataset"}
    if config.regenerate:
        answers = answers_identity(config, writer) | {"tokenizer": tokenizer, "template": template}
    mask = {name: getattr(config, name) for name in ("loss_on", "max_length", "system", "enable_thinking")}
    return {
        "format": FORMAT,
        "selection": selection_identity(config, sources),
        "tokenizer": tokenizer,
        "template": template,
        "answers": answers,
        "mask_options": digest(mask),
        **mask,
    }


def digest(value: Any) -> str:
    """16 hexadecimal digits of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def find_prepared(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, folder: Path, fingerprint: Callable[[], str], dtype: str
) -> PreparedData | None:
    """What ``prepare`` would find in ``folder`` and return as it is; None = it would prepare, or go on with it.

    ``fingerprint``, ``dtype``: of the target, which need not be loaded; its files are asked for the first only where data
    lie that some target answered.

    Raises:
        DataError: a source cannot be read, or the files are not what was saved.
    """
    if not any(folder.glob(f"*/{MANIFEST_NAME}")):
        return None  # the sources' checksums need not be taken
    renderer = ChatRenderer(tokenizer, system=config.system, enable_thinking=config.enable_thinking)
    sources, writer = open_sources(config), {}
    if config.regenerate and config.answers.by == "target":
        if not _answered_by_some_target(folder, data_identity(config, renderer, sources, {})):
            return None
        writer = {"target": fingerprint(), "dtype": dtype}
    identity = data_identity(config, renderer, sources, writer)
    place = folder / digest(identity)
    return load_prepared(place, renderer, identity) if (place / MANIFEST_NAME).exists() else None


def _answered_by_some_target(folder: Path, identity: dict[str, Any]) -> bool:
    """Whether data of ``identity``, which names no target, lie in ``folder``."""
    for path in folder.glob(f"*/{MANIFEST_NAME}"):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))["identity"]
            own = {key: value for key, value in found["answers"].items() if key not in ("target", "dtype")}
        except (OSError, ValueError, LookupError, AttributeError):
            continue  # of an older version, or damaged: whoever reads that data set says so
        if {**found, "answers": own} == identity:
            return True
    return False
