"""Answers by the loaded target through our own decoder, with or without a head."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from specdraft.data._config import DataConfig
from specdraft.data.answering import Job
from specdraft.data.journal import EOS, LENGTH, Answer
from specdraft.decode._sampling_config import SamplingConfig
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.result import BatchError, DecodeResult

WINDOW_BATCHES = 16
"""Batches of prompts that are handed to the decoder at a time; only at the end of a window do places stay empty."""


class DecoderWriter:
    """Writes answers with ``decoder``: greedy ones are those of plain decoding, draws have its distribution.

    A draw depends on its own seed, whatever it is batched with.
    """

    def __init__(self, decoder: SpeculativeDecoder, config: DataConfig) -> None:
        self.decoder = decoder
        self.config = config

    @property
    def max_length(self) -> int:
        """The target's context."""
        return self.decoder.target.spec.max_position_embeddings

    def write(self, jobs: Sequence[Job]) -> Generator[list[Answer], None, None]:
        """See AnswerWriter. The longest prompts come first, so that memory runs out at once or never.

        Raises:
            DecodeError: target or head gave NaN for some; the others were written.
        """
        order = sorted(jobs, key=lambda job: (-len(job.prompt_ids), job.conversation, job.sample))
        size = self.config.generate_batch_size
        window = size * WINDOW_BATCHES
        for start in range(0, len(order), window):
            yield from self._window(order[start : start + window], size)

    def _window(self, jobs: Sequence[Job], size: int) -> Generator[list[Answer], None, None]:
        results: list[DecodeResult] = []
        steps = self.decoder.stream_batch(
            [job.prompt_ids for job in jobs],
            self.config.max_new_tokens,
            sampling=[SamplingConfig(temperature=job.temperature, seed=job.seed) for job in jobs],
            max_batch_size=size,
            results=results,
        )
        done: list[Answer] = []
        failed: BatchError | None = None
        try:
            for place, _ in steps:
                reason = results[place].finish_reason
                if reason:
                    done.append(jobs[place].answer(results[place].tokens, EOS if reason == "eos" else LENGTH))
                if len(done) >= size:
                    yield done
                    done = []
        except BatchError as error:
            failed = error
        if done:
            yield done
        if failed is not None:
            raise failed
