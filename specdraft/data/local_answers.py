"""Answers by the loaded target through its own ``generate``, in batches: of prepare() without a make_writer."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from specdraft.core.errors import ConfigError
from specdraft.data._config import DataConfig
from specdraft.data.answering import AnswerWriter, Job, MakeWriter, cut
from specdraft.data.chat import ChatRenderer, pad_token_id
from specdraft.data.journal import Answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specdraft.targets.hf import HFTarget


class TargetWriter:
    """Writes answers with the target's own ``generate``; draws depend on the seed of a batch's first job."""

    def __init__(self, target: HFTarget, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
        self.target = target
        self.config = config
        self.eos = frozenset(target.spec.eos_token_ids)
        self.pad = pad_token_id(tokenizer)

    @property
    def max_length(self) -> int:
        """The target's context."""
        return self.target.spec.max_position_embeddings

    def write(self, jobs: Sequence[Job]) -> Generator[list[Answer], None, None]:
        """See AnswerWriter. The longest prompts come first, so that memory runs out at once or never."""
        order = sorted(jobs, key=lambda job: (job.temperature, -len(job.prompt_ids), job.conversation, job.sample))
        size = self.config.generate_batch_size
        for temperature, group in groupby(order, key=lambda job: job.temperature):
            same = list(group)
            for start in range(0, len(same), size):
                yield self._batch(same[start : start + size], temperature)

    @torch.no_grad()
    def _batch(self, batch: Sequence[Job], temperature: float) -> list[Answer]:
        longest = max(len(job.prompt_ids) for job in batch)
        # Padding on the left: the next token follows the last column in every row.
        ids = torch.tensor([[self.pad] * (longest - len(job.prompt_ids)) + job.prompt_ids for job in batch])
        mask = torch.tensor([[0] * (longest - len(job.prompt_ids)) + [1] * len(job.prompt_ids) for job in batch])
        device = self.target.device
        model: Any = self.target.model
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(batch[0].seed)
            output = model.generate(
                input_ids=ids.to(device), attention_mask=mask.to(device), generation_config=self._settings(temperature)
            )
        # Behind an EOS stands padding.
        answers = output[:, longest:].tolist()
        return [job.answer(*cut(new, self.eos)) for job, new in zip(batch, answers, strict=True)]

    def _settings(self, temperature: float) -> GenerationConfig:
        """Spelled out, because generate() fills what is unset from the checkpoint, which can hold penalties and top-k."""
        sampled = temperature > 0
        return GenerationConfig(
            do_sample=sampled,
            temperature=temperature if sampled else 1.0,
            top_k=0 if sampled else None,
            top_p=1.0,
            typical_p=1.0,
            min_p=0.0 if sampled else None,
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            max_new_tokens=self.config.max_new_tokens,
            eos_token_id=sorted(self.eos) or None,
            pad_token_id=self.pad,
            use_cache=True,
        )


def choose_writer(
    config: DataConfig, renderer: ChatRenderer, target: HFTarget | None, make_writer: MakeWriter | None
) -> AnswerWriter:
    """What ``make_writer`` makes; without one, the target by itself.

    Raises:
        ConfigError: the settings want another writer and there is nothing to make it.
    """
    if make_writer is not None:
        return make_writer(renderer)
    if target is None or config.answers.by != "target" or config.answers.head is not None:
        raise ConfigError(
            f"data.answers: is more than the target by itself, got by={config.answers.by} head={config.answers.head}; "
            "give prepare() a make_writer"
        )
    return TargetWriter(target, renderer.tokenizer, config)
