"""The settings every kind of draft head has. No torch here: the command line checks settings before it imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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

    def __post_init__(self) -> None:
        if not 1 <= self.num_draft_tokens <= 32:
            raise ConfigError(
                f"head.num_draft_tokens: must lie in 1..32, got {self.num_draft_tokens}; choose a depth such as 4"
            )
        if self.draft_vocab_size is not None and self.draft_vocab_size < 2:
            raise ConfigError(
                f"head.draft_vocab_size: must be at least 2 or null, got {self.draft_vocab_size}; use null or e.g. 8192"
            )

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
