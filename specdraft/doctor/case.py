"""What the checks look at: the target, a sample of the data, the head, and what is made of them once for several checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdraft.data.chat import ChatRenderer, TokenRow
from specdraft.data.formats import Message
from specdraft.data.sources import Conversation
from specdraft.doctor.overfit import Overfit, overfit
from specdraft.heads.base import DraftHead
from specdraft.plan.forecast import Forecast, forecast
from specdraft.plan.job import Job
from specdraft.targets.hf import HFTarget


@dataclass
class Case:
    """One user's target, data and head.

    rows: the sample as it would be trained on. conversations: those the sample was made of. dropped: conversations of
    the sample that became no row, by reason. head: untrained, its draft vocabulary chosen, initialised from the target.
    scratch: a folder that the checks may fill. resident: memory of the process before the target
    was loaded, None = as it is now. overfit_steps, overfit_seconds: limits of learning one text by heart.
    """

    job: Job
    target: HFTarget
    rows: list[TokenRow]
    conversations: list[Conversation]
    dropped: dict[str, int]
    head: DraftHead
    scratch: Path
    seed: int = 0
    resident: float | None = None
    overfit_steps: int = 300
    overfit_seconds: float = 90.0
    notes: dict[str, Any] = field(default_factory=dict)
    """Figures that one check leaves for the page: ``row_scores``, the mean log-probability of every row's answer."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's."""
        assert self.target.tokenizer is not None
        return self.target.tokenizer

    @cached_property
    def renderer(self) -> ChatRenderer:
        """As the data is rendered."""
        data = self.job.data
        return ChatRenderer(self.tokenizer, system=data.system, enable_thinking=data.enable_thinking)

    @cached_property
    def end_ids(self) -> set[int]:
        """Tokens that end an answer: the target's EOS and the template's end of turn."""
        return {*self.target.spec.eos_token_ids, *self.renderer.end_of_turn_ids[:1]}

    @cached_property
    def forecast(self) -> Forecast:
        """What the run will take, from its settings."""
        return forecast(self.job, tokenizer=self.tokenizer, resident=self.resident)

    @cached_property
    def overfitted(self) -> Overfit:
        """A head of the settings that has learned one text of the target by heart, or failed to."""
        prompt = self.prompt_of(self.rows[0])
        return overfit(self, prompt)

    def prompt_of(self, row: TokenRow) -> list[int]:
        """The tokens before the first supervised one, all but one where nothing is supervised."""
        start = row.loss_mask.index(True) if any(row.loss_mask) else len(row.input_ids) - 1
        return row.input_ids[: max(start, 1)]

    def render(self, messages: Sequence[Message], *, prompt: bool) -> str:
        """Text of the chat template by the tokenizer itself, not by the code that made the rows."""
        text = self.tokenizer.apply_chat_template(
            self._typed(messages), tokenize=False, add_generation_prompt=prompt, **self._template_words
        )
        assert isinstance(text, str)
        return text

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Ids that decoding starts from, by the tokenizer itself."""
        found: Any = self.tokenizer.apply_chat_template(
            self._typed(messages),
            tokenize=True,
            return_dict=True,
            add_generation_prompt=True,
            **self._template_words,
        )
        return list(found["input_ids"])

    @property
    def _template_words(self) -> dict[str, Any]:
        chosen = self.job.data.enable_thinking
        return {} if chosen is None else {"enable_thinking": chosen}

    def _typed(self, messages: Sequence[Message]) -> list[dict[str, str]]:
        system = self.job.data.system
        listed: list[dict[str, str]] = [{k: str(v or "") for k, v in message.items()} for message in messages]
        if system is not None and not any(message["role"] == "system" for message in listed):
            listed = [{"role": "system", "content": system}, *listed]
        return listed
