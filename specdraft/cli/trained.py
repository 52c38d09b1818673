"""A trained head and the target that it is for, as every command that decodes with one loads them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdraft.config.schema import FROM_HEAD
from specdraft.decode._config import DecodeConfig
from specdraft.targets._config import TargetConfig

if TYPE_CHECKING:
    from specdraft.heads.base import DraftHead
    from specdraft.targets.hf import HFTarget


@dataclass(frozen=True)
class Trained:
    """What was loaded. config: of the target without the head's adapter; adapted: an adapter is merged into it."""

    config: TargetConfig
    target: HFTarget
    head: DraftHead
    adapted: bool


def load_trained(folder: Path, target: TargetConfig, decode: DecodeConfig) -> Trained:
    """The frozen head of ``folder`` beside its target, with the head's adapter where it was trained with one.

    Raises:
        ConfigError, CheckpointError, UnsupportedTargetError: either cannot be loaded, or they do not fit each other.
    """
    from specdraft.decode.proposers import head_dtype
    from specdraft.heads.storage import check_head_matches, load_head, read_adapter, read_head_config
    from specdraft.targets.hf import load_target

    config = target_of_head(target, read_head_config(folder))
    adapter = read_adapter(folder)
    loaded = load_target(config, adapter)
    head = load_head(folder, device=loaded.device, dtype=head_dtype(decode, loaded)).requires_grad_(False)
    check_head_matches(head, loaded.spec)
    return Trained(config, loaded, head, adapter is not None)


def target_of_head(target: TargetConfig, head_config: dict[str, Any]) -> TargetConfig:
    """``target`` with ``from_head`` replaced by the model the head was trained for.

    ``head_config``: the head's config.json. A revision the user gives wins over the recorded one.
    """
    if target.name != FROM_HEAD:
        return target
    recorded = head_config["target"]
    return replace(target, name=recorded["name"], revision=target.revision or recorded["revision"])
