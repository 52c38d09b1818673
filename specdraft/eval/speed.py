"""Decoding timed from outside: a prompt or a batch of them both ways, in turns, by the same clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from transformers import PreTrainedTokenizerBase

from specdraft.decode._sampling_config import SamplingConfig
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.proposers import Proposer
from specdraft.decode.result import DecodeResult
from specdraft.targets.base import Target


@dataclass(frozen=True)
class TimedRun:
    """One decoded row and the wall-clock milliseconds it took, prefill included.

    Of a batch, ``wall_ms`` is the row's part: its own prefill, an equal part of every step it was in, and an equal part of
    the rest, so that the parts of all rows are the time of the batch.
    """

    result: DecodeResult
    wall_ms: float

    @property
    def prefill_ms(self) -> float:
        """Of which before the first token."""
        return self.result.time_ms["prefill"]


@dataclass(frozen=True)
class Pair:
    """One prompt decoded both ways by the same target in the same process."""

    plain: TimedRun
    speculative: TimedRun

    @property
    def identical(self) -> bool:
        """Whether both gave the same tokens."""
        return self.plain.result.tokens == self.speculative.result.tokens


class PairedDecoder:
    """Plain and speculative decoding of one target, measured in turns so that both see the same state of the machine.

    Args:
        target: decoded both ways.
        proposer: drafts for the second way; None = the second way is plain, too.
        max_new_tokens: per prompt, the EOS included.
        ignore_eos: decode to ``max_new_tokens`` whatever comes.
        sampling: what tokens are drawn from; every prompt has a seed of its own, its place added to the settings'.
        tokenizer: for settings that name texts.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None,
        max_new_tokens: int,
        ignore_eos: bool = False,
        sampling: SamplingConfig | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.target = target
        self.plain = SpeculativeDecoder(target, None, tokenizer)
        self.speculative = SpeculativeDecoder(target, proposer, tokenizer)
        self.sampling = sampling or SamplingConfig()
        self._num_prompts = 0
        self.max_new_tokens = max_new_tokens
        self.ignore_eos = ignore_eos
        self._count = 0

    def decode(self, prompts: Sequence[list[int]], repeats: int = 1) -> list[Pair]:
        """A batch both ways, ``repeats`` times; kept is the run of median time of each.

        Which way goes first alternates from one call and repeat to the next: whatever drifts hits both alike.
        """
        first = self.sampling.seed + self._num_prompts
        sampling = [replace(self.sampling, seed=first + i) for i in range(len(prompts))]
        self._num_prompts += len(prompts)
        plain: list[list[TimedRun]] = []
        speculative: list[list[TimedRun]] = []
        for _ in range(repeats):
            order = [(self.plain, plain), (self.speculative, speculative)]
            for decoder, runs in order if self._count % 2 == 0 else reversed(order):
                runs.append(self._timed(decoder, prompts, sampling))
            self._count += 1
        return [Pair(*runs) for runs in zip(_median(plain), _median(speculative), strict=True)]

    def margin(self, input_ids: list[int]) -> float:
        """How far the target's best logit is above its second after this text, run alone."""
        return self.plain.generate(input_ids, 1, ignore_eos=True, trace=True).first_margins[0]

    def _timed(
        self, decoder: SpeculativeDecoder, prompts: Sequence[list[int]], sampling: list[SamplingConfig]
    ) -> list[TimedRun]:
        synchronize(self.target.device)
        begin = perf_counter()
        if len(prompts) == 1:
            results = [
                decoder.generate(prompts[0], self.max_new_tokens, ignore_eos=self.ignore_eos, sampling=sampling[0])
            ]
        else:
            results = decoder.generate_batch(
                prompts, self.max_new_tokens, ignore_eos=self.ignore_eos, sampling=sampling
            )
        synchronize(self.target.device)
        wall_ms = 1e3 * (perf_counter() - begin)
        own = [sum(result.time_ms.values()) for result in results]
        rest = (wall_ms - sum(own)) / len(own)
        return [TimedRun(result, ms + rest) for result, ms in zip(results, own, strict=True)]


def _median(runs: list[list[TimedRun]]) -> list[TimedRun]:
    return sorted(runs, key=lambda batch: sum(run.wall_ms for run in batch))[(len(runs) - 1) // 2]


def synchronize(device: torch.device) -> None:
    """Waits until an accelerator has done what was asked of it; nothing to wait for on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
