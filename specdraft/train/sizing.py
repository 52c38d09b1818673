"""Heads of a given size: the setting that makes a kind larger or smaller, chosen by the parameters it leads to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from specdraft.core.errors import ConfigError
from specdraft.core.types import TargetSpec
from specdraft.heads._config import HeadConfig

TOLERANCE = 0.1
"""Share by which a size may miss what was asked for."""
LARGEST = 1 << 20


def num_parameters(config: HeadConfig, spec: TargetSpec) -> int:
    """Parameters of the head, which is built without storage."""
    with torch.device("meta"):
        return config.build(spec).num_parameters


def fit_size(config: HeadConfig, spec: TargetSpec, wanted: int) -> HeadConfig:
    """``config`` with its ``size_setting`` such that the head has as nearly ``wanted`` parameters as it can.

    Raises:
        ConfigError: the kind has no such setting, or the nearest size misses by more than TOLERANCE.
    """
    setting = config.size_setting
    if setting is None:
        raise ConfigError(f"head.kind: has no setting of its size, got {config.kind}; set its size by hand")

    def sized(value: int) -> HeadConfig:
        changed: dict[str, Any] = {setting: value}
        return replace(config, **changed)

    def count(value: int) -> int:
        return num_parameters(sized(value), spec)

    above = _first_at_least(wanted, count)
    nearest = min({max(1, above - 1), above}, key=lambda value: abs(count(value) - wanted))
    found = count(nearest)
    if abs(found - wanted) > TOLERANCE * wanted:
        raise ConfigError(
            f"compare.value: {config.kind} comes no nearer than {found:,} parameters (head.{setting}={nearest}), "
            f"got {wanted:,}; use another size, or change its other settings"
        )
    return sized(nearest)


def _first_at_least(wanted: int, count: Callable[[int], int]) -> int:
    """The smallest value, at most LARGEST, with ``count(value) >= wanted``; ``count`` does not fall."""
    high = 1
    while high < LARGEST and count(high) < wanted:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if count(middle) >= wanted else (middle, high)
    return high
