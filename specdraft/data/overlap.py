"""Conversations that share text with held-out prompts: found by runs of words, so that what measures is not trained on."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from specdraft.core.errors import DataError
from specdraft.data.formats import NotAConversationError, UnusableRowError, parse_row
from specdraft.data.sources import Conversation, RowSource, open_source

BUILTIN_HELD_OUT = ("builtin#dev", "builtin#heldout")
"""Choose the best head, and measure it; never trained on."""
QUESTION_COLUMNS = ("question", "problem", "query", "prompt", "text")
"""Where sets that measure models keep what is asked: a text, or a list of turns."""
HEAD_WORDS = 4
"""The first words of a run, which are looked up before the whole of it."""
# Scripts that are written without spaces: Thai to Tibetan, Myanmar, Khmer, kana, Han, Hangul. Each character is a word.
_UNSPACED = (
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
)
_MARKS = r"\s!-/:-@\[-`{-~\u00a1-\u00bf\u060c\u061b\u061f\u06d4\u0964\u0965\u2000-\u206f\u3000-\u303f\uff00-\uff0f"
_WORD = re.compile(rf"[{_UNSPACED}]|[^{_MARKS}{_UNSPACED}]+")

_ASCII_WORD = re.compile(r"[a-z0-9]+")
"""The same for text without other characters, faster."""


def split_words(text: str) -> list[str]:
    """The words of a text without case, punctuation and compatibility forms, in any script."""
    if text.isascii():
        return _ASCII_WORD.findall(text.lower())
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


class HeldOut:
    """The texts of held-out prompts, in runs of ``num_words`` words.

    A first turn that is shorter than a run counts as a whole: a conversation that begins with the same text, and no other,
    overlaps with it.
    """

    def __init__(self, num_words: int) -> None:
        self.num_words = num_words
        self._runs: set[tuple[str, ...]] = set()
        self._heads: set[tuple[str, ...]] = set()
        self._short: set[tuple[str, ...]] = set()

    def add(self, turns: Sequence[str]) -> None:
        """Enters what the user says in a held-out prompt."""
        for number, turn in enumerate(turns):
            words = split_words(turn)
            if len(words) < self.num_words:
                if number == 0 and words:
                    self._short.add(tuple(words))
                continue
            for start in range(len(words) - self.num_words + 1):
                self._runs.add(tuple(words[start : start + self.num_words]))
                self._heads.add(tuple(words[start : start + HEAD_WORDS]))

    def overlaps(self, texts: Sequence[str]) -> bool:
        """Whether one of the texts of a conversation shares a run, or the first is a short held-out prompt."""
        for number, text in enumerate(texts):
            words = split_words(text)
            if number == 0 and tuple(words) in self._short:
                return True
            following = zip(words, words[1:], words[2:], words[3:], strict=False)
            for start, head in enumerate(following):
                if head in self._heads and tuple(words[start : start + self.num_words]) in self._runs:
                    return True
        return False


def held_out_texts(conversation: Conversation, with_answers: bool) -> list[str]:
    """The texts of a conversation that may overlap: the user's turns, and its answers where these are trained on."""
    roles = ("user", "assistant") if with_answers else ("user",)
    return [message["content"] or "" for message in conversation.messages if message["role"] in roles]


def load_held_out(num_words: int, sources: Sequence[RowSource]) -> HeldOut:
    """The prompts of ``sources``, which are conversations, or rows with a question in one of ``QUESTION_COLUMNS``.

    Raises:
        DataError: a source cannot be read, or holds something else.
    """
    held_out = HeldOut(num_words)
    for source in sources:
        for place, row in source.rows():
            try:
                held_out.add(_asked(row))
            except NotAConversationError as error:
                raise DataError(
                    f"data.held_out: {place} is no prompt, got {error}; give the set as a file of rows with a prompt"
                ) from error
    return held_out


def open_held_out(names: Sequence[str]) -> list[RowSource]:
    """The built-in held-out sets and the sources ``names``; nothing is read yet.

    Raises:
        DataError: one of them does not exist.
    """
    try:
        return [open_source(name) for name in (*BUILTIN_HELD_OUT, *names)]
    except DataError as error:
        raise DataError(str(error).replace("data.sources:", "data.held_out:", 1)) from error


def _asked(row: Any) -> list[str]:
    """What the user says in a held-out row; nothing in a row that has no text of the user."""
    try:
        return [message["content"] or "" for message in parse_row(row) if message["role"] == "user"]
    except UnusableRowError:
        return []
    except NotAConversationError:
        for name in QUESTION_COLUMNS:
            value = row.get(name) if isinstance(row, Mapping) else None
            if isinstance(value, str):
                return [value]
            if isinstance(value, Sequence) and value and all(isinstance(turn, str) for turn in value):
                return list(value)
        raise
