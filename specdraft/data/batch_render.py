"""Many conversations -> turns at once: one call of the tokenizer for a batch, one tokenisation for all turns of a row.

What comes out is what ``ChatRenderer.turns`` gives for each conversation alone, which is also what is called where a
shorter way is not certain to be equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerFast

from specdraft.data.chat import ChatRenderer, TemplateRefusedError, Turn, typed_messages
from specdraft.data.formats import Message

MOST_TAIL = 64
"""Characters between the last marker and the place of a cut, beyond which the short way is not tried."""


@dataclass(frozen=True)
class _Answer:
    """One answer as text: what it follows, what it adds up to and including its end of turn, and how it was found.

    inserted: how many characters of ``answer`` the template put in before the answer's own text.
    """

    prompt: str
    answer: str
    source: str
    inserted: int = 0

    @property
    def text(self) -> str:
        return self.prompt + self.answer


@dataclass(frozen=True)
class _Batch:
    """Conversations with their answers (None = the long way), which are parted into chains that share their tokens."""

    conversations: list[list[Message]]
    answers: list[list[_Answer] | None]
    chains: list[list[list[_Answer]]]


class BatchRenderer:
    """Renders batches of conversations with ``renderer``, whose ``mask_sources`` count the turns."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self.renderer = renderer
        self._tails: dict[tuple[int, str], list[int] | None] = {}
        tokenizer = renderer.tokenizer
        self._backend = tokenizer.backend_tokenizer if isinstance(tokenizer, PreTrainedTokenizerFast) else None
        self._markers: dict[str, int] = {}
        """Tokens at which text is parted before anything else happens to it, so that what stands on one side has no
        influence on the other."""
        if self._backend is not None and not tokenizer.split_special_tokens:
            for number, token in self._backend.get_added_tokens_decoder().items():
                if not (token.lstrip or token.rstrip or token.single_word or token.normalized):
                    self._markers[token.content] = number
        self._contents = {number: content for content, number in self._markers.items()}
        # Of two that begin at the same place the longer one counts.
        longest = sorted(self._markers, key=len, reverse=True)
        self._marker_text = re.compile("|".join(map(re.escape, longest)) or "(?!)")

    def prompt_lengths(self, conversations: Sequence[Sequence[Message]]) -> list[int | None]:
        """Tokens of the prompt of each conversation's first answer; None where the template refuses it."""
        self._reset()
        prompts = []
        for messages in conversations:
            first = next(i for i, message in enumerate(messages) if message["role"] == "user")
            prompts.append(self.renderer.with_system(messages[: first + 1]))
        texts = self._render(prompts, prompt=True)
        ids = iter(self._encode([text for text in texts if text is not None]))
        return [None if text is None else len(next(ids)) for text in texts]

    def turns(self, conversations: Sequence[Sequence[Message]]) -> list[list[Turn] | None]:
        """``ChatRenderer.turns`` of each conversation; None where the template refuses it."""
        (found,) = self.stream([conversations])
        return found

    def stream(self, batches: Iterable[Sequence[Sequence[Message]]]) -> Iterator[list[list[Turn] | None]]:
        """``turns`` of each batch, whose text is tokenised by a thread while that of the next one is rendered."""
        self._reset()
        with ThreadPoolExecutor(1, thread_name_prefix="tokenize") as pool:
            before: tuple[_Batch, Future[list[list[int]]]] | None = None
            for conversations in batches:
                batch = self._begin(conversations)
                encoded = pool.submit(self._encode, [chain[-1].text for own in batch.chains for chain in own])
                if before is not None:
                    yield self._finish(before[0], before[1].result())
                before = batch, encoded
            if before is not None:
                yield self._finish(before[0], before[1].result())

    def _begin(self, conversations: Sequence[Sequence[Message]]) -> _Batch:
        whole = [self.renderer.with_system(messages) for messages in conversations]
        answers = self._answers(whole)
        # The tokens of a text serve all turns that it continues.
        return _Batch(whole, answers, [_chains(own) if own else [] for own in answers])

    def _finish(self, batch: _Batch, encoded: Sequence[list[int]]) -> list[list[Turn] | None]:
        ids = iter(encoded)
        found: list[list[Turn] | None] = []
        for messages, own, parts in zip(batch.conversations, batch.answers, batch.chains, strict=True):
            pieces = [self._cut(chain, next(ids)) for chain in parts]
            if own is not None and all(piece is not None for piece in pieces):
                self.renderer.mask_sources.update(answer.source for answer in own)
                found.append([turn for piece in pieces for turn in piece or ()])
                continue
            try:
                found.append(self.renderer.turns(messages))
            except TemplateRefusedError:
                found.append(None)
        return found

    def _answers(self, conversations: Sequence[Sequence[Message]]) -> list[list[_Answer] | None]:
        """The written answers of each conversation as text; None where only the long way will do."""
        if self.renderer.has_generation_tags:
            return [None] * len(conversations)
        places = []
        for number, messages in enumerate(conversations):
            for i, message in enumerate(messages):
                if message["role"] == "assistant":
                    if message["content"] is None:
                        break
                    places.append((number, i))
        prompts = self._render([conversations[number][:i] for number, i in places], prompt=True)
        wholes = self._render([conversations[number][: i + 1] for number, i in places], prompt=False)
        answers: list[list[_Answer] | None] = [[] for _ in conversations]
        for (number, i), prompt, whole in zip(places, prompts, wholes, strict=True):
            content = conversations[number][i]["content"] or ""
            answer = None if prompt is None or whole is None else self._answer(prompt, whole, content)
            earlier = answers[number]
            answers[number] = None if earlier is None or answer is None else [*earlier, answer]
        return answers

    def _answer(self, prompt: str, whole: str, content: str) -> _Answer | None:
        """See ``ChatRenderer.turns``."""
        end = self.renderer.end_of_turn
        if not whole.startswith(prompt):
            return None if end is None else _Answer(prompt, content.strip() + end, "appended")
        answer = whole[len(prompt) :].rstrip()
        if end is None or not answer.endswith(content.strip() + end):
            return _Answer(prompt, answer, "prefix")
        added = len(answer) - len(content.strip() + end)
        return _Answer(prompt, answer, "prefix", added if answer[:added].strip() else 0)

    def _render(self, conversations: Sequence[Sequence[Message]], *, prompt: bool) -> list[str | None]:
        """The template's text for each; None where it raises an error."""
        if not conversations:
            return []
        try:
            texts: Any = self.renderer.tokenizer.apply_chat_template(
                [typed_messages(messages) for messages in conversations],
                tokenize=False,
                add_generation_prompt=prompt,
                **self.renderer.template_arguments,
            )
        except jinja2.TemplateError:
            if len(conversations) == 1:
                return [None]
            half = len(conversations) // 2
            return self._render(conversations[:half], prompt=prompt) + self._render(conversations[half:], prompt=prompt)
        return list(texts)

    def _reset(self) -> None:
        """Takes back what another user of the tokenizer may have set. Nothing changes it while a thread works."""
        if self._backend is not None and self._backend.truncation is not None:
            self._backend.no_truncation()
        if self._backend is not None and self._backend.padding is not None:
            self._backend.no_padding()

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""
        if self._backend is None:
            return [self.renderer.encode(text) for text in texts]
        return [found.ids for found in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _cut(self, chain: Sequence[_Answer], ids: list[int]) -> list[Turn] | None:
        """The turns of a chain from the tokens of its last text; None where they may differ from those of a turn alone."""
        bos = self.renderer.tokenizer.bos_token_id
        marks = self._marks(chain[-1].text, ids)
        if marks is None or (bos is not None and ids[:2] == [bos, bos]):
            return None
        text, turns = chain[-1].text, []
        for number, answer in enumerate(chain):
            start = self._tokens_before(len(answer.prompt), text, ids, marks)
            own = start
            if answer.inserted:
                own = self._tokens_before(len(answer.prompt) + answer.inserted, text, ids, marks)
            last = number == len(chain) - 1
            end = len(ids) if last else self._tokens_before(len(answer.text), text, ids, marks)
            if start is None or own is None or end is None:
                return None
            supervised = [False] * (own - start) + [True] * (end - own)
            turns.append(Turn(ids[:start], ids[start:end], supervised))
        return turns

    def _marks(self, text: str, ids: list[int]) -> list[tuple[int, int]] | None:
        """(where it ends in ``text``, its place in ``ids``) of every marker; None where the two do not agree on them."""
        written = [(match.end(), self._markers[match.group()]) for match in self._marker_text.finditer(text)]
        places = [place for place, token in enumerate(ids) if token in self._contents]
        if [number for _, number in written] != [ids[place] for place in places]:
            return None
        return [(end, place) for (end, _), place in zip(written, places, strict=True)]

    def _tokens_before(self, at: int, text: str, ids: list[int], marks: Sequence[tuple[int, int]]) -> int | None:
        """How many of ``ids`` are the tokens of ``text[:at]`` alone; None where that is not certain.

        It is where the text between the last marker and ``at``, tokenised without what follows, gives the same tokens.
        """
        mark = next((mark for mark in reversed(marks) if mark[0] <= at), None)
        if mark is None or at - mark[0] > MOST_TAIL:
            return None
        tail = self._tail_ids(ids[mark[1]], text[mark[0] : at])
        first = mark[1] + 1
        return first + len(tail) if tail is not None and ids[first : first + len(tail)] == tail else None

    def _tail_ids(self, marker: int, tail: str) -> list[int] | None:
        """The tokens of ``tail`` behind a marker; None if the marker is not parted from it."""
        if not tail:
            return []
        if (marker, tail) not in self._tails:
            (ids,) = self._encode([self._contents[marker] + tail])
            if len(self._tails) >= 4096:
                self._tails.clear()
            self._tails[marker, tail] = ids[1:] if ids[0] == marker else None
        return self._tails[marker, tail]


def _chains(answers: Sequence[_Answer]) -> list[list[_Answer]]:
    """The answers in parts, in each of which every text continues the one before."""
    chains: list[list[_Answer]] = []
    for answer in answers:
        if chains and answer.prompt.startswith(chains[-1][-1].text):
            chains[-1].append(answer)
        else:
            chains.append([answer])
    return chains
