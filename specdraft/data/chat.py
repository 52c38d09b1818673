"""Conversations -> token ids and loss masks, through the target's own chat template."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from specdraft.core.errors import ConfigError, DataError
from specdraft.data.formats import Message

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_SENTINEL = "specdraftanswer"
_EXACTLY = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}


class TemplateRefusedError(DataError):
    """The chat template raised an error for one conversation, e.g. for a system message it does not know."""


@dataclass(frozen=True)
class TokenRow:
    """One training row of T tokens. loss_mask: T bools, True = supervised (a token the target writes)."""

    input_ids: list[int]
    loss_mask: list[bool]

    def truncate(self, max_length: int) -> TokenRow | None:
        """The first ``max_length`` tokens, ids and mask alike; None when none of them is supervised."""
        row = TokenRow(self.input_ids[:max_length], self.loss_mask[:max_length])
        return row if any(row.loss_mask) else None


@dataclass(frozen=True)
class Turn:
    """One answer and the prompt it followed.

    prompt_ids: what decoding starts from, generation prompt included. answer_ids: the answer up to and
    including the end-of-turn token. supervised: one bool for each answer token; False = written by the
    template, not by the target.
    """

    prompt_ids: list[int]
    answer_ids: list[int]
    supervised: list[bool]


def join_turns(turns: Sequence[Turn], loss_on: str = "all") -> list[TokenRow]:
    """Rows in which every supervised answer follows exactly the ids of its own prompt.

    Turns of one conversation share a row as long as each prompt continues the row so far. Where it does not
    (templates that strip thinking from earlier turns, text that is tokenised otherwise in context), the turn
    starts another row with its whole prompt. ``loss_on``: ``all`` turns or the ``last`` one.
    """
    rows: list[TokenRow] = []
    ids: list[int] = []
    mask: list[bool] = []
    for turn in turns if loss_on == "all" else turns[-1:]:
        if ids and turn.prompt_ids[: len(ids)] != ids:
            rows.append(TokenRow(ids, mask))
            ids, mask = [], []
        gap = turn.prompt_ids[len(ids) :]
        ids = [*ids, *gap, *turn.answer_ids]
        mask = [*mask, *[False] * len(gap), *turn.supervised]
    return [*rows, TokenRow(ids, mask)] if ids else rows


class ChatRenderer:
    """Renders conversations as the target sees them, in training, decoding and evaluation alike.

    Args:
        tokenizer: the target's, with a chat template.
        system: system message for conversations that bring none; None = what the template does without one.
        enable_thinking: passed to the template if it has such a switch; None = its own default.

    Raises:
        DataError: the tokenizer has no chat template.
        ConfigError: ``enable_thinking`` is given and the template has no such switch.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system: str | None = None,
        enable_thinking: bool | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.system = system
        try:
            self.template: str = tokenizer.get_chat_template()
        except ValueError as error:
            raise DataError(
                "target.name: the tokenizer has no chat template, got "
                f"{tokenizer.name_or_path or 'a tokenizer'}; use an instruction-tuned target or put its "
                "chat_template.jinja beside tokenizer.json"
            ) from error
        self._kwargs: dict[str, Any] = {}
        if enable_thinking is not None:
            if "enable_thinking" not in self.template:
                raise ConfigError(
                    "data.enable_thinking: the target's chat template has no such switch, got "
                    f"{enable_thinking}; use null"
                )
            self._kwargs["enable_thinking"] = enable_thinking
        self.has_generation_tags = _GENERATION_TAG.search(self.template) is not None
        self.mask_sources: Counter[str] = Counter()
        """How the answers rendered so far were told from the rest, counted in turns; see ``turns``."""

    @cached_property
    def template_hash(self) -> str:
        """Hash of the template and of what is passed to it: data and decoding must agree on it."""
        text = json.dumps([self.template, self._kwargs, self.system], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def end_of_turn(self) -> str | None:
        """What the template writes after an answer, up to whitespace; None if it alters the answer's text."""
        answer: list[Message] = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": _SENTINEL},
        ]
        _, found, after = self._render(answer, prompt=False).rpartition(_SENTINEL)
        return after.rstrip() if found else None

    @cached_property
    def end_of_turn_ids(self) -> list[int]:
        """Token ids of ``end_of_turn``; empty when the template writes none."""
        return self._encode_after(self.end_of_turn or "")

    @cached_property
    def marker_ids(self) -> list[int]:
        """Ids of the tokens of their own (role markers, end of turn, thinking, tools) that the template writes."""
        added = self.tokenizer.get_added_vocab()
        return sorted(number for token, number in added.items() if token in self.template)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids from which the target writes the next answer: the messages and the generation prompt.

        Raises:
            TemplateRefusedError: the template raised an error for these messages.
            DataError: the template begins with two BOS tokens.
        """
        return self._prompt(self.with_system(messages))[1]

    def prompt_text(self, messages: Sequence[Message]) -> str:
        """The rendered text that ``prompt_ids`` are the tokens of."""
        return self._prompt(self.with_system(messages))[0]

    def as_sent(self, messages: Sequence[Message]) -> list[dict[str, str]]:
        """The messages as a server with a chat template of its own takes them, system message included."""
        return typed_messages(self.with_system(messages))

    @property
    def template_arguments(self) -> dict[str, Any]:
        """What is passed to the template besides the messages."""
        return dict(self._kwargs)

    def continuation_ids(self, prompt_ids: Sequence[int], text: str) -> list[int] | None:
        """Ids of ``text`` written after a prompt; None where they do not decode to it again."""
        ids = self._encode_after(text)
        before = self.tokenizer.decode(list(prompt_ids), **_EXACTLY)
        after = self.tokenizer.decode([*prompt_ids, *ids], **_EXACTLY)
        return ids if after == f"{before}{text}" else None

    def turns(self, messages: Sequence[Message]) -> list[Turn]:
        """The written answers of a conversation, each after the prompt as it is rendered at that time.

        An answer reaches from the generation prompt to the end-of-turn token; whitespace after that is not
        part of it. ``mask_sources`` counts how each was found: ``generation tags`` (the template marks
        answers itself), ``prefix`` (the conversation with the answer continues the one without), or
        ``appended`` (it does not, because the template treats the last turn differently: the answer's text
        and the end of turn are put after the prompt).

        Raises:
            TemplateRefusedError: the template raised an error for this conversation.
        """
        messages = self.with_system(messages)
        turns = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if message["content"] is None:
                break
            turns.append(self._turn(messages[:index], message))
        return turns

    def rows(self, messages: Sequence[Message], loss_on: str = "all") -> list[TokenRow]:
        """Training rows of a conversation: one, or more if the template rewrites earlier turns."""
        return join_turns(self.turns(messages), loss_on)

    def row(self, messages: Sequence[Message], loss_on: str = "all") -> TokenRow:
        """The last of ``rows``: the whole conversation unless the template rewrites earlier turns.

        Raises:
            DataError: the conversation has no written answer.
        """
        rows = self.rows(messages, loss_on)
        if not rows:
            raise DataError("data.sources: the conversation has no answer to train on; set data.regenerate=true")
        return rows[-1]

    def with_system(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, after the system message of the settings where they bring none."""
        if self.system is None or any(message["role"] == "system" for message in messages):
            return list(messages)
        return [{"role": "system", "content": self.system}, *messages]

    def _render(self, messages: Sequence[Message], *, prompt: bool) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                typed_messages(messages), tokenize=False, add_generation_prompt=prompt, **self._kwargs
            )
        except jinja2.TemplateError as error:
            raise TemplateRefusedError(
                f"data.sources: the chat template refused the conversation, got {error.message}; remove such rows"
            ) from error
        assert isinstance(text, str)
        return text

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text. The template writes BOS itself, so the tokenizer must not add another."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _encode_after(self, text: str) -> list[int]:
        """Ids of text that continues other text, without the space that some tokenizers put before a text."""
        end = self.tokenizer.eos_token
        if isinstance(end, str):
            ids = self.encode(end + text)
            if ids[:1] == [self.tokenizer.eos_token_id]:
                return ids[1:]
        return self.encode(text)

    def _prompt(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        """Rendered prompt and its ids, checked for a doubled BOS."""
        text = self._render(messages, prompt=True)
        ids = self.encode(text)
        bos = self.tokenizer.bos_token_id
        # Only the start counts: in some templates BOS is also the marker that opens each turn.
        if bos is not None and ids[:2] == [bos, bos]:
            raise DataError(
                f"target.name: prompts begin with two BOS tokens, got {text[:40]!r}; write BOS once in the "
                "chat template"
            )
        return text, ids

    def _turn(self, before: list[Message], message: Message) -> Turn:
        prompt, prompt_ids = self._prompt(before)
        content = message["content"] or ""
        full = self._render([*before, message], prompt=False)
        if full.startswith(prompt):
            source, answer = "prefix", full[len(prompt) :].rstrip()
        elif self.end_of_turn is not None:
            source, answer = "appended", content.strip() + self.end_of_turn
        else:
            raise DataError(
                "target.name: the chat template alters answers, so that they cannot be told from prompts, "
                f"got {full[-60:]!r}; use another chat template or target"
            )
        whole = self.encode(prompt + answer)
        # A token that spans the boundary would not be there when decoding starts from the prompt alone.
        continues = whole[: len(prompt_ids)] == prompt_ids
        answer_ids = whole[len(prompt_ids) :] if continues else self._encode_after(answer)
        supervised = [True] * len(answer_ids)
        if source == "prefix":
            if self.has_generation_tags:
                marked = self._marked([*before, message], prompt_ids + answer_ids)[len(prompt_ids) :]
                source = "generation tags" if any(marked) else "prefix (generation tags mark nothing)"
                supervised = _through_end(marked) if any(marked) else supervised
            inserted = self._inserted(prompt, prompt_ids + answer_ids, answer, content)
            supervised = [on and i >= inserted - len(prompt_ids) for i, on in enumerate(supervised)]
        self.mask_sources[source] += 1
        return Turn(prompt_ids, answer_ids, supervised)

    def _marked(self, messages: list[Message], ids: list[int]) -> list[bool]:
        """Which of ``ids`` the template's generation tags mark; none where the two tokenisations differ."""
        tagged: Any = self.tokenizer.apply_chat_template(
            typed_messages(messages),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self._kwargs,
        )
        if list(tagged["input_ids"][: len(ids)]) != ids:
            return []
        return [bool(on) for on in tagged["assistant_masks"][: len(ids)]]

    def _inserted(self, prompt: str, ids: list[int], answer: str, content: str) -> int:
        """How many of ``ids`` come before the answer's own text, e.g. an empty think block of the template.

        0 where nothing was added, or where the template altered the text so that its beginning is unknown.
        """
        if self.end_of_turn is None or not answer.endswith(content.strip() + self.end_of_turn):
            return 0
        added = answer[: len(answer) - len(content.strip() + self.end_of_turn)]
        return _common_prefix(self.encode(prompt + added), ids) if added.strip() else 0


def typed_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """The messages as the tokenizer takes them: with all texts written."""
    return [{key: value or "" for key, value in message.items()} for message in messages]


def _through_end(marked: list[bool]) -> list[bool]:
    """The marks, continued to the end: many templates close the tag before the end-of-turn token."""
    last = max(i for i, on in enumerate(marked) if on)
    return [on or i > last for i, on in enumerate(marked)]


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of equal items at the start of both."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of what turns text into ids: vocabulary, merges, normalisation and added tokens."""
    digest = hashlib.sha256()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        digest.update(backend.to_str().encode())
    else:
        digest.update(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    return digest.hexdigest()[:16]


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """An id to fill short rows with: the padding token, else EOS, else 0. Masks hide it, so any id does."""
    for name in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(name, int):
            return name
    return 0
