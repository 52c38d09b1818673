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
