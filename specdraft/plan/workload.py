"""How much there is to train on: rows and tokens of the data, optimizer steps and positions of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from specdraft.core.errors import DataError
from specdraft.data.batching import BatchPlan
from specdraft.data.chat import ChatRenderer, TemplateRefusedError
from specdraft.data.identity import find_prepared
from specdraft.data.sources import Conversation
from specdraft.plan.job import Job
from specdraft.plan.sampling import source_sample
from specdraft.targets.weights import TargetFiles

SAMPLE = 64
"""Conversations that are rendered for an estimate."""
MOST_ROWS = 20_000
"""Rows that are put into batches for an estimate; more behave like these."""


@dataclass(frozen=True)
class Workload:
    """Rows of a run. lengths: tokens of the rows, or of a part that stands for all of them. num_rows: all of them.

    supervised, prompt, answer: tokens a row: those the loss is on, those read before an answer is written, those the target
    writes (0 where it does not). num_conversations: as the sources have them. origin: where the figures are from.
    is_prepared: the rows are on the disk.
    """

    lengths: list[int]
    num_rows: int
    num_conversations: int
    supervised: float
    prompt: float
    answer: float
    origin: str
    is_prepared: bool = False

    @property
    def num_tokens(self) -> int:
        """Of all rows."""
        return round(sum(self.lengths) * self.num_rows / max(1, len(self.lengths)))

    @property
    def mean_length(self) -> float:
        """Tokens of a row."""
        return sum(self.lengths) / max(1, len(self.lengths))

    @property
    def supervised_share(self) -> float:
        """Of the tokens."""
        return self.supervised / max(1.0, self.mean_length)


def estimated_workload(job: Job, tokenizer: PreTrainedTokenizerBase) -> Workload:
    """From the sources and the tokenizer alone, of which some conversations are rendered.

    Answers that the target will write count with the most tokens that they may have.

    Raises:
        DataError: a source cannot be read, or the template takes none of its conversations.
    """
    data = job.data
    sample = source_sample(data, SAMPLE)
    chosen = sample.conversations
    renderer = ChatRenderer(tokenizer, system=data.system, enable_thinking=data.enable_thinking)
    lengths: list[int] = []
    supervised = prompts = answers = 0
    for conversation in chosen:
        try:
            rows = _rows(conversation, renderer, job)
        except TemplateRefusedError:
            continue
        for prompt, answer, length in rows:
            lengths.append(length)
            supervised += answer
            prompts += prompt
            answers += answer if data.regenerate else 0
    if not lengths:
        raise DataError(
            f"data.sources: none of {len(chosen)} conversations gives a row to train on, got {', '.join(data.sources)}; "
            "see specdraft doctor"
        )
    count = len(lengths)
    several = data.answers.samples if data.regenerate else 1
    origin = (
        f"{len(chosen)} conversations rendered" if sample.is_exact else "at least; the source does not say how many"
    )
    if data.regenerate:
        origin += ", answers as long as data.max_new_tokens lets them be"
    return Workload(
        lengths=lengths,
        num_rows=max(1, round(several * sample.total * count / len(chosen))),
        num_conversations=sample.total,
        supervised=supervised / count,
        prompt=prompts / count,
        answer=answers / count,
        origin=origin,
    )


def prepared_workload(job: Job, tokenizer: PreTrainedTokenizerBase) -> Workload | None:
    """Of rows that an earlier run prepared with these settings, all answers written; None = there are none.

    Raises:
        DataError: a source cannot be read, or the rows are damaged.
    """

    def fingerprint() -> str:
        return TargetFiles(job.target.name, job.target.revision).spec().fingerprint

    found = find_prepared(job.data, tokenizer, job.data_dir, fingerprint, job.target.dtype)
    if found is None:
        return None
    supervised = found.manifest["num_supervised_tokens"] / len(found)
    return Workload(
        lengths=list(found.lengths[:: -(-len(found) // MOST_ROWS)]),
        num_rows=len(found),
        num_conversations=found.manifest["num_conversations"],
        supervised=supervised,
        prompt=sum(found.lengths) / len(found) - supervised,
        answer=0.0,
        origin="prepared before",
        is_prepared=True,
    )


def sampled_workload(lengths: Sequence[int], supervised: int, sampled: int, total: int, job: Job) -> Workload:
    """From rows that were prepared of ``sampled`` of ``total`` conversations. supervised: tokens of these rows."""
    count = max(1, len(lengths))
    mean = supervised / count
    return Workload(
        lengths=list(lengths),
        num_rows=max(1, round(total * len(lengths) / max(1, sampled))),
        num_conversations=total,
        supervised=mean,
        prompt=sum(lengths) / count - mean,
        answer=mean if job.data.regenerate else 0.0,
        origin="all rows prepared" if sampled >= total else f"{sampled} of {total:,} conversations prepared",
    )


def _rows(conversation: Conversation, renderer: ChatRenderer, job: Job) -> list[tuple[int, int, int]]:
    """(prompt tokens, supervised tokens, tokens) of the rows of a conversation."""
    data = job.data
    if not data.regenerate:
        cut = [row.truncate(data.max_length) for row in renderer.rows(conversation.messages, data.loss_on)]
        rows = [row for row in cut if row is not None]
        return [(0, sum(row.loss_mask), len(row.input_ids)) for row in rows]
    later = conversation.user_turns[1:]
    turns = 1 + len(later)
    first = next(place for place, message in enumerate(conversation.messages) if message["role"] == "user")
    prompt = len(renderer.prompt_ids(conversation.messages[: first + 1]))
    prompt += sum(len(renderer.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in later)
    room = data.max_length - prompt
    if room < 2:
        return []
    answer = min(data.max_new_tokens * turns, room)
    return [(prompt, answer if data.loss_on == "all" else min(answer, data.max_new_tokens), prompt + answer)]


@dataclass(frozen=True)
class Schedule:
    """The course of training over a workload.

    steps: optimizer steps; None where only time ends the run. epoch_steps, epoch_tokens: of one pass. padding: share of
    positions that hold no token. longest: tokens of the longest row.
    """

    job: Job
    workload: Workload

    @cached_property
    def _plan(self) -> BatchPlan:
        data = self.job.data
        lengths = self.workload.lengths
        wanted = min(self.workload.num_rows, MOST_ROWS)
        repeated = (lengths * -(-wanted // len(lengths)))[:wanted]
        return BatchPlan(
            lengths=repeated,
            batch_size=data.batch_size,
            accumulation_steps=self.job.trainer.accumulation_steps,
            world_size=self.job.processes,
            seed=data.seed,
            bucket=data.bucket,
            capacity=data.max_length if data.packing else None,
        )

    @property
    def _scale(self) -> float:
        return self.workload.num_rows / len(self._plan.lengths)

    @cached_property
    def padding(self) -> float:
        """Share of the positions of a pass that hold no token."""
        return self._plan.padding_share()

    @cached_property
    def epoch_steps(self) -> int:
        """Optimizer steps of a pass."""
        if self._scale == 1.0:
            return self._plan.num_steps(0)
        return max(1, round(self._plan.num_steps(0) * self._scale))

    @property
    def epoch_tokens(self) -> int:
        """Tokens of a pass."""
        return self.workload.num_tokens

    @property
    def longest(self) -> int:
        """Positions of the longest row of a batch."""
        return self.job.data.max_length if self.job.data.packing else max(self.workload.lengths)

    @cached_property
    def steps(self) -> int | None:
        """As ``TrainInputs.total_steps`` counts them."""
        trainer = self.job.trainer
        if trainer.max_tokens is not None:
            found = (
                self._plan.steps_for(trainer.max_tokens)
                if self._scale == 1.0
                else -(-trainer.max_tokens * self.epoch_steps // self.epoch_tokens)
            )
        elif trainer.max_minutes is not None:
            return trainer.max_steps
        else:
            found = trainer.epochs * self.epoch_steps
        return found if trainer.max_steps is None else min(found, trainer.max_steps)

    @property
    def passes(self) -> float | None:
        """Passes over the data."""
        return None if self.steps is None else self.steps / max(1, self.epoch_steps)
