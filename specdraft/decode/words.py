"""Texts in the settings: words that are never written, and texts that end an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdraft.core.errors import ConfigError
from specdraft.decode._sampling_config import SamplingConfig

TOKENS_PER_CHARACTER = 4
"""A character takes at most this many tokens: its bytes in UTF-8."""


def bad_word_ids(config: SamplingConfig, tokenizer: Any | None) -> list[list[int]]:
    """Token ids of ``bad_words``, as they stand alone and after a space, and of ``bad_words_ids``.

    Raises:
        ConfigError: there are texts but no tokenizer, or one that gives no tokens for a text.
    """
    found = [list(ids) for ids in config.bad_words_ids]
    if not config.bad_words:
        return found
    if tokenizer is None:
        raise ConfigError(
            f"sampling.bad_words: needs a tokenizer, got {config.bad_words} without one; use sampling.bad_words_ids"
        )
    for word in config.bad_words:
        variants = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (word, f" {word}")]
        if not variants[0]:
            raise ConfigError(f"sampling.bad_words: the tokenizer has no tokens for it, got {word!r}; remove it")
        found += [ids for ids in variants if ids not in found]
    return found


class StopFinder:
    """Looks for the settings' stop texts in the text of a row, which may span tokens and begin in any of them.

    Only the end of the text is decoded: as many tokens as the longest stop text can take.

    Raises:
        ConfigError: there are stop texts but no tokenizer.
    """

    def __init__(self, stops: Sequence[str], tokenizer: Any | None) -> None:
        if stops and tokenizer is None:
            raise ConfigError(f"sampling.stop: needs a tokenizer, got {list(stops)} without one; give the decoder one")
        self._stops = list(stops)
        self._tokenizer = tokenizer
        self._window = TOKENS_PER_CHARACTER * (max(map(len, stops), default=0) + 1)
        self._ids: list[int] = []

    def find(self, tokens: Sequence[int]) -> int | None:
        """Adds ``tokens`` to the text; the place of the first of them that completes a stop text, or None."""
        if not self._stops:
            return None
        before = len(self._ids)
        self._ids += tokens
        if not self._stopped(self._ids):
            self._ids = self._ids[-self._window :]
            return None
        return next(i for i in range(len(tokens)) if self._stopped(self._ids[: before + i + 1]))

    def _stopped(self, ids: list[int]) -> bool:
        assert self._tokenizer is not None
        text = str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        return any(stop in text for stop in self._stops)
