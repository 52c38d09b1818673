"""What a resumed run may do otherwise than the run it continues, and what it may not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdraft.core.errors import ConfigError
from specdraft.data._answers_config import FREE as ANSWERS_FREE
from specdraft.train.checkpoint import newest_settings

FIXED = (
    "head",
    "adapter.rank",
    "adapter.alpha",
    "adapter.modules",
    "data",
    "target.name",
    "target.revision",
    "optim.optimizer",
    "trainer.ema_decay",
    "trainer.warm_start",
)
"""Settings, or groups of them, without which a checkpoint means something else."""
FREE = (
    "data.cache_dir",
    "features.dir",
    "features.budget_gib",
    "features.shard_mib",
    "data.generate_batch_size",
    "data.batch_size",
    "resume",
    "output_dir",
    *ANSWERS_FREE,
)
"""Settings that are free all the same, or compared elsewhere (rows per step are, whatever they are made of)."""


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted key -> old and new value of every setting that differs; a setting that one of them lacks counts as None."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found |= differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found[f"{prefix}{key}"] = (old, new)
    return found


def _listed(found: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{key} {new} (was {old})" for key, (old, new) in found.items())


def compare_with_checkpoint(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """A line that says what a run in ``folder`` now does otherwise than its newest checkpoint; None = nothing.

    Raises:
        ConfigError: a setting differs that the checkpoint depends on.
    """
    before = newest_settings(folder / "checkpoints")
    found = {
        key: values
        for key, values in differences(before, settings).items()
        if before and not any(key == free or key.startswith(f"{free}.") for free in FREE)
    }
    broken = {
        key: values for key, values in found.items() if any(key == own or key.startswith(f"{own}.") for own in FIXED)
    }
    if broken:
        raise ConfigError(
            f"resume: the checkpoint was made with other settings, got {_listed(broken)}; use the old ones, or another name="
        )
    return f"resume: other settings than at the checkpoint: {_listed(found)}" if found else None
