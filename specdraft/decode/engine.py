"""The decoding loop: draft, one target forward over the tree, accept, commit. Without a draft it is plain decoding."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdraft.core.errors import ConfigError, DataError
from specdraft.core.tree import DraftTree, GrownTree
from specdraft.decode._sampling_config import SamplingConfig
from specdraft.decode.batch import Batch, Waiting
from specdraft.decode.batch_cache import BatchCache
from specdraft.decode.cache import KVCache
from specdraft.decode.judge import GreedyJudge, Judge, RuledJudge
from specdraft.decode.plan import TreePlan
from specdraft.decode.proposers import Proposer, verifier_in_use
from specdraft.decode.result import BatchError, DecodeResult, StepOutput
from specdraft.decode.row import NO_TREE, Limits, Row
from specdraft.decode.sampling import LogitsRules
from specdraft.decode.verify import siblings_of
from specdraft.decode.words import StopFinder, bad_word_ids
from specdraft.targets.base import Target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CAPACITY_STEP = 256
"""Caches are made in multiples of this many rows, so that the next, slightly longer row can use the same one."""
MAX_PLANS = 64


class SpeculativeDecoder:
    """Decoding of one row or a batch of them with a target and, unless ``proposer`` is None, a proposer.

    Greedy text is the target's own: a drafted token is emitted only where the target chose the same. Drawn text has the
    distribution of plain sampling, and with drafts that are not drawn it is that of plain sampling with the same seed;
    the exception is the verifier ``typical``, which ``DecodeResult.lossless`` tells.
    A decoder may run several streams at a time; each has its own cache, and a finished one is used again.

    Args:
        target: decoded.
        proposer: drafts; None = plain decoding.
        tokenizer: of the target, for settings that name texts (``stop``, ``bad_words``).
        prefill_chunk: tokens of a prompt that go through the target at a time, which bounds the memory of a long one;
            None = all.

    Raises:
        ConfigError: ``prefill_chunk`` is below 1.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        prefill_chunk: int | None = None,
    ) -> None:
        if prefill_chunk is not None and prefill_chunk < 1:
            raise ConfigError(f"prefill_chunk: must be at least 1 or None, got {prefill_chunk}; use e.g. 512")
        self.target = target
        self.proposer = proposer
        self.tokenizer = tokenizer
        self.prefill_chunk = prefill_chunk
        self._idle: KVCache | None = None
        self._idle_batch: BatchCache | None = None
        self._plans: dict[tuple[DraftTree, int], TreePlan] = {}

    def generate(
        self,
        input_ids: list[int] | Tensor,
        max_new_tokens: int,
        eos_token_ids: Collection[int] | None = None,
        ignore_eos: bool = False,
        trace: bool = False,
        sampling: SamplingConfig | None = None,
    ) -> DecodeResult:
        """Decodes one row to its end.

        Args:
            input_ids: the prompt, a list or ``[1, P]`` int64, at least one token.
            max_new_tokens: tokens generated at most, the EOS included.
            eos_token_ids: tokens that end the text; None = the target's.
            ignore_eos: no token ends the text.
            trace: also record ``first_margins``, by the target's own logits.
            sampling: temperature, penalties, verifier and so on; None = greedy.

        Raises:
            DataError: the prompt is empty or leaves no room in the target's context.
            ConfigError: ``max_new_tokens`` is below 1, or ``sampling`` does not fit the target or the drafts.
            DecodeError: target or head gave NaN, or every token is forbidden.
        """
        options = _Options(self._eos(eos_token_ids, ignore_eos), trace, sampling or SamplingConfig())
        result = DecodeResult()
        prompt = self._prompt(input_ids)
        for _ in self._steps(prompt, self._row(prompt, max_new_tokens, options, result)):
            pass
        return result

    def stream(
        self,
        input_ids: list[int] | Tensor,
        max_new_tokens: int,
        eos_token_ids: Collection[int] | None = None,
        ignore_eos: bool = False,
        sampling: SamplingConfig | None = None,
        result: DecodeResult | None = None,
    ) -> Iterator[StepOutput]:
        """The steps of ``generate`` as they come; closing the iterator ends decoding.

        What is wrong with prompt or settings is raised at once, DecodeError by the step that finds it. ``result``, a new
        one, grows with the steps.
        """
        options = _Options(self._eos(eos_token_ids, ignore_eos), False, sampling or SamplingConfig())
        prompt = self._prompt(input_ids)
        return self._steps(prompt, self._row(prompt, max_new_tokens, options, result or DecodeResult()))

    def generate_batch(
        self,
        prompts: Sequence[list[int]],
        max_new_tokens: int | Sequence[int],
        eos_token_ids: Collection[int] | None = None,
        ignore_eos: bool = False,
        trace: bool = False,
        sampling: SamplingConfig | Sequence[SamplingConfig] | None = None,
        max_batch_size: int | None = None,
    ) -> list[DecodeResult]:
        """Decodes many rows together; each gets the text it has alone, whatever the others are.

        Args:
            prompts: token ids, at least one each; of any lengths.
            max_new_tokens: of each row, one number for all or one a row.
            eos_token_ids: tokens that end a text; None = the target's.
            ignore_eos: no token ends a text.
            trace: also record ``first_margins``.
            sampling: one for all, of which row i adds i to the seed, or one a row; None = greedy.
            max_batch_size: rows decoded at a time, the others wait for one to end; None = all.

        Returns:
            One result a prompt, in their order.

        Raises:
            DataError, ConfigError: as ``generate``, before anything is decoded.
            BatchError: rows failed as ``generate`` fails with DecodeError; it holds the results of all rows.
        """
        waiting, num_slots = self._waiting(
            prompts, max_new_tokens, self._eos(eos_token_ids, ignore_eos), trace, sampling, max_batch_size
        )
        for _ in self._batch_steps(waiting, num_slots):
            pass
        return [new.row.result for new in waiting]

    def stream_batch(
        self,
        prompts: Sequence[list[int]],
        max_new_tokens: int | Sequence[int],
        eos_token_ids: Collection[int] | None = None,
        ignore_eos: bool = False,
        sampling: SamplingConfig | Sequence[SamplingConfig] | None = None,
        max_batch_size: int | None = None,
        results: list[DecodeResult] | None = None,
    ) -> Iterator[tuple[int, StepOutput]]:
        """The steps of ``generate_batch`` as they come, each with the place of its row among ``prompts``.

        Closing the iterator ends decoding of all rows. What is wrong with prompts or settings is raised at once,
        BatchError when the rows that did not fail have ended. ``results``, an empty list, gets a result a prompt; they
        grow with the steps, and a row whose result has a ``finish_reason`` has ended.
        """
        waiting, num_slots = self._waiting(
            prompts, max_new_tokens, self._eos(eos_token_ids, ignore_eos), False, sampling, max_batch_size
        )
        if results is not None:
            results += [new.row.result for new in waiting]
        return self._batch_steps(waiting, num_slots)

    def _waiting(
        self,
        prompts: Sequence[list[int]],
        max_new_tokens: int | Sequence[int],
        eos: frozenset[int],
        trace: bool,
        sampling: SamplingConfig | Sequence[SamplingConfig] | None,
        max_batch_size: int | None,
    ) -> tuple[list[Waiting], int]:
        """The rows of a batch, in the order of their prompts, and how many are decoded at a time."""
        configs = _one_a_row(sampling, len(prompts))
        lengths = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
        if not len(prompts) == len(lengths) == len(configs):
            raise ConfigError(
                f"generate_batch: max_new_tokens and sampling need one entry a prompt, got {len(lengths)} and "
                f"{len(configs)} for {len(prompts)} prompts"
            )
        waiting = []
        for i, ids in enumerate(prompts):
            prompt = self._prompt(ids, f"prompts[{i}]")
            row = self._row(prompt, lengths[i], _Options(eos, trace, configs[i]), DecodeResult())
            waiting.append(Waiting(i, prompt, row))
        if max_batch_size is not None and max_batch_size < 1:
            raise ConfigError(f"max_batch_size: must be at least 1 or None, got {max_batch_size}; use e.g. 8")
        return waiting, min(max_batch_size or len(prompts), len(prompts))

    def _batch_steps(self, waiting: list[Waiting], num_slots: int) -> Iterator[tuple[int, StepOutput]]:
        """Decodes the rows. Raises BatchError at the end if some failed."""
        if not waiting:
            return
        longest = max(new.prompt.shape[1] + new.row.limits.room for new in waiting)
        needed = longest + (len(self.proposer.tree) if self.proposer else 0)
        cache, self._idle_batch = self._idle_batch, None
        if cache is None or cache.capacity < needed or cache.num_slots < num_slots:
            capacity = -(-needed // CAPACITY_STEP) * CAPACITY_STEP
            cache = BatchCache(self.target.spec.num_hidden_layers, capacity, num_slots)
        batch = Batch(self.target, cache, self.plan, num_slots, self.prefill_chunk)
        try:
            yield from batch.run(waiting)
        except GeneratorExit:
            self._put_back(cache)
            raise
        # Not after an error inside a step, which may leave anything in the slots.
        self._put_back(cache)
        if batch.errors:
            raise BatchError(batch.errors, [new.row.result for new in waiting])

    def _put_back(self, cache: BatchCache) -> None:
        cache.reset()
        self._idle_batch = cache

    def _eos(self, eos_token_ids: Collection[int] | None, ignore_eos: bool) -> frozenset[int]:
        """The tokens that end the text."""
        if ignore_eos:
            return frozenset()
        return frozenset(self.target.spec.eos_token_ids if eos_token_ids is None else eos_token_ids)

    def _prompt(self, input_ids: list[int] | Tensor, name: str = "prompt") -> Tensor:
        """``[1, P]`` int64 on the target's device."""
        ids = torch.as_tensor(input_ids, dtype=torch.int64)
        if ids.dim() == 2 and ids.shape[0] != 1:
            raise DataError(f"{name}: one row is decoded at a time, got {ids.shape[0]}; decode the rows one by one")
        if not ids.numel():
            raise DataError(f"{name}: must hold at least one token, got none; start it with the BOS token")
        # Mostly they lie on the host already.
        values, size = ids.cpu().numpy(), self.target.spec.vocab_size
        if values.min() < 0 or values.max() >= size:
            wrong = values[(values < 0) | (values >= size)][0]
            raise DataError(f"{name}: token ids must lie in 0..{size - 1}, got {wrong}; use the target's tokenizer")
        limit = self.target.spec.max_position_embeddings
        if ids.numel() >= limit:
            raise DataError(f"{name}: leaves no room in a context of {limit} tokens, got {ids.numel()}; shorten it")
        return ids.reshape(1, -1).to(self.target.device)

    def _row(self, prompt: Tensor, max_new_tokens: int, options: _Options, result: DecodeResult) -> Row:
        """What decodes ``prompt``; raises what is wrong with the settings."""
        if max_new_tokens < 1:
            raise ConfigError(f"decode.max_new_tokens: must be at least 1, got {max_new_tokens}; use e.g. 128")
        context = self.target.spec.max_position_embeddings - prompt.shape[1]
        room, at_room = min(max_new_tokens, context), "length" if max_new_tokens <= context else "context"
        stops = StopFinder(options.sampling.stop, self.tokenizer)
        judge = self._judge(prompt[0], options)
        result.verifier = verifier_in_use(options.sampling, self.proposer)
        result.lossless = self.proposer is None or options.sampling.is_lossless
        limits = Limits(room, at_room, options.eos, stops)
        return Row(self.target, self.proposer, limits, judge, options.trace, result)

    def _judge(self, prompt: Tensor, options: _Options) -> Judge:
        """What decides the steps of a row."""
        sampling = options.sampling
        if sampling.is_plain_greedy:
            return GreedyJudge()
        if sampling.verifier == "block" and self.proposer is not None and not self.proposer.tree.is_chain:
            raise ConfigError("sampling.verifier: block takes a chain, got block for a tree; use auto")
        if sampling.samples_drafts and self.proposer is not None and self.proposer.draws:
            siblings_of(self.proposer.tree, self.target.device)
        rules = None
        if sampling.shapes_logits:
            words = bad_word_ids(sampling, self.tokenizer)
            rules = LogitsRules(sampling, words, self.target.spec.vocab_size, options.eos, prompt)
        return RuledJudge(sampling, rules, self.target.device)

    def _steps(self, prompt: Tensor, row: Row) -> Iterator[StepOutput]:
        cache = self._take_cache(prompt.shape[1] + row.limits.room)
        try:
            yield row.prefill(prompt, cache, self.plan(NO_TREE, cache.capacity), self.prefill_chunk)
            while not row.result.finish_reason:
                yield self._step(row, cache)
        finally:
            cache.reset()
            self._idle = cache

    @torch.inference_mode()
    def _step(self, row: Row, cache: KVCache) -> StepOutput:
        """Drafts, runs the target once, and emits what it accepted and the target's own next token.

        Inference mode is entered in every step and never held across a yield, where it would leak into the caller's code.
        """
        begin = perf_counter()
        proposal = row.propose()
        drafted = perf_counter()
        length = cache.length
        plan = self.plan(NO_TREE if proposal is None else proposal.tree, cache.capacity)
        tokens = row.root if proposal is None else torch.cat([row.root, proposal.tokens[0]])
        positions, (full, sliding) = plan.positions(length), plan.masks(length)
        prepared = perf_counter()
        features = self.target.forward_cached(tokens[None], positions, full, sliding, cache, row.request)
        logits = self.target.logits(features.last_hidden[0])
        ran = perf_counter()
        verdict = row.judge(plan, tokens, logits, proposal)
        rows = plan.path_rows[verdict.row]
        cache.commit(rows, plan.paths[verdict.row, : len(rows)])
        verified = perf_counter()
        output = row.accept(plan, verdict, features, logits, length)
        end = perf_counter()
        times = row.result.time_ms
        times["draft"] += 1e3 * (drafted - begin)
        times["target"] += 1e3 * (ran - prepared)
        times["verify"] += 1e3 * (verified - ran)
        times["other"] += 1e3 * (prepared - drafted + end - verified)
        return output

    def _take_cache(self, max_length: int) -> KVCache:
        """The idle cache if it is large enough for a row and a tree, else a new one."""
        needed = max_length + (len(self.proposer.tree) if self.proposer else 0)
        cache, self._idle = self._idle, None
        if cache is None or cache.capacity < needed:
            capacity = -(-needed // CAPACITY_STEP) * CAPACITY_STEP
            cache = KVCache(self.target.spec.num_hidden_layers, capacity)
        return cache

    def plan(self, tree: DraftTree | GrownTree, capacity: int) -> TreePlan:
        """What a forward over ``tree`` needs; of a fixed tree it is kept for the next step."""
        if isinstance(tree, GrownTree):
            return self._new_plan(tree, capacity)
        plan = self._plans.get((tree, capacity))
        if plan is None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = self._plans[tree, capacity] = self._new_plan(tree, capacity)
        return plan

    def _new_plan(self, tree: DraftTree | GrownTree, capacity: int) -> TreePlan:
        has_full = "full_attention" in self.target.layer_types
        return TreePlan(tree, capacity, self.target.sliding_window, has_full, self.target.device)


@dataclass(frozen=True)
class _Options:
    """What a caller asked for, besides the length."""

    eos: frozenset[int]
    trace: bool
    sampling: SamplingConfig


def _one_a_row(sampling: SamplingConfig | Sequence[SamplingConfig] | None, count: int) -> list[SamplingConfig]:
    """The settings of every row; of one for all each row gets a seed of its own."""
    if sampling is None or isinstance(sampling, SamplingConfig):
        config = sampling or SamplingConfig()
        return [replace(config, seed=config.seed + i) for i in range(count)]
    return list(sampling)
