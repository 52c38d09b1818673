"""Settings of decoding. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from specdraft.core.errors import ConfigError

MAX_NODES = 512
DYNAMIC_TOP_K = 8
HEAD_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(slots=True, kw_only=True)
class DecodeConfig:
    """How many tokens are drafted a step, in which shape, and when generation stops."""

    num_draft_tokens: int | None = None
    """Depth K of a chain; null = the depth the head was trained for. Not together with ``tree``."""
    tree: list[list[int]] | None = None
    """Draft tree as paths of ranks, e.g. [[0], [1], [0, 0]]: with every path its beginning; null = a chain."""
    dynamic_total_tokens: int | None = None
    """Nodes of a tree that is grown anew at every step from the head's probabilities; null = a fixed shape."""
    dynamic_depth: int | None = None
    """Levels of a grown tree; null = the depth the head was trained for."""
    dynamic_top_k: int | None = None
    """Nodes continued at each level of a grown tree, and continuations of each; null = 8."""
    min_confidence: float | None = None
    """Of a chain by a head with a confidence head: the draft ends before the first token whose path, itself included, is
    accepted with a lower estimated chance than this; null = drafts of full length."""
    head_dtype: str | None = None
    """Dtype of the head: null = the target's. bfloat16 halves what a draft reads beside a float32 target; the text stays
    the target's own, since a head only proposes."""
    max_new_tokens: int = 128
    """Tokens generated at most, the end-of-text token included."""
    ignore_eos: bool = False
    """True: an end-of-text token does not stop generation (for measurements of equal length)."""
    show: bool = False
    """True: colour the tokens that were drafted and accepted."""

    def __post_init__(self) -> None:
        if self.num_draft_tokens is not None and not 1 <= self.num_draft_tokens <= 32:
            raise ConfigError(
                f"decode.num_draft_tokens: must lie in 1..32, got {self.num_draft_tokens}; choose e.g. 4 or null"
            )
        if self.max_new_tokens < 1:
            raise ConfigError(f"decode.max_new_tokens: must be at least 1, got {self.max_new_tokens}; use e.g. 128")
        if self.head_dtype not in (None, *HEAD_DTYPES):
            raise ConfigError(
                f"decode.head_dtype: unknown, got {self.head_dtype!r}; use null or {', '.join(HEAD_DTYPES)}"
            )
        self._check_dynamic()
        if self.min_confidence is not None and not 0.0 < self.min_confidence < 1.0:
            raise ConfigError(
                f"decode.min_confidence: must lie between 0 and 1 or be null, got {self.min_confidence}; use e.g. 0.3"
            )
        if self.min_confidence is not None and (self.tree is not None or self.dynamic_total_tokens is not None):
            raise ConfigError(
                f"decode.min_confidence: cuts chains alone, got {self.min_confidence}; set decode.tree and "
                "decode.dynamic_total_tokens to null"
            )
        if self.tree is None:
            return
        if self.num_draft_tokens is not None:
            raise ConfigError(
                f"decode.num_draft_tokens: contradicts decode.tree, got {self.num_draft_tokens}; set one to null"
            )
        check_paths("decode.tree", self.tree)

    @property
    def has_shape(self) -> bool:
        """Whether the draft's shape is given rather than left to the head."""
        given = (self.tree, self.num_draft_tokens, self.dynamic_total_tokens, self.min_confidence)
        return any(value is not None for value in given)

    @property
    def shapes_heads(self) -> bool:
        """Whether a setting is given that only a trained head heeds."""
        return self.has_shape or self.head_dtype is not None

    def _check_dynamic(self) -> None:
        limits = {"dynamic_total_tokens": MAX_NODES, "dynamic_depth": 32, "dynamic_top_k": 64}
        for name, limit in limits.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= limit:
                raise ConfigError(f"decode.{name}: must lie in 1..{limit} or be null, got {value}; choose e.g. 8")
            if value is not None and self.dynamic_total_tokens is None:
                raise ConfigError(
                    f"decode.{name}: has no effect without decode.dynamic_total_tokens, got {value}; set e.g. 16 there"
                )
        if self.dynamic_total_tokens is None:
            return
        for name in ("tree", "num_draft_tokens"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"decode.{name}: contradicts decode.dynamic_total_tokens, got {getattr(self, name)}; set one to null"
                )


def check_drawable(paths: list[list[int]]) -> None:
    """Raises ConfigError unless the siblings of a tree have the ranks 0, 1, 2, ...: what was drawn between is unknown."""
    known = {tuple(path) for path in paths}
    for path in paths:
        if path[-1] and (*path[:-1], path[-1] - 1) not in known:
            missing = [*path[:-1], path[-1] - 1]
            raise ConfigError(
                f"decode.tree: the ranks of siblings must be 0, 1, 2, ... where drafts are drawn, got {path} without "
                f"{missing}; add the missing paths or use sampling.verifier=point_mass"
            )


def check_paths(key: str, paths: list[list[int]]) -> None:
    """Raises ConfigError unless ``paths``, the value of ``key``, are those of a draft tree."""
    if not 1 <= len(paths) <= MAX_NODES:
        raise ConfigError(f"{key}: needs 1 to {MAX_NODES} paths, got {len(paths)}; use null for a chain")
    known = {tuple(path) for path in paths}
    if len(known) != len(paths):
        raise ConfigError(f"{key}: a path is given twice, got {paths}; remove one")
    for path in paths:
        if not path or min(path) < 0:
            raise ConfigError(f"{key}: a path is a non-empty list of ranks from 0, got {path}; correct it")
        if len(path) > 1 and tuple(path[:-1]) not in known:
            raise ConfigError(f"{key}: the path {path} lacks its beginning, got none; add {path[:-1]}")
