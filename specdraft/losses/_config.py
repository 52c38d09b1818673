"""Settings of the training loss. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdraft.core.errors import ConfigError

DISTRIBUTION_TERMS = (
    "soft_ce",
    "forward_kl",
    "reverse_kl",
    "jensen_shannon",
    "total_variation",
    "log_acceptance",
    "adaptive",
    "top_k",
)
TERMS = ("hard_ce", *DISTRIBUTION_TERMS, "smooth_l1", "confidence")
NORMALIZATIONS = ("token", "sequence", "legacy_bt")


@dataclass(slots=True, kw_only=True)
class LossConfig:
    """A weighted sum of loss terms over the draft depths."""

    terms: dict[str, float] = field(default_factory=lambda: {"soft_ce": 1.0})
    """Weight of each term: hard_ce (labels), smooth_l1 (the target's features), and terms of the target's distribution:
    soft_ce, forward_kl, reverse_kl, jensen_shannon, total_variation, log_acceptance, adaptive (from forward_kl to
    total_variation as draft and target come to agree), top_k (soft_ce over the target's likeliest tokens). confidence
    trains a head's own estimate of what sampling will accept.

    With a draft vocabulary the target's distribution p has mass outside it. soft_ce, forward_kl, reverse_kl,
    jensen_shannon and top_k compare with p renormalised over the draft vocabulary: outside it the draft cannot follow.
    total_variation, log_acceptance, adaptive's share and its total variation, and confidence measure acceptance,
    sum min(p, q), and count the mass outside as rejected (a product with the full lm_head)."""
    step_decay: float = 0.8
    """Depth k (from 0) is weighted by step_decay ** k; Medusa's and EAGLE-3's papers use 0.8."""
    step_weights: list[float] | None = None
    """Weight of every depth, in the place of step_decay; null = step_decay."""
    teacher_temperature: float = 1.0
    """Divides the target's logits before its distribution is taken: below 1 sharper, above 1 flatter."""
    top_k: int = 10
    """Tokens that the term top_k keeps; HASS uses 10."""
    adaptive_rate: float = 3.0
    """The term adaptive gives forward_kl a share of exp(-adaptive_rate * acceptance)."""
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
        if not set(self.terms) - {"smooth_l1", "confidence"}:
            raise ConfigError(
                f"loss.terms: none of them trains what is drafted, got {self.terms}; add soft_ce, e.g. 0.1"
            )
        self._check_numbers()
        if self.step_decay <= 0:
            raise ConfigError(f"loss.step_decay: must be positive, got {self.step_decay}; use e.g. 0.8")
        if self.normalize not in NORMALIZATIONS:
            raise ConfigError(f"loss.normalize: unknown, got {self.normalize!r}; use {', '.join(NORMALIZATIONS)}")
        if self.outside_vocab not in ("label", "argmax", "keep"):
            raise ConfigError(f"loss.outside_vocab: unknown, got {self.outside_vocab!r}; use label, argmax or keep")
        if self.chunk_size < 1:
            raise ConfigError(f"loss.chunk_size: must be at least 1, got {self.chunk_size}; use e.g. 1024")

    def _check_numbers(self) -> None:
        """Rules of single terms; a number other than its default needs the term that reads it."""
        if self.step_weights is not None and (not self.step_weights or min(self.step_weights) <= 0):
            raise ConfigError(
                f"loss.step_weights: must be positive, got {self.step_weights}; use e.g. [1.0, 0.8, 0.64]"
            )
        for name, term, default in (("top_k", "top_k", 10), ("adaptive_rate", "adaptive", 3.0)):
            value = getattr(self, name)
            if value <= 0:
                raise ConfigError(f"loss.{name}: must be positive, got {value}; use {default}")
            if value != default and term not in self.terms:
                raise ConfigError(f"loss.{name}: has no effect without loss.terms.{term}, got {value}; use {default}")
        if self.teacher_temperature <= 0:
            raise ConfigError(f"loss.teacher_temperature: must be positive, got {self.teacher_temperature}; use 1.0")
        if self.teacher_temperature != 1.0 and not self.needs_teacher:
            raise ConfigError(
                f"loss.teacher_temperature: has no effect without a term of the target's distribution, "
                f"got {self.teacher_temperature}; use 1.0"
            )

    @property
    def distribution_terms(self) -> dict[str, float]:
        """The terms that compare with the target's distribution."""
        return {name: weight for name, weight in self.terms.items() if name in DISTRIBUTION_TERMS}

    @property
    def needs_teacher(self) -> bool:
        """Whether a term looks at the target's distribution."""
        return bool(self.distribution_terms) or "confidence" in self.terms

    @property
    def measures_acceptance(self) -> bool:
        """Whether a term looks at the target's probabilities as they are, the mass outside a draft vocabulary included."""
        return not {"total_variation", "log_acceptance", "adaptive", "confidence"}.isdisjoint(self.terms)

    def step_weight(self, depth: int) -> float:
        """Weight of a depth, from 0."""
        return self.step_decay**depth if self.step_weights is None else self.step_weights[depth]
