"""Conversations of a data set -> shards of token rows, each of which is made once, whatever ends the work in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdraft.data.batch_render import BatchRenderer
from specdraft.data.chat import ChatRenderer, TokenRow, Turn, join_turns
from specdraft.data.collect import REFUSED, RENDER_BATCH, load_collected, unusable_prompt
from specdraft.data.journal import Answer, AnswerKey
from specdraft.data.prepared import shard_name
from specdraft.data.regenerate import AnswerCounts, all_answered_turns
from specdraft.data.shards import MappedBatch, TokenRows, write_batch
from specdraft.data.sources import Conversation

NO_ANSWER = "no answer (set data.regenerate=true)"
NO_USABLE_ANSWER = "no usable answer"
NOT_SUPERVISED = "nothing supervised within data.max_length"
Job = tuple[int, int, int]
"""Number of a shard, first conversation and the one behind the last."""


@dataclass
class ShardCounts:
    """What a shard is made of: rows by reason for which they were dropped, turns by how their answer was found, and so on."""

    dropped: Counter[str]
    mask_sources: Counter[str]
    categories: Counter[str]
    answers: dict[str, Any]

    def record(self, rows: TokenRows) -> dict[str, Any]:
        """What stands in the shard's file beside ``rows``."""
        return {
            "num_rows": len(rows.lengths),
            "num_tokens": sum(rows.lengths),
            "num_supervised_tokens": rows.num_supervised,
            "length_histogram": length_histogram(rows.lengths),
            "dropped": dict(self.dropped),
            "mask_sources": dict(self.mask_sources),
            "categories": dict(self.categories),
            "answers": self.answers,
        }


@dataclass
class Rendering:
    """Makes shards of the answers that the conversations in ``folder`` have, for ``workers.spread``.

    It is pickled: the tokenizer goes along, the conversations are opened anew. ``out``: receives the shards.
    """

    folder: Path
    out: Path
    tokenizer: PreTrainedTokenizerBase
    system: str | None
    enable_thinking: bool | None
    max_length: int
    loss_on: str

    @cached_property
    def _conversations(self) -> Sequence[Conversation]:
        return load_collected(self.folder).conversations

    @cached_property
    def _renderer(self) -> BatchRenderer:
        return BatchRenderer(ChatRenderer(self.tokenizer, system=self.system, enable_thinking=self.enable_thinking))

    def __call__(self, job: Job) -> None:
        """Writes a shard.

        Raises:
            DataError: the template's answers cannot be told from prompts.
            OSError: the shard cannot be written.
        """
        counts = ShardCounts(Counter(), self._renderer.renderer.mask_sources, Counter(), {})
        counts.mask_sources.clear()
        _write_shard(self.out, job, TokenRows(self._rows(job, counts)), counts)

    def _rows(self, job: Job, counts: ShardCounts) -> Iterator[TokenRow]:
        _, first, behind = job
        parts = [
            self._conversations[start : min(start + RENDER_BATCH, behind)]
            for start in range(first, behind, RENDER_BATCH)
        ]
        for part, turns in zip(
            parts, self._renderer.stream([row.messages for row in part] for part in parts), strict=True
        ):
            unanswered = [row.messages for row, own in zip(part, turns, strict=True) if own == []]
            lengths = iter(self._renderer.prompt_lengths(unanswered))
            for row, own in zip(part, turns, strict=True):
                counts.categories[row.category] += 1
                if own is None:
                    counts.dropped[REFUSED] += 1
                    continue
                reason = unusable_prompt(len(own[0].prompt_ids) if own else next(lengths), self.max_length)
                if reason is not None or not own:
                    counts.dropped[reason or NO_ANSWER] += 1
                    continue
                yield from _cut_rows(own, self.loss_on, self.max_length, counts.dropped)


def regenerated(
    out: Path,
    conversations: Sequence[Conversation],
    answers: Mapping[AnswerKey, Answer],
    samples: int,
    *,
    max_length: int,
    loss_on: str,
) -> Callable[[Job], None]:
    """A function that makes shards of the target's answers to ``conversations``."""

    def rows(job: Job, counts: ShardCounts, read: AnswerCounts) -> Iterator[TokenRow]:
        for conversation in (conversations[i] for i in range(*job[1:])):
            counts.categories[conversation.category] += 1
            for turns in all_answered_turns(conversation, answers, samples, read):
                if not turns:
                    counts.dropped[NO_USABLE_ANSWER] += 1
                    continue
                counts.mask_sources["written by the target"] += len(turns)
                yield from _cut_rows(turns, loss_on, max_length, counts.dropped)

    def write(job: Job) -> None:
        read = AnswerCounts()
        counts = ShardCounts(Counter(), Counter(), Counter(), {})
        made = TokenRows(rows(job, counts, read))
        counts.answers = read.as_dict()
        _write_shard(out, job, made, counts)

    return write


def _cut_rows(turns: Sequence[Turn], loss_on: str, max_length: int, dropped: Counter[str]) -> Iterator[TokenRow]:
    """The rows of a conversation, cut to the maximal length; those with nothing supervised are counted."""
    for row in join_turns(turns, loss_on):
        cut = row.truncate(max_length)
        if cut is None:
            dropped[NOT_SUPERVISED] += 1
        else:
            yield cut


def _write_shard(out: Path, job: Job, rows: TokenRows, counts: ShardCounts) -> None:
    write_batch(out / shard_name(job[0]), rows.batch(), counts.record(rows))


def open_jobs(out: Path, groups: Sequence[tuple[int, int]]) -> list[Job]:
    """A shard for each group of conversations, without those that an earlier run has finished."""
    jobs = [(number, start, stop) for number, (start, stop) in enumerate(groups)]
    return [job for job in jobs if not (out / shard_name(job[0])).exists()]


def totals(out: Path, num_shards: int) -> dict[str, Any]:
    """The records of all shards added up.

    Raises:
        DataError: a shard is missing or torn.
    """
    found: dict[str, Any] = {}
    for number in range(num_shards):
        _add(found, MappedBatch(out / shard_name(number)).metadata)
    return found


def _add(to: dict[str, Any], record: Mapping[str, Any]) -> None:
    for key, value in record.items():
        if isinstance(value, Mapping):
            _add(to.setdefault(key, {}), value)
        else:
            to[key] = to.get(key, 0) + value


def length_histogram(lengths: Sequence[int]) -> dict[str, int]:
    """Rows by length, in bins that double: ``{"<=64": 10, "<=128": 3}``."""
    bins: Counter[int] = Counter(max(64, 1 << (length - 1).bit_length()) for length in lengths)
    return {f"<={top}": bins[top] for top in sorted(bins)}
