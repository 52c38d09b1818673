"""Answers written by the target itself: every turn of every conversation once, resumable, shared among processes."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from typing import Any

from specdraft.data._config import DataConfig
from specdraft.data.answering import AnswerWriter, Job, seed_of, temperature_of
from specdraft.data.chat import ChatRenderer, Turn
from specdraft.data.formats import Message
from specdraft.data.journal import NO_ROOM, Answer, AnswerJournal, AnswerKey
from specdraft.data.progress import progress
from specdraft.data.sources import Conversation

BLOCK = 16384
"""Conversations that are rendered, sorted and answered together; of the others nothing but answers is in memory."""


def conversation_key(conversation: Conversation) -> str:
    """Hash of what the target is asked: rows that differ only in their answers share regenerated ones."""
    asked = [[m["role"], m["content"]] for m in conversation.messages if m["role"] != "assistant"]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:24]


def regenerate(
    conversations: Sequence[Conversation],
    renderer: ChatRenderer,
    writer: AnswerWriter,
    journal: AnswerJournal,
    config: DataConfig,
    *,
    rank: int = 0,
    world_size: int = 1,
) -> None:
    """Writes this process's share of the answers that the journal lacks.

    Every assistant turn is answered in order, after the earlier answers of the target, and each of ``answers.samples``
    on its own. A conversation's answers are all written by one process. What the writer gives is on the disk before it
    goes on.

    Raises:
        TemplateRefusedError: the chat template refuses a conversation; leave such out beforehand.
        DataError: answers cannot be had or saved; those that could are kept.
    """
    journal.read()
    for block in _blocks(conversations, rank, world_size):
        for turn in range(max(len(c.user_turns) for c in block.values())):
            jobs = _jobs(block, turn, journal, renderer, config)
            room = writer.max_length - config.max_new_tokens
            if too_long := [job.answer([], NO_ROOM) for job in jobs if len(job.prompt_ids) > room]:
                journal.append(too_long)
            jobs = [job for job in jobs if len(job.prompt_ids) <= room]
            bar = progress(f"target answers, turn {turn + 1}", len(jobs)) if rank == 0 else nullcontext(_nothing)
            with bar as advance, closing(writer.write(jobs)) as written:
                for answers in written:
                    journal.append(answers)
                    advance(len(answers))


def _nothing(_: int) -> None:
    """Progress that nobody sees."""


def _blocks(conversations: Sequence[Conversation], rank: int, world_size: int) -> Iterator[dict[str, Conversation]]:
    """Key -> conversation for this process, a block at a time. Depends on nothing that changes while processes work."""
    block: dict[str, Conversation] = {}
    for conversation in conversations:
        key = conversation_key(conversation)
        if int(key, 16) % world_size == rank:
            block[key] = conversation
        if len(block) == BLOCK:
            yield block
            block = {}
    if block:
        yield block


def _jobs(
    block: Mapping[str, Conversation],
    turn: int,
    answers: Mapping[AnswerKey, Answer],
    renderer: ChatRenderer,
    config: DataConfig,
) -> list[Job]:
    """What is not answered yet of a turn."""
    jobs = []
    for key, conversation in block.items():
        for sample in range(config.answers.samples):
            if (key, turn, sample) in answers:
                continue
            asked = _asked(conversation, (key, turn, sample), answers, renderer)
            if asked is None:
                continue
            temperature = temperature_of(config, key, sample)
            seed = seed_of(config, key, turn, sample)
            jobs.append(Job(key, turn, sample, asked, renderer.prompt_ids(asked), temperature, seed))
    return jobs


def _asked(
    conversation: Conversation, wanted: AnswerKey, answers: Mapping[AnswerKey, Answer], renderer: ChatRenderer
) -> list[Message] | None:
    """The messages before an answer, with the target's earlier ones; None if there is no such answer."""
    key, turn, sample = wanted
    if turn >= len(conversation.user_turns):
        return None
    messages: list[Message] = []
    seen = 0
    for message in conversation.messages:
        if message["role"] != "assistant":
            messages.append(message)
            continue
        if seen == turn:
            return messages
        earlier = answers[key, seen, sample].answer_ids
        if not earlier:
            return None
        text = renderer.tokenizer.decode(earlier, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": str(text)})
        seen += 1
    return messages


@dataclass
class AnswerCounts:
    """Answers by how they ended, by temperature, and by where their token ids are from."""

    finish: Counter[str] = field(default_factory=Counter)
    temperature: Counter[str] = field(default_factory=Counter)
    ids_from: Counter[str] = field(default_factory=Counter)

    def add(self, answer: Answer) -> None:
        """Counts one."""
        self.finish[answer.finish] += 1
        if answer.answer_ids:
            self.temperature[str(answer.temperature)] += 1
            self.ids_from[answer.ids_from] += 1

    def as_dict(self) -> dict[str, Any]:
        """For a manifest."""
        return {name: dict(sorted(counts.items())) for name, counts in vars(self).items()}


def answered_turns(
    conversation: Conversation,
    answers: Mapping[AnswerKey, Answer],
    sample: int = 0,
    counts: AnswerCounts | None = None,
) -> list[Turn] | None:
    """The regenerated turns of a conversation, from the ids the target read and wrote.

    An answer that was cut by ``max_new_tokens`` has no end-of-turn token and stays supervised. None while an
    answer is missing; fewer turns than asked where one could not be written, which its ``finish`` explains.
    ``counts`` receives every answer.
    """
    key = conversation_key(conversation)
    turns = []
    for turn in range(len(conversation.user_turns)):
        answer = answers.get((key, turn, sample))
        if answer is None:
            return None
        if counts is not None:
            counts.add(answer)
        if not answer.answer_ids:
            break
        turns.append(Turn(answer.prompt_ids, answer.answer_ids, [True] * len(answer.answer_ids)))
    return turns


def all_answered_turns(
    conversation: Conversation, answers: Mapping[AnswerKey, Answer], samples: int, counts: AnswerCounts | None = None
) -> Iterator[list[Turn]]:
    """The turns of each sample that was written; see ``answered_turns``."""
    for sample in range(samples):
        turns = answered_turns(conversation, answers, sample, counts)
        if turns is not None:
            yield turns
