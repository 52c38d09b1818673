"""Settings of the measurement of acceptance and speed. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdraft.core.errors import ConfigError
from specdraft.targets._config import DTYPES

TURNS = ("first", "all")
MAX_TUNED_NODES = 128


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
    batch_size: int = 1
    """Prompts decoded together, both ways; 1 = one by one."""
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
        if self.batch_size < 1:
            raise ConfigError(f"eval.batch_size: must be at least 1, got {self.batch_size}; use 1")
        if self.bootstrap_samples < 100:
            raise ConfigError(
                f"eval.bootstrap_samples: too few for an interval, got {self.bootstrap_samples}; use at least 100"
            )
        if self.dtype not in (None, *DTYPES):
            raise ConfigError(f"eval.dtype: unknown dtype, got {self.dtype!r}; use null or one of {', '.join(DTYPES)}")
        if self.turns not in TURNS:
            raise ConfigError(f"eval.turns: unknown, got {self.turns!r}; use {' or '.join(TURNS)}")


@dataclass(slots=True, kw_only=True)
class TuneConfig:
    """How the shape of the drafts is chosen for a machine."""

    prompts: list[str] = field(default_factory=lambda: ["builtin"])
    """Sets by name or files, as for ``eval.prompts``."""
    limit: int | None = 8
    """Prompts taken from each set, spread over its categories; null = all of them."""
    max_new_tokens: int = 96
    """Tokens of each answer."""
    batch_size: int = 1
    """Rows decoded together that the shape is for; decode.json holds one shape for each size that was tuned for."""
    max_nodes: int = 24
    """Nodes of the largest tree that is considered."""
    dynamic: bool = True
    """Also consider trees that are grown at every step (``decode.dynamic_total_tokens``), where the head can."""
    num_ranks: int = 8
    """A node of a tree has at most this many continuations."""
    rounds: int = 7
    """Measurements of each cost, of which the median is taken."""
    contenders: int = 2
    """The shapes of best prediction that are measured against plain decoding, besides the best chain."""
    seed: int = 0
    """Of the choice by ``limit`` and the order of measurements."""
    dtype: str | None = None
    """float32, bfloat16 or float16: what the target is tuned in; null = target.dtype."""
    head_dtype: str | None = None
    """Dtype of the head, as ``decode.head_dtype``; null = the target's."""

    def __post_init__(self) -> None:
        if not self.prompts or not all(self.prompts):
            raise ConfigError(f"tune.prompts: must name at least one set, got {self.prompts}; use e.g. [builtin]")
        at_least = {"limit": 1, "max_new_tokens": 8, "batch_size": 1, "rounds": 1, "contenders": 1}
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"tune.{name}: must be at least {least}, got {value}; use more")
        for name, most in {"max_nodes": MAX_TUNED_NODES, "num_ranks": 64}.items():
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"tune.{name}: must lie in 1..{most}, got {getattr(self, name)}; use e.g. 8")
        for name in ("dtype", "head_dtype"):
            value = getattr(self, name)
            if value not in (None, *DTYPES):
                raise ConfigError(f"tune.{name}: unknown dtype, got {value!r}; use null or one of {', '.join(DTYPES)}")
