"""Settings of what drafts besides the trained heads, one class a kind. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from specdraft.core.errors import ConfigError
from specdraft.decode._config import check_paths
from specdraft.targets._config import DTYPES

MAX_DRAFT_TOKENS = 64


@dataclass(slots=True, kw_only=True)
class ProposerConfig:
    """What drafts: the trained head of ``head=``, or one of the kinds below."""

    kind: str = "head"
    """head, draft_model, prompt_lookup, suffix or none; set by the option of ``proposer``."""


@dataclass(slots=True, kw_only=True)
class NoProposerConfig(ProposerConfig):
    """Nothing drafts: plain decoding."""

    kind: str = "none"
    """none."""


@dataclass(slots=True, kw_only=True)
class PromptLookupConfig(ProposerConfig):
    """Drafts what followed the last n-gram of the text where it stood before."""

    kind: str = "prompt_lookup"
    """prompt_lookup."""
    num_draft_tokens: int = 10
    """Tokens of a continuation."""
    max_ngram: int = 3
    """Length of the longest n-gram that is looked up, and the first to be."""
    min_ngram: int = 1
    """Length of the shortest one."""
    max_matches: int = 1
    """Continuations drafted at a time, as a tree, where several with distinct first tokens are found."""

    def __post_init__(self) -> None:
        _check_range("num_draft_tokens", self.num_draft_tokens, 1, MAX_DRAFT_TOKENS)
        _check_range("max_ngram", self.max_ngram, 1, 64)
        _check_range("min_ngram", self.min_ngram, 1, 64)
        _check_range("max_matches", self.max_matches, 1, 8)
        if self.min_ngram > self.max_ngram:
            raise ConfigError(
                f"proposer.min_ngram: must not exceed proposer.max_ngram ({self.max_ngram}), got {self.min_ngram}; "
                "lower it"
            )


@dataclass(slots=True, kw_only=True)
class SuffixConfig(ProposerConfig):
    """Drafts the frequent continuations of the longest end of the text that occurred before."""

    kind: str = "suffix"
    """suffix."""
    num_draft_tokens: int = 15
    """Depth of a draft at most; how much of it is used depends on the estimated probabilities."""
    num_nodes: int = 15
    """Nodes of a draft at most: a tree where several continuations are likely."""
    min_probability: float = 0.1
    """A node is drafted where the product of the estimated probabilities down to it is at least this."""
    max_match: int = 32
    """Tokens of the text's end that are compared at most."""
    max_earlier_tokens: int = 0
    """Newest tokens of earlier outputs of this process that are searched too, shared by its rows; 0 = this row only.
    What a row drafts depends on the rows before it then: leave it at 0 where acceptance is measured."""

    def __post_init__(self) -> None:
        _check_range("num_draft_tokens", self.num_draft_tokens, 1, MAX_DRAFT_TOKENS)
        _check_range("num_nodes", self.num_nodes, 1, 256)
        _check_range("max_match", self.max_match, 1, 256)
        _check_range("max_earlier_tokens", self.max_earlier_tokens, 0, 10_000_000)
        if self.max_earlier_tokens == 1:
            raise ConfigError(
                "proposer.max_earlier_tokens: nothing follows a single token, got 1; use 0 or more than 1"
            )
        if not 0.0 < self.min_probability <= 1.0:
            raise ConfigError(f"proposer.min_probability: must lie in (0, 1], got {self.min_probability}; use e.g. 0.1")


@dataclass(slots=True, kw_only=True)
class DraftModelConfig(ProposerConfig):
    """Drafts with a smaller causal LM of the same vocabulary, or with the first layers of the target itself."""

    kind: str = "draft_model"
    """draft_model."""
    name: str | None = None
    """Hub id, folder or smollm2; null = the first layers of the target itself, which shares its weights."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id; null = the default branch."""
    layers: int | None = None
    """Layers kept, from the first; the final norm and the lm_head follow them. null = all of a named model, three
    quarters of the target's own."""
    dtype: str | None = None
    """float32, bfloat16 or float16; null = the target's."""
    num_draft_tokens: int | None = None
    """Depth of a chain; null = 4, or the depth of ``tree``."""
    tree: list[list[int]] | None = None
    """Draft tree as paths of ranks, as in ``decode.tree``, drafted level by level; null = a chain."""
    min_probability: float = 0.0
    """A chain ends behind a token that the draft model gives less than this; 0 = never. Above 0, every drafted token is
    waited for, which costs nothing on a CPU."""
    adaptive: bool = True
    """Drafts are as deep as pays, by what was accepted lately and by the weights of the two models, and at most as deep as
    set above; where nothing pays, none are made but for a trial now and then. False = always as deep as set."""

    def __post_init__(self) -> None:
        if self.name is not None and not self.name:
            raise ConfigError("proposer.name: must not be empty, got ''; give a Hub id, a folder, smollm2 or null")
        if self.revision is not None and self.name is None:
            raise ConfigError(
                f"proposer.revision: has no effect without proposer.name, got {self.revision!r}; remove it"
            )
        if self.dtype is not None and self.name is None:
            raise ConfigError(f"proposer.dtype: has no effect without proposer.name, got {self.dtype!r}; remove it")
        if self.dtype not in (None, *DTYPES):
            raise ConfigError(f"proposer.dtype: unknown, got {self.dtype!r}; use null or one of {', '.join(DTYPES)}")
        if self.layers is not None and self.layers < 1:
            raise ConfigError(f"proposer.layers: must be at least 1 or null, got {self.layers}; use null")
        if self.num_draft_tokens is not None:
            _check_range("num_draft_tokens", self.num_draft_tokens, 1, MAX_DRAFT_TOKENS)
        if not 0.0 <= self.min_probability < 1.0:
            raise ConfigError(f"proposer.min_probability: must lie in [0, 1), got {self.min_probability}; use e.g. 0.3")
        if self.tree is None:
            return
        if self.num_draft_tokens is not None or self.min_probability > 0:
            raise ConfigError(
                "proposer.tree: contradicts proposer.num_draft_tokens and proposer.min_probability, got them together; "
                "choose one"
            )
        check_paths("proposer.tree", self.tree)


PROPOSERS: dict[str, type[ProposerConfig]] = {
    "head": ProposerConfig,
    "draft_model": DraftModelConfig,
    "prompt_lookup": PromptLookupConfig,
    "suffix": SuffixConfig,
    "none": NoProposerConfig,
}
"""Kind -> its settings."""


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"proposer.{name}: must lie in {low}..{high}, got {value}; choose within")
