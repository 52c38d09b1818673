"""The settings every kind of draft head has. No torch here: the command line checks settings before it imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specdraft.core.errors import ConfigError

if TYPE_CHECKING:
    from specdraft.core.types import TargetSpec
    from specdraft.heads.base import DraftHead


@dataclass(slots=True, kw_only=True)
class HeadConfig:
    """Settings shared by every kind of head; a kind adds its own in a subclass beside its module.

    A subclass body must not need torch: methods may use it, field defaults and ``__post_init__`` may not.
    """

    kind: str = ""
    """Name of the kind in the registry; set by the kind's YAML."""
    num_draft_tokens: int = 4
    """Depth K: how many tokens ahead of the target's own next token the head is trained to draft."""
    draft_vocab_size: int | None = None
    """Number of tokens the head can draft (D), the most frequent of the training answers; null = all of them."""
    draft_vocab_coverage: float | None = None
    """In the place of draft_vocab_size: as many of the most frequent tokens as make up this share of the training answers,
    rounded up to a multiple of 64. A saved head has the size instead."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_draft_tokens <= 32:
            raise ConfigError(
                f"head.num_draft_tokens: must lie in 1..32, got {self.num_draft_tokens}; choose a depth such as 4"
            )
        if self.draft_vocab_size is not None and self.draft_vocab_size < 2:
            raise ConfigError(
                f"head.draft_vocab_size: must be at least 2 or null, got {self.draft_vocab_size}; use null or e.g. 8192"
            )
        if self.draft_vocab_coverage is not None and not 0.0 < self.draft_vocab_coverage <= 1.0:
            raise ConfigError(
                f"head.draft_vocab_coverage: must lie in (0, 1] or be null, got {self.draft_vocab_coverage}; use e.g. 0.99"
            )
        if self.draft_vocab_coverage is not None and self.draft_vocab_size is not None:
            raise ConfigError(
                f"head.draft_vocab_coverage: contradicts head.draft_vocab_size ({self.draft_vocab_size}), "
                f"got {self.draft_vocab_coverage}; set one to null"
            )

    @property
    def trained_depths(self) -> int:
        """Depths that training predicts, the first ones of those that are drafted; each has its weight in the loss."""
        return self.num_draft_tokens

    @property
    def trains_target(self) -> bool:
        """Whether the head may be trained together with an adapter on its target."""
        return False

    @property
    def size_setting(self) -> str | None:
        """The setting, a whole number from 1, that makes the head larger or smaller and changes nothing else."""
        return None

    @property
    def estimates_acceptance(self) -> bool:
        """Whether the head says of every depth of a chain how likely sampling accepts it."""
        return False

    def check_terms(self, terms: Iterable[str]) -> None:
        """Raises ConfigError where the terms of a loss cannot train this head."""
        if "confidence" in terms and not self.estimates_acceptance:
            raise ConfigError(
                f"loss.terms.confidence: this head estimates no acceptance, got head.kind {self.kind}; remove the term or "
                "use head=dflash head.confidence_head=true"
            )
        if self.estimates_acceptance and "confidence" not in terms:
            raise ConfigError(
                "head.confidence_head: is trained by loss.terms.confidence alone, got true without it; use loss=dspark"
            )

    def for_target(self, spec: TargetSpec) -> HeadConfig:
        """These settings with every choice written out that no shape of a weight shows.

        So that a saved head reads what it was trained on, whatever the defaults become.

        Raises:
            ConfigError: the settings do not fit the target.
        """
        return self

    @classmethod
    def from_saved(cls, settings: Mapping[str, Any], spec: TargetSpec) -> dict[str, Any]:
        """The settings of a head's file, with what older files left to the defaults of their time."""
        return dict(settings)

    def build(self, spec: TargetSpec) -> DraftHead:
        """The untrained head for a target; every kind overrides this.

        Raises:
            ConfigError: the settings do not fit the target.
        """
        raise ConfigError(f"head.kind: names no head, got {self.kind!r}; choose one with head=<kind>")


@dataclass(slots=True, kw_only=True)
class DraftLayerConfig(HeadConfig):
    """Settings of the kinds that draft with a decoder layer of their own."""

    intermediate_size: int | None = None
    """Width of the MLP; null = the target's."""
    num_key_value_heads: int | None = None
    """Heads of keys and values; null = the target's. As many as its query heads give every head values of its own."""

    def __post_init__(self) -> None:
        HeadConfig.__post_init__(self)
        for name in ("intermediate_size", "num_key_value_heads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"head.{name}: must be positive or null, got {value}; use null")

    @property
    def size_setting(self) -> str | None:
        """The width of the MLPs."""
        return "intermediate_size"

    def key_value_heads(self, spec: TargetSpec) -> int:
        """Heads of keys and values for a target.

        Raises:
            ConfigError: the target's query heads cannot share that many.
        """
        count = self.num_key_value_heads or spec.num_key_value_heads
        if spec.num_attention_heads % count:
            raise ConfigError(
                f"head.num_key_value_heads: must divide the target's {spec.num_attention_heads} query heads, "
                f"got {count}; use null or {spec.num_attention_heads}"
            )
        return count


LAYER_INITS = ("auto", "target", "random")


def check_layer_init(value: str) -> None:
    """Raises ConfigError unless ``value`` says what a draft layer starts from."""
    if value not in LAYER_INITS:
        raise ConfigError(f"head.layer_init: unknown, got {value!r}; use {', '.join(LAYER_INITS)}")


def check_shares(**shares: float) -> None:
    """Raises ConfigError for a share of the anchors that is not in (0, 1]; the names are those of the settings."""
    for name, value in shares.items():
        if not 0.0 < value <= 1.0:
            raise ConfigError(f"head.{name}: must lie in (0, 1], got {value}; use 1 for all anchors")


@dataclass(slots=True, kw_only=True)
class FusedLayersConfig(DraftLayerConfig):
    """Settings of the kinds that read hidden states of several layers of the target."""

    aux_layers: list[int] | None = None
    """Layers read, as indices into Hugging Face hidden_states (0 = embeddings); null = a choice of the kind."""

    def __post_init__(self) -> None:
        DraftLayerConfig.__post_init__(self)
        layers = self.aux_layers
        if layers is not None and (not layers or len(set(layers)) != len(layers) or min(layers) < 0):
            raise ConfigError(
                f"head.aux_layers: must be distinct indices from 0, got {layers}; use e.g. [3, 16, 28] or null"
            )

    def layers_of(self, spec: TargetSpec) -> tuple[int, ...]:
        """The layers read of a target; the defaults are made distinct on shallow ones.

        Raises:
            ConfigError: a layer that the target does not have.
        """
        count = spec.num_hidden_layers
        if self.aux_layers is None:
            return tuple(sorted({min(max(layer, 1), max(count - 1, 1)) for layer in self.default_layers(count)}))
        if max(self.aux_layers) > count:
            raise ConfigError(
                f"head.aux_layers: the target has hidden_states[0..{count}], got {self.aux_layers}; use smaller indices"
            )
        return tuple(self.aux_layers)

    def for_target(self, spec: TargetSpec) -> HeadConfig:
        """See HeadConfig: the layers."""
        return replace(self, aux_layers=list(self.layers_of(spec)))

    def default_layers(self, count: int) -> list[int]:
        """Of a target with ``count`` layers: the outputs of blocks {2, n/2, n-3} counted from 0 (EAGLE-3)."""
        return [3, count // 2 + 1, count - 2]
