"""Answers by the target inside vLLM in this process, where it is installed."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from specdraft.core.errors import ConfigError
from specdraft.data._config import DataConfig
from specdraft.data.answering import Job, cut
from specdraft.data.journal import Answer

if TYPE_CHECKING:
    from specdraft.targets.facts import TargetFacts

GROUP = 1024
"""Prompts that are handed over together; vLLM itself decides how many of them run at a time."""


class VllmWriter:
    """vLLM's offline engine on token ids: it needs neither a tokenizer nor a template.

    Args:
        config: the settings.
        facts: of the target, whose files vLLM loads itself.
        dtype: of the target's weights, as ``target.dtype`` names it; ``auto`` = that of the checkpoint.

    Raises:
        ConfigError: vLLM is not installed.
    """

    def __init__(self, config: DataConfig, facts: TargetFacts, dtype: str = "auto") -> None:
        try:
            import vllm
        except ImportError as error:
            raise ConfigError(
                "data.answers.by: vLLM is not installed here, got vllm; install it, or start `vllm serve` elsewhere and "
                "use data.answers.by=server"
            ) from error
        self._vllm: Any = vllm
        self.config = config
        self.facts = facts
        self.dtype = dtype
        self.eos = frozenset(facts.eos_token_ids)

    @property
    def max_length(self) -> int:
        """The target's context."""
        return self.facts.max_position_embeddings

    @cached_property
    def _engine(self) -> Any:
        return self._vllm.LLM(
            self.facts.source, revision=self.facts.revision, dtype=self.dtype, skip_tokenizer_init=True
        )

    def write(self, jobs: Sequence[Job]) -> Generator[list[Answer], None, None]:
        """See AnswerWriter."""
        for start in range(0, len(jobs), GROUP):
            group = jobs[start : start + GROUP]
            prompts = [{"prompt_token_ids": job.prompt_ids} for job in group]
            outputs = self._engine.generate(prompts, [self._sampling(job) for job in group], use_tqdm=False)
            texts = [list(output.outputs[0].token_ids) for output in outputs]
            yield [job.answer(*cut(ids, self.eos)) for job, ids in zip(group, texts, strict=True)]

    def _sampling(self, job: Job) -> Any:
        return self._vllm.SamplingParams(
            temperature=job.temperature,
            top_p=1.0,
            top_k=-1,
            min_p=0.0,
            repetition_penalty=1.0,
            seed=job.seed,
            max_tokens=self.config.max_new_tokens,
            stop_token_ids=sorted(self.eos),
            detokenize=False,
        )
