"""Settings of sampling, penalties and acceptance. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from specdraft.core.errors import ConfigError

VERIFIERS = ("auto", "greedy", "point_mass", "speculative_sampling", "block", "typical")
MAX_STOPS = 64
TYPICAL_EPSILON = 0.09
TYPICAL_DELTA = 0.3


@dataclass(slots=True, kw_only=True)
class SamplingConfig:
    """What the next token is drawn from, and which drafted tokens are accepted. The default is greedy decoding.

    The order is that of transformers: logit_bias, repetition_penalty, presence and frequency penalty, bad_words,
    min_new_tokens, then temperature, top_k, top_p, min_p.
    """

    temperature: float = 0.0
    """0 = the most likely token; else tokens are drawn from softmax(logits / temperature)."""
    top_k: int | None = None
    """Only the k most likely tokens; null = all."""
    top_p: float | None = None
    """Only the most likely tokens that together reach this probability; null = all."""
    min_p: float | None = None
    """Only tokens at least this share of the most likely one's probability; null = all."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or answer are divided by it where positive, multiplied where negative; 1 = off."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens in the answer so far, -2 to 2; 0 = off."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time it is in the answer so far, -2 to 2; 0 = off."""
    logit_bias: list[list[Any]] = field(default_factory=list)
    """Pairs of token id and what is added to its logit, e.g. [[11, -2.5]]."""
    bad_words: list[str] = field(default_factory=list)
    """Texts that are never written, in any of their tokenisations at the start of a word and inside one."""
    bad_words_ids: list[list[int]] = field(default_factory=list)
    """The same as sequences of token ids."""
    min_new_tokens: int = 0
    """Tokens before an end-of-text token is possible."""
    stop: list[str] = field(default_factory=list)
    """Texts that end the answer; the token that completes one is the last."""
    seed: int = 0
    """Of the draws of a row."""
    verifier: str = "auto"
    """Which drafts are accepted: auto, greedy, point_mass, speculative_sampling, block or typical (lossy)."""
    typical_epsilon: float = TYPICAL_EPSILON
    """Typical acceptance: a token above this probability is accepted."""
    typical_delta: float = TYPICAL_DELTA
    """Typical acceptance: so is one above this share of exp(-entropy)."""

    def __post_init__(self) -> None:
        self._check_distribution()
        self._check_penalties()
        self._check_words()
        self._check_verifier()
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"sampling.seed: must lie in 0..2^63-1, got {self.seed}; use e.g. 0")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0.0

    @property
    def is_plain_greedy(self) -> bool:
        """Whether that is the most likely by the target's own logits."""
        return self.is_greedy and not self.shapes_logits

    @property
    def shapes_logits(self) -> bool:
        """Whether anything but temperature, top_k, top_p and min_p changes the logits."""
        return bool(
            self.counts_tokens or self.logit_bias or self.bad_words or self.bad_words_ids or self.min_new_tokens
        )

    @property
    def counts_tokens(self) -> bool:
        """Whether a penalty needs to know which tokens were there before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def resolved_verifier(self) -> str:
        """The rule that ``auto`` stands for."""
        if self.verifier != "auto":
            return self.verifier
        return "greedy" if self.is_greedy else "speculative_sampling"

    @property
    def is_lossless(self) -> bool:
        """Whether drafts leave the distribution of the text as it is without them."""
        return self.resolved_verifier != "typical"

    @property
    def samples_drafts(self) -> bool:
        """Whether the rule wants drafts drawn from the proposer's distribution rather than its most likely tokens."""
        return self.resolved_verifier in ("speculative_sampling", "block")

    def _check_distribution(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise ConfigError(f"sampling.temperature: must lie in 0..100, got {self.temperature}; use e.g. 1.0")
        if 0.0 < self.temperature < 1e-3:
            raise ConfigError(f"sampling.temperature: too small to divide by, got {self.temperature}; use 0 for greedy")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"sampling.top_k: must be at least 1, got {self.top_k}; use null for all tokens")
        for name, value in (("top_p", self.top_p), ("min_p", self.min_p)):
            if value is not None and not 0.0 < value <= 1.0:
                raise ConfigError(
                    f"sampling.{name}: must lie above 0 and at most 1, got {value}; use null for all tokens"
                )
        if self.is_greedy:
            for name, value in (("top_k", self.top_k), ("top_p", self.top_p), ("min_p", self.min_p)):
                if value is not None:
                    raise ConfigError(
                        f"sampling.{name}: has no effect at temperature 0, got {value}; set sampling.temperature or use null"
                    )

    def _check_penalties(self) -> None:
        if not 0.0 < self.repetition_penalty <= 100.0:
            raise ConfigError(
                f"sampling.repetition_penalty: must lie above 0 and at most 100, got {self.repetition_penalty}; "
                "use 1.0 for none"
            )
        for name, value in (
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
        ):
            if not -2.0 <= value <= 2.0:
                raise ConfigError(f"sampling.{name}: must lie in -2..2, got {value}; use 0 for none")

    def _check_words(self) -> None:
        for pair in self.logit_bias:
            is_pair = len(pair) == 2 and all(type(value) in (int, float) for value in pair)
            if not is_pair or pair[0] < 0 or pair[0] != int(pair[0]) or not math.isfinite(pair[1]):
                raise ConfigError(
                    f"sampling.logit_bias: needs pairs of token id and finite bias, got {pair}; write e.g. [[11, -2.5]]"
                )
        if len({pair[0] for pair in self.logit_bias}) != len(self.logit_bias):
            raise ConfigError(f"sampling.logit_bias: a token is given twice, got {self.logit_bias}; remove one")
        if not all(self.bad_words):
            raise ConfigError(f"sampling.bad_words: a text must not be empty, got {self.bad_words}; remove it")
        for ids in self.bad_words_ids:
            if not ids or min(ids) < 0:
                raise ConfigError(
                    f"sampling.bad_words_ids: a word is a non-empty list of token ids, got {ids}; correct it"
                )
        if self.min_new_tokens < 0:
            raise ConfigError(
                f"sampling.min_new_tokens: must not be negative, got {self.min_new_tokens}; use 0 for none"
            )
        if not all(self.stop):
            raise ConfigError(f"sampling.stop: a text must not be empty, got {self.stop}; remove it")
        if len(self.stop) > MAX_STOPS:
            raise ConfigError(f"sampling.stop: at most {MAX_STOPS} texts, got {len(self.stop)}; use fewer")

    def _check_verifier(self) -> None:
        if self.verifier not in VERIFIERS:
            raise ConfigError(f"sampling.verifier: unknown, got {self.verifier!r}; use one of {', '.join(VERIFIERS)}")
        if self.verifier == "greedy" and not self.is_greedy:
            raise ConfigError(
                f"sampling.verifier: greedy needs temperature 0, got temperature {self.temperature}; use auto"
            )
        if self.is_greedy and self.verifier not in ("auto", "greedy"):
            raise ConfigError(
                f"sampling.verifier: needs a temperature above 0, got {self.verifier} at temperature 0; "
                "set sampling.temperature or use auto"
            )
        if not 0.0 < self.typical_epsilon < 1.0:
            raise ConfigError(
                f"sampling.typical_epsilon: must lie between 0 and 1, got {self.typical_epsilon}; use {TYPICAL_EPSILON}"
            )
        if self.typical_delta <= 0.0:
            raise ConfigError(f"sampling.typical_delta: must be above 0, got {self.typical_delta}; use {TYPICAL_DELTA}")
        if self.verifier != "typical":
            for name, value, default in (
                ("typical_epsilon", self.typical_epsilon, TYPICAL_EPSILON),
                ("typical_delta", self.typical_delta, TYPICAL_DELTA),
            ):
                if value != default:
                    raise ConfigError(
                        f"sampling.{name}: has no effect with verifier {self.verifier}, got {value}; "
                        "set sampling.verifier=typical"
                    )
