"""What writes answers, as the regeneration sees it: jobs in, answers out, in whatever order they are done."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from specdraft.data._config import DataConfig
from specdraft.data.chat import ChatRenderer
from specdraft.data.formats import Message
from specdraft.data.journal import EOS, LENGTH, Answer

if TYPE_CHECKING:
    from specdraft.targets.hf import HFTarget


@dataclass(frozen=True)
class Job:
    """One answer to write. messages: what ``prompt_ids`` were rendered of. temperature: 0 = greedy. seed: of its draws."""

    conversation: str
    turn: int
    sample: int
    messages: list[Message]
    prompt_ids: list[int]
    temperature: float
    seed: int

    def answer(self, ids: list[int], finish: str, ids_from: str = "target") -> Answer:
        """The answer to it."""
        return Answer(
            self.conversation, self.turn, self.prompt_ids, ids, self.sample, finish, self.temperature, ids_from
        )


class AnswerWriter(Protocol):
    """The target in one of its places: loaded here, with or without a head, behind servers, or in an engine."""

    @property
    def max_length(self) -> int:
        """Tokens of prompt and answer together."""
        ...

    def write(self, jobs: Sequence[Job]) -> Generator[list[Answer], None, None]:
        """Answers as they are done, each job's once; what is yielded is saved before the generator is asked again.

        Closing the generator ends the work.

        Raises:
            DataError: some jobs cannot be answered now; the others were.
        """
        ...


MakeWriter = Callable[[ChatRenderer], AnswerWriter]
"""Makes the writer of a run when answers are needed: a target behind servers is not asked for data that is there."""


def temperature_of(config: DataConfig, conversation: str, sample: int) -> float:
    """What an answer is drawn at: one of the mix by its weights, the same whenever it is asked for.

    The greedy answer of a conversation is given to one of its samples at most.
    """
    mix = config.answers.temperatures or [config.temperature]
    weights = config.answers.weights or [1.0] * len(mix)
    generator = random.Random(_number(f"{config.seed}/temperature/{conversation}"))
    chosen = mix[0]
    for _ in range(sample + 1):
        (chosen,) = generator.choices(mix, weights)
        if chosen == 0.0 and len(mix) > 1:
            place = mix.index(0.0)
            mix, weights = mix[:place] + mix[place + 1 :], weights[:place] + weights[place + 1 :]
    return chosen


def seed_of(config: DataConfig, conversation: str, turn: int, sample: int) -> int:
    """Of the draws of an answer, in 0..2^31-1, which every engine takes."""
    return _number(f"{config.seed}/{turn}/{conversation}/{sample}") >> 33


def _number(text: str) -> int:
    """64 bits."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def cut(ids: Sequence[int], eos: frozenset[int]) -> tuple[list[int], str]:
    """The ids up to and including the first of ``eos``, and how they end."""
    end = next((i for i, token in enumerate(ids) if token in eos), None)
    return (list(ids), LENGTH) if end is None else (list(ids[: end + 1]), EOS)


def writer_identity(config: DataConfig, target: HFTarget | None) -> dict[str, Any]:
    """Of the loaded target, where it writes the answers; else nothing."""
    if config.answers.by != "target" or target is None:
        return {}
    return {"target": target.spec.fingerprint, "dtype": str(target.dtype).removeprefix("torch.")}


def answers_identity(config: DataConfig, writer: Mapping[str, Any]) -> dict[str, Any]:
    """All that decides regenerated answers besides tokenizer, template and prompts. writer: see ``writer_identity``."""
    drawn = max([config.temperature, *config.answers.temperatures]) > 0
    return {
        "by": "target",
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "seed": config.seed if drawn else None,
        **config.answers.identity(),
        **writer,
    }
