"""Answers written by the target itself: batched, sorted by length, resumable, shared among processes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import GenerationConfig

from specdraft.data._config import DataConfig
from specdraft.data.chat import ChatRenderer, Turn, pad_token_id
from specdraft.data.formats import Message
from specdraft.data.journal import Answer, AnswerJournal
from specdraft.data.sources import Conversation

if TYPE_CHECKING:
    from specdraft.targets.hf import HFTarget


@dataclass(frozen=True)
class _Job:
    """One answer to write."""

    conversation: str
    prompt_ids: list[int]


def conversation_key(conversation: Conversation) -> str:
    """Hash of what the target is asked: rows that differ only in their answers share regenerated ones."""
    asked = [[m["role"], m["content"]] for m in conversation.messages if m["role"] != "assistant"]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:24]


def regenerate(
    conversations: Sequence[Conversation],
    renderer: ChatRenderer,
    target: HFTarget,
    journal: AnswerJournal,
    config: DataConfig,
    *,
    rank: int = 0,
    world_size: int = 1,
) -> None:
    """Writes this process's share of the answers that the journal lacks.

    Every assistant turn is answered in order, after the earlier answers of the target. Conversations keep
    their process in all turns. Longest prompts come first, so that memory runs out at once or never. A batch
    is on the disk before the next one starts. ``config.temperature`` 0 is greedy; else the samples depend on
    ``config.seed`` and the batch.

    Raises:
        TemplateRefusedError: the chat template refuses a conversation; leave such out beforehand.
        DataError: the answers cannot be saved.
    """
    writer = _Writer(target, renderer, config)
    mine = _share(conversations, renderer, config.generate_batch_size, rank, world_size)
    answers = journal.read()

    def keep(written: list[Answer]) -> None:
        journal.append(written)
        answers.update({(answer.conversation, answer.turn): answer for answer in written})

    with _progress(rank) as advance:
        for turn in range(max((len(c.user_turns) for c in mine.values()), default=0)):
            jobs = []
            for key, conversation in mine.items():
                if (key, turn) not in answers:
                    asked = _asked(conversation, key, turn, answers, renderer)
                    jobs += [_Job(key, renderer.prompt_ids(asked))] if asked else []
            jobs.sort(key=lambda job: (-len(job.prompt_ids), job.conversation))
            if too_long := [job for job in jobs if not writer.has_room(job)]:
                keep([Answer(job.conversation, turn, job.prompt_ids, []) for job in too_long])
            jobs = jobs[len(too_long) :]
            for start in range(0, len(jobs), config.generate_batch_size):
                batch = jobs[start : start + config.generate_batch_size]
                keep(writer.write(batch, turn))
                advance(f"turn {turn + 1}", start + len(batch), len(jobs))


def answered_turns(conversation: Conversation, answers: dict[tuple[str, int], Answer]) -> list[Turn] | None:
    """The regenerated turns of a conversation, from the ids the target read and wrote.

    An answer that was cut by ``max_new_tokens`` has no end-of-turn token and stays supervised. None while an
    answer is missing; fewer turns than asked where a prompt left no room.
    """
    key = conversation_key(conversation)
    turns = []
    for turn in range(len(conversation.user_turns)):
        answer = answers.get((key, turn))
        if answer is None:
            return None
        if not answer.answer_ids:
            break
        turns.append(Turn(answer.prompt_ids, answer.answer_ids, [True] * len(answer.answer_ids)))
    return turns


def _share(
    conversations: Sequence[Conversation], renderer: ChatRenderer, batch_size: int, rank: int, world_size: int
) -> dict[str, Conversation]:
    """Key -> conversation for this process. Depends on nothing that changes while processes are at work."""
    unique = {conversation_key(c): c for c in conversations}
    if world_size == 1:
        return unique
    lengths = {key: len(first_prompt_ids(c, renderer)) for key, c in unique.items()}
    order = sorted(unique, key=lambda key: (-lengths[key], key))
    return {key: unique[key] for i, key in enumerate(order) if i // batch_size % world_size == rank}


def first_prompt_ids(conversation: Conversation, renderer: ChatRenderer) -> list[int]:
    """Ids of the prompt of a conversation's first answer.

    Raises:
        TemplateRefusedError: the template refuses it.
    """
    first = next(i for i, m in enumerate(conversation.messages) if m["role"] == "user")
    return renderer.prompt_ids(conversation.messages[: first + 1])


def _asked(
    conversation: Conversation,
    key: str,
    turn: int,
    answers: dict[tuple[str, int], Answer],
    renderer: ChatRenderer,
) -> list[Message] | None:
    """The messages before answer ``turn``, with the target's earlier answers; None if there is none."""
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
        earlier = answers[key, seen].answer_ids
        if not earlier:
            return None
        text = renderer.tokenizer.decode(earlier, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": str(text)})
        seen += 1
    return messages


class _Writer:
    """Writes a batch of answers with the target's own ``generate``."""

    def __init__(self, target: HFTarget, renderer: ChatRenderer, config: DataConfig) -> None:
        self.target = target
        self.config = config
        self.eos = set(target.spec.eos_token_ids)
        self.pad = pad_token_id(renderer.tokenizer)
        sampled = config.temperature > 0
        # Spelled out, because generate() fills what is unset from the checkpoint, which can hold penalties
        # and top-k.
        self.settings = GenerationConfig(
            do_sample=sampled,
            temperature=config.temperature if sampled else 1.0,
            top_k=0 if sampled else None,
            top_p=1.0,
            typical_p=1.0,
            min_p=0.0 if sampled else None,
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            max_new_tokens=config.max_new_tokens,
            eos_token_id=sorted(self.eos) or None,
            pad_token_id=self.pad,
            use_cache=True,
        )

    def has_room(self, job: _Job) -> bool:
        """Whether a whole answer fits behind the prompt."""
        longest = self.target.spec.max_position_embeddings
        return len(job.prompt_ids) + self.config.max_new_tokens <= longest

    @torch.no_grad()
    def write(self, batch: Sequence[_Job], turn: int) -> list[Answer]:
        """The answers to ``batch``, each cut after its first EOS."""
        longest = max(len(job.prompt_ids) for job in batch)
        # Padding on the left: the next token follows the last column in every row.
        ids = torch.tensor([[self.pad] * (longest - len(job.prompt_ids)) + job.prompt_ids for job in batch])
        mask = torch.tensor([[0] * (longest - len(job.prompt_ids)) + [1] * len(job.prompt_ids) for job in batch])
        device = self.target.device
        model: Any = self.target.model
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(self._seed(batch, turn))
            output = model.generate(
                input_ids=ids.to(device), attention_mask=mask.to(device), generation_config=self.settings
            )
        return [
            Answer(job.conversation, turn, job.prompt_ids, self._cut(new))
            for job, new in zip(batch, output[:, longest:].tolist(), strict=True)
        ]

    def _cut(self, ids: list[int]) -> list[int]:
        """The ids up to and including the first EOS; what follows is padding."""
        end = next((i for i, token in enumerate(ids) if token in self.eos), len(ids) - 1)
        return ids[: end + 1]

    def _seed(self, batch: Sequence[_Job], turn: int) -> int:
        text = f"{self.config.seed}/{turn}/{batch[0].conversation}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


@contextmanager
def _progress(rank: int) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal, silence elsewhere. Yields ``advance(label, done, total)``."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("target answers, {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=rank != 0 or not console.is_terminal,
    )
    task = bar.add_task("", total=None)
    with bar:
        yield lambda label, done, total: bar.update(task, description=label, completed=done, total=total)
