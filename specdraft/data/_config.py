"""Settings of the training data. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdraft.core.errors import ConfigError

LOSS_ON = ("all", "last")


@dataclass(slots=True, kw_only=True)
class DataConfig:
    """Which conversations a head is trained on, who writes the answers, and how rows become batches."""

    sources: list[str] = field(default_factory=lambda: ["builtin"])
    """``builtin``, a .jsonl, .json or .parquet file, or a Hub id ``owner/name[:config][#split]``."""
    limit: int | None = None
    """Conversations kept, drawn from all sources by ``seed``; a larger limit keeps those of a smaller one."""
    max_length: int = 1024
    """Tokens of a row; longer ones are cut on the right, and dropped when nothing supervised is left."""
    regenerate: bool = True
    """The target writes every answer anew; false = the answers of the sources are used as they are."""
    max_new_tokens: int = 128
    """Tokens of a regenerated answer, end-of-turn token included."""
    temperature: float = 0.0
    """Of regenerated answers: 0 = greedy, else samples of the target's distribution at this temperature."""
    seed: int = 0
    """Of the draw by ``limit``, of sampled answers and of the order of rows."""
    generate_batch_size: int = 32
    """Answers that the target writes at the same time."""
    loss_on: str = "all"
    """Which answers of a conversation are supervised: all assistant turns, or the last one."""
    system: str | None = None
    """System message for conversations that bring none; null = what the chat template does without one."""
    enable_thinking: bool | None = None
    """Passed to chat templates that have such a switch; null = the template's own default."""
    batch_size: int = 8
    """Rows of a micro-batch in each process."""
    bucket: bool = True
    """Rows of similar length share a micro-batch (less padding); false = rows of any length together."""
    packing: bool = False
    """Conversations share a row of up to ``max_length`` tokens (still less padding), each on its own for attention,
    positions and loss; ``batch_size`` then counts such rows."""
    cache_dir: str | None = None
    """Folder of prepared data sets; null = <output_dir>/data."""

    def __post_init__(self) -> None:
        if not self.sources or not all(self.sources):
            raise ConfigError(f"data.sources: must name at least one source, got {self.sources}; use e.g. [builtin]")
        for source in self.sources:
            if source in ("builtin#heldout", "builtin#dev"):
                raise ConfigError(
                    f"data.sources: these prompts measure heads and must not train them, got {source}; use builtin"
                )
        for name in ("max_new_tokens", "generate_batch_size", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"data.{name}: must be at least 1, got {getattr(self, name)}; use a positive number")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(
                f"data.limit: must be at least 1 or null, got {self.limit}; use null for all conversations"
            )
        if self.max_length < 4:
            raise ConfigError(f"data.max_length: leaves no room to draft, got {self.max_length}; use e.g. 1024")
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"data.temperature: must be finite and not negative, got {self.temperature}; use 0 for greedy"
            )
        if self.loss_on not in LOSS_ON:
            raise ConfigError(f"data.loss_on: unknown, got {self.loss_on!r}; use {' or '.join(LOSS_ON)}")
