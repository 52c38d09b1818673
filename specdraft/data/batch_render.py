"""Many conversations -> turns at once: one call of the tokenizer for a batch, one tokenisation for all turns of a row.

What comes out is what ``ChatRenderer.turns`` gives for each conversation alone, which is also what is called where a
shorter way is not certain to be equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

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


class BatchRenderer:
    """Renders batches of conversations with ``renderer``, whose ``mask_sources`` count the turns."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self.renderer = renderer
        self._tails: dict[tuple[int, str], list[int] | None] = {}
        backend = getattr(renderer.tokenizer, "backend_tokenizer", None)
        added = {} if backend is None else backend.get_added_tokens_decoder()
        self._markers = {
            number: token.content
            for number, token in added.items()
            if not (token.lstrip or token.rstrip or token.single_word or token.normalized)
        }
        """Tokens at which text is parted before anything else happens to it, so that what stands on one side has no
        influence on the other."""

    def prompt_lengths(self, conversations: Sequence[Sequence[Message]]) -> list[int | None]:
        """Tokens of the prompt of each conversation's first answer; None where the template refuses it."""
        prompts = []
        for messages in conversations:
            first = next(i for i, message in enumerate(messages) if message["role"] == "user")
            prompts.append(self.renderer.with_system(messages[: first + 1]))
        texts = self._render(prompts, prompt=True)
        ids = iter(self._encode([text for text in texts if text is not None]))
        return [None if text is None else len(next(ids)[0]) for text in texts]

    def turns(self, conversations: Sequence[Sequence[Message]]) -> list[list[Turn] | None]:
        """``ChatRenderer.turns`` of each conversation; None where the template refuses it."""
        whole = [self.renderer.with_system(messages) for messages in conversations]
        answers = self._answers(whole)
        # The tokens of a text serve all turns that it continues.
        chains = [_chains(own) if own else [] for own in answers]
        encoded = iter(self._encode([chain[-1].text for own in chains for chain in own]))
        found: list[list[Turn] | None] = []
        for messages, own, parts in zip(whole, answers, chains, strict=True):
            pieces = [self._cut(chain, *next(encoded)) for chain in parts]
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

    def _encode(self, texts: Sequence[str]) -> list[tuple[list[int], Any]]:
        """(ids, the tokenizer's record or None) of each text."""
        if not texts:
            return []
        batch = self.renderer.tokenizer(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return list(zip(batch["input_ids"], batch.encodings or [None] * len(texts), strict=True))

    def _cut(self, chain: Sequence[_Answer], ids: list[int], encoding: Any) -> list[Turn] | None:
        """The turns of a chain from the tokens of its last text; None where they may differ from those of a turn alone."""
        bos = self.renderer.tokenizer.bos_token_id
        if encoding is None or (bos is not None and ids[:2] == [bos, bos]):
            return None
        marks = [(encoding.token_to_chars(i)[1], i) for i, token in enumerate(ids) if token in self._markers]
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
            ((ids, _),) = self._encode([self._markers[marker] + tail])
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
