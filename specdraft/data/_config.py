"""Settings of the training data. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdraft.core.errors import ConfigError
from specdraft.data._answers_config import AnswersConfig, check_temperature

LOSS_ON = ("all", "last")


@dataclass(slots=True, kw_only=True)
class DataConfig:
    """Which conversations a head is trained on, who writes the answers, and how rows become batches."""

    sources: list[str] = field(default_factory=lambda: ["builtin"])
    """``builtin``, a .jsonl, .json or .parquet file, a folder or glob of such files, or a Hub id
    ``owner/name[:config][@revision][#split]``."""
    weights: list[float] | None = None
    """Share of each source among the conversations, of which then no more are kept than that allows without repeating
    one; null = all that the sources have."""
    streaming: bool = False
    """Hub data sets are read while they are downloaded, in a shuffled order, and with ``limit`` no further than needed."""
    limit: int | None = None
    """Conversations kept, drawn from all sources by ``seed``; a larger limit keeps those of a smaller one."""
    held_out: list[str] = field(default_factory=list)
    """Sources of prompts that measure heads, beside the built-in ones: conversations that share text with them are dropped."""
    overlap_words: int = 13
    """So many words in a row shared with a held-out prompt (or all of it, where it is shorter) drop a conversation; 0 = the
    overlap is not looked for."""
    near_duplicates: float | None = None
    """Conversations whose texts are alike to this degree (Jaccard similarity of their 5-word pieces, estimated by MinHash) are
    kept once; null = all are kept. Needs ``specdraft[dedup]``."""
    max_characters: int | None = None
    """Longer conversations are dropped before they are tokenised; null = no limit."""
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
    num_workers: int | None = None
    """Processes that render and tokenise large data sets; null = one for each core."""
    cache_dir: str | None = None
    """Folder of prepared data sets; null = <output_dir>/data."""
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    """Who writes regenerated answers, how many and how warm, and how answers are checked."""

    def __post_init__(self) -> None:
        self._check_sources()
        self._check_selection()
        for name in ("max_new_tokens", "generate_batch_size", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"data.{name}: must be at least 1, got {getattr(self, name)}; use a positive number")
        if self.max_length < 4:
            raise ConfigError(f"data.max_length: leaves no room to draft, got {self.max_length}; use e.g. 1024")
        check_temperature("data.temperature", self.temperature)
        self._check_answers()
        if self.loss_on not in LOSS_ON:
            raise ConfigError(f"data.loss_on: unknown, got {self.loss_on!r}; use {' or '.join(LOSS_ON)}")

    def _check_sources(self) -> None:
        """Raises ConfigError where the sources, their weights or the held-out ones cannot be meant."""
        if not self.sources or not all(self.sources):
            raise ConfigError(f"data.sources: must name at least one source, got {self.sources}; use e.g. [builtin]")
        for source in self.sources:
            if source in ("builtin#heldout", "builtin#dev"):
                raise ConfigError(
                    f"data.sources: these prompts measure heads and must not train them, got {source}; use builtin"
                )
        if self.weights is not None:
            if len(self.weights) != len(self.sources):
                raise ConfigError(
                    f"data.weights: one for each of the {len(self.sources)} sources is needed, got {self.weights}; "
                    "use null for all conversations of each"
                )
            if not all(0.0 < weight < float("inf") for weight in self.weights):
                raise ConfigError(f"data.weights: must be positive, got {self.weights}; leave out what is not wanted")
        if not all(self.held_out):
            raise ConfigError(f"data.held_out: must name sources, got {self.held_out}; use [] for none")
        if self.held_out and not self.overlap_words:
            raise ConfigError(
                f"data.held_out: has no effect with overlap_words=0, got {self.held_out}; use e.g. overlap_words=13"
            )

    def _check_selection(self) -> None:
        """Raises ConfigError where what decides over single conversations is out of range."""
        for name in ("limit", "max_characters", "num_workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"data.{name}: must be at least 1 or null, got {value}; use null for the default")
        if self.overlap_words and self.overlap_words < 5:
            raise ConfigError(
                f"data.overlap_words: every text shares a few words with others, got {self.overlap_words}; use 13, or 0 "
                "to look for none"
            )
        if self.near_duplicates is not None and not 0.0 < self.near_duplicates <= 1.0:
            raise ConfigError(
                f"data.near_duplicates: is a similarity from 0 to 1, got {self.near_duplicates}; use e.g. 0.8, or null"
            )

    def _check_answers(self) -> None:
        """Rules between the settings of the answers and those of the data."""
        answers = self.answers
        if not self.regenerate:
            nothing = AnswersConfig()
            for name in ("by", "head", "samples", "temperatures"):
                if getattr(answers, name) == getattr(nothing, name):
                    continue
                raise ConfigError(
                    f"data.answers.{name}: has no effect with data.regenerate=false, got {getattr(answers, name)}; "
                    "leave it out"
                )
        if answers.samples > 1 and not any(answers.temperatures or [self.temperature]):
            raise ConfigError(
                f"data.answers.samples: the greedy answer is always the same, got {answers.samples}; set "
                "data.temperature=1.0"
            )
        if answers.temperatures and self.temperature != 0.0:
            raise ConfigError(
                f"data.temperature: has no effect beside data.answers.temperatures, got {self.temperature}; use 0.0"
            )
