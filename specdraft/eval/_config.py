"""Settings of the measurement of acceptance and speed. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdraft.core.errors import ConfigError
from specdraft.targets._config import DTYPES

TURNS = ("first", "all")


@dataclass(slots=True, kw_only=True)
class EvalConfig:
    """On which held-out prompts a head is measured, and how often."""

    prompts: list[str] = field(default_factory=lambda: ["builtin"])
    """Sets by name (builtin, mt_bench, humaneval, gsm8k, alpaca, spec_bench) or files as for ``data.sources``."""
    limit: int | None = None
    """Prompts taken from each set, spread over its categories; null = all of them."""
    warmup_prompts: int = 1
    """Prompts decoded before the clock starts; they are measured again later."""
    repeats: int = 1
    """Times each prompt is decoded both ways; speed is taken over all of them."""
    bootstrap_samples: int = 1000
    """Resamplings of the prompts behind each 95 % interval."""
    turns: str = "first"
    """first = only the first user turn of a conversation; all = every turn, after the target's own earlier answers."""
    seed: int = 0
    """Of the resampling and of the choice by ``limit``."""
    dtype: str | None = None
    """float32, bfloat16 or float16: what the target is measured in; null = target.dtype. A head can be trained on a
    target in bfloat16 and measured in float32, where unchanged output is exact."""

    def __post_init__(self) -> None:
        if not self.prompts or not all(self.prompts):
            raise ConfigError(f"eval.prompts: must name at least one set, got {self.prompts}; use e.g. [builtin]")
        if len(set(self.prompts)) != len(self.prompts):
            raise ConfigError(f"eval.prompts: a set is named twice, got {self.prompts}; remove one")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"eval.limit: must be at least 1 or null, got {self.limit}; use null for all prompts")
        if self.warmup_prompts < 0:
            raise ConfigError(f"eval.warmup_prompts: must not be negative, got {self.warmup_prompts}; use 1")
        if self.repeats < 1:
            raise ConfigError(f"eval.repeats: must be at least 1, got {self.repeats}; use 1")
        if self.bootstrap_samples < 100:
            raise ConfigError(
                f"eval.bootstrap_samples: too few for an interval, got {self.bootstrap_samples}; use at least 100"
            )
        if self.dtype not in (None, *DTYPES):
            raise ConfigError(f"eval.dtype: unknown dtype, got {self.dtype!r}; use null or one of {', '.join(DTYPES)}")
        if self.turns not in TURNS:
            raise ConfigError(f"eval.turns: unknown, got {self.turns!r}; use {' or '.join(TURNS)}")
