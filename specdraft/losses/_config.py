"""Settings of the training loss. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdraft.core.errors import ConfigError

TERMS = ("hard_ce", "soft_ce", "smooth_l1")
NORMALIZATIONS = ("token", "sequence", "legacy_bt")


@dataclass(slots=True, kw_only=True)
class LossConfig:
    """A weighted sum of loss terms over the draft depths."""

    terms: dict[str, float] = field(default_factory=lambda: {"soft_ce": 1.0})
    """Weight of each term: hard_ce (labels), soft_ce (the target's distribution), smooth_l1 (the target's features)."""
    step_decay: float = 0.8
    """Depth k (from 0) is weighted by step_decay ** k; Medusa's and EAGLE-3's papers use 0.8."""
    normalize: str = "token"
    """token: mean over supervised anchors of all ranks; sequence: mean over rows of their means; legacy_bt: over B*T."""
    outside_vocab: str = "label"
    """Which anchors leave the loss when a draft vocabulary lacks their token: label = the text's token, argmax = the
    target's own most likely token (a product with the full lm_head), keep = none. Metrics count them as misses."""
    chunk_size: int = 1024
    """Rows of logits (anchors times depths) that exist at one time."""

    def __post_init__(self) -> None:
        if not self.terms:
            raise ConfigError(f"loss.terms: at least one term is needed, got {{}}; use {', '.join(TERMS)}")
        for name, weight in self.terms.items():
            if name not in TERMS:
                raise ConfigError(f"loss.terms: no such term, got {name!r}; use {', '.join(TERMS)}")
            if weight <= 0:
                raise ConfigError(
                    f"loss.terms.{name}: the weight must be positive, got {weight}; remove the term instead"
                )
        if set(self.terms) == {"smooth_l1"}:
            raise ConfigError(
                f"loss.terms: features alone do not train or measure tokens, got {self.terms}; add soft_ce, e.g. 0.1"
            )
        if self.step_decay <= 0:
            raise ConfigError(f"loss.step_decay: must be positive, got {self.step_decay}; use e.g. 0.8")
        if self.normalize not in NORMALIZATIONS:
            raise ConfigError(f"loss.normalize: unknown, got {self.normalize!r}; use {', '.join(NORMALIZATIONS)}")
        if self.outside_vocab not in ("label", "argmax", "keep"):
            raise ConfigError(f"loss.outside_vocab: unknown, got {self.outside_vocab!r}; use label, argmax or keep")
        if self.chunk_size < 1:
            raise ConfigError(f"loss.chunk_size: must be at least 1, got {self.chunk_size}; use e.g. 1024")
