"""The decoding loop: draft, one target forward over the tree, accept, commit. Without a draft it is plain decoding."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdraft.core.errors import ConfigError, DataError
from specdraft.core.tree import DraftTree, GrownTree, Proposal
from specdraft.core.types import DraftContext, FeatureRequest, Features
from specdraft.decode._sampling_config import SamplingConfig
from specdraft.decode.cache import KVCache
from specdraft.decode.judge import GreedyJudge, Judge, RuledJudge, Verdict
from specdraft.decode.plan import TreePlan
from specdraft.decode.proposers import Proposer
from specdraft.decode.result import DecodeResult, StepOutput
from specdraft.decode.sampling import LogitsRules
from specdraft.decode.words import StopFinder, bad_word_ids
from specdraft.targets.base import Target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_TREE = DraftTree((), ())
CAPACITY_STEP = 256
"""Caches are made in multiples of this many rows, so that the next, slightly longer row can use the same one."""
MAX_PLANS = 64


class SpeculativeDecoder:
    """Decoding of one row at a time with a target and, unless ``proposer`` is None, a proposer.

    Greedy text is the target's own: a drafted token is emitted only where the target chose the same. Drawn text has the
    distribution of plain sampling, and with drafts that are not drawn it is that of plain sampling with the same seed;
    the exception is the verifier ``typical``, which ``DecodeResult.lossless`` tells.
    A decoder may run several streams at a time; each has its own cache, and a finished one is used again.

    Args:
        target: decoded.
        proposer: drafts; None = plain decoding.
        tokenizer: of the target, for settings that name texts (``stop``, ``bad_words``).
    """

    def __init__(
        self, target: Target, proposer: Proposer | None = None, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        self.target = target
        self.proposer = proposer
        self.tokenizer = tokenizer
        self._idle: KVCache | None = None
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
        for _ in self._run(self._prompt(input_ids), max_new_tokens, options, result):
            pass
        return result

    def stream(
        self,
        input_ids: list[int] | Tensor,
        max_new_tokens: int,
        eos_token_ids: Collection[int] | None = None,
        ignore_eos: bool = False,
        sampling: SamplingConfig | None = None,
    ) -> Iterator[StepOutput]:
        """The steps of ``generate`` as they come; closing the iterator ends decoding.

        What is wrong with prompt or settings is raised at once, DecodeError by the step that finds it.
        """
        options = _Options(self._eos(eos_token_ids, ignore_eos), False, sampling or SamplingConfig())
        return self._run(self._prompt(input_ids), max_new_tokens, options, DecodeResult())

    def _eos(self, eos_token_ids: Collection[int] | None, ignore_eos: bool) -> frozenset[int]:
        """The tokens that end the text."""
        if ignore_eos:
            return frozenset()
        return frozenset(self.target.spec.eos_token_ids if eos_token_ids is None else eos_token_ids)

    def _prompt(self, input_ids: list[int] | Tensor) -> Tensor:
        """``[1, P]`` int64 on the target's device."""
        ids = torch.as_tensor(input_ids, dtype=torch.int64)
        if ids.dim() == 2 and ids.shape[0] != 1:
            raise DataError(f"prompt: one row is decoded at a time, got {ids.shape[0]}; decode the rows one by one")
        if not ids.numel():
            raise DataError("prompt: must hold at least one token, got none; start it with the BOS token")
        limit = self.target.spec.max_position_embeddings
        if ids.numel() >= limit:
            raise DataError(f"prompt: leaves no room in a context of {limit} tokens, got {ids.numel()}; shorten it")
        return ids.reshape(1, -1).to(self.target.device)

    def _run(
        self, prompt: Tensor, max_new_tokens: int, options: _Options, result: DecodeResult
    ) -> Iterator[StepOutput]:
        if max_new_tokens < 1:
            raise ConfigError(f"decode.max_new_tokens: must be at least 1, got {max_new_tokens}; use e.g. 128")
        context = self.target.spec.max_position_embeddings - prompt.shape[1]
        room, at_room = min(max_new_tokens, context), "length" if max_new_tokens <= context else "context"
        stops = StopFinder(options.sampling.stop, self.tokenizer)
        limits = _Limits(room, at_room, options.eos, stops)
        judge = self._judge(prompt[0], options)
        result.verifier = options.sampling.resolved_verifier if self.proposer else None
        result.lossless = self.proposer is None or options.sampling.is_lossless
        return self._steps(prompt, limits, judge, options.trace, result)

    def _judge(self, prompt: Tensor, options: _Options) -> Judge:
        """What decides the steps of a row."""
        sampling = options.sampling
        if sampling.is_plain_greedy:
            return GreedyJudge()
        if sampling.verifier == "block" and self.proposer is not None and not self.proposer.tree.is_chain:
            raise ConfigError("sampling.verifier: block takes a chain, got block for a tree; use auto")
        rules = None
        if sampling.shapes_logits:
            words = bad_word_ids(sampling, self.tokenizer)
            rules = LogitsRules(sampling, words, self.target.spec.vocab_size, options.eos, prompt)
        return RuledJudge(sampling, rules, self.target.device)

    def _steps(
        self, prompt: Tensor, limits: _Limits, judge: Judge, trace: bool, result: DecodeResult
    ) -> Iterator[StepOutput]:
        cache = self._take_cache(prompt.shape[1] + limits.room)
        try:
            row = _Row(self, cache, limits, judge, trace, result)
            yield row.prefill(prompt)
            while not result.finish_reason:
                yield row.step()
        finally:
            cache.reset()
            self._idle = cache

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


@dataclass(frozen=True)
class _Limits:
    """When a row ends: after ``room`` tokens, for the reason ``at_room``, at one of ``eos``, or at a text of ``stops``."""

    room: int
    at_room: str
    eos: frozenset[int]
    stops: StopFinder


class _Row:
    """One row being decoded.

    Inference mode is entered in every step and never held across a yield, where it would leak into the caller's code.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        cache: KVCache,
        limits: _Limits,
        judge: Judge,
        trace: bool,
        result: DecodeResult,
    ) -> None:
        self.decoder = decoder
        self.target = decoder.target
        self.proposer = decoder.proposer
        self.request = self.proposer.features() if self.proposer else FeatureRequest()
        self.cache = cache
        self.limits = limits
        self.judge = judge
        self.trace = trace
        self.result = result
        self.state: Any = None
        self.root = torch.empty(0, dtype=torch.int64)
        self.context: DraftContext | None = None

    @torch.inference_mode()
    def prefill(self, prompt: Tensor) -> StepOutput:
        """Runs the prompt ``[1, P]`` and emits the first token."""
        begin = perf_counter()
        length = prompt.shape[1]
        if self.proposer:
            self.state = self.proposer.begin(length + self.limits.room)
        positions = torch.arange(length, device=prompt.device)[None]
        features = self.target.forward_cached(prompt, positions, None, None, self.cache, self.request)
        logits = self.target.logits(features.last_hidden[0, -1:])
        plan = self.decoder.plan(NO_TREE, self.cache.capacity)
        verdict = self.judge(plan, prompt[0, -1:], logits, None)
        self.cache.commit(range(length))
        self.root = verdict.following
        following = torch.cat([prompt[:, 1:], self.root[None]], dim=1)
        new_ids = [*prompt[0].tolist(), *verdict.emitted] if self.proposer else []
        self.context = DraftContext(following, features, 0, new_ids, self.judge.sampler)
        self._margins(logits, plan.paths[0], 1)
        output = self._emit(verdict.emitted, 0)
        self.result.time_ms["prefill"] += 1e3 * (perf_counter() - begin)
        return output

    @torch.inference_mode()
    def step(self) -> StepOutput:
        """Drafts, runs the target once, and emits what it accepted and the target's own next token."""
        begin = perf_counter()
        proposal = self._propose()
        drafted = perf_counter()
        length = self.cache.length
        plan = self.decoder.plan(NO_TREE if proposal is None else proposal.tree, self.cache.capacity)
        tokens = self.root if proposal is None else torch.cat([self.root, proposal.tokens[0]])
        positions, (full, sliding) = plan.positions(length), plan.masks(length)
        prepared = perf_counter()
        features = self.target.forward_cached(tokens[None], positions, full, sliding, self.cache, self.request)
        logits = self.target.logits(features.last_hidden[0])
        ran = perf_counter()
        verdict = self.judge(plan, tokens, logits, proposal)
        row = verdict.row
        rows, path = plan.path_rows[row], plan.paths[row, : len(plan.path_rows[row])]
        self.cache.commit(rows, path)
        verified = perf_counter()
        self._margins(logits, path, len(rows))
        output = self._emit(verdict.emitted, len(rows) - 1)
        self._count(plan, row, output)
        self._follow(verdict, features, path, length)
        end = perf_counter()
        times = self.result.time_ms
        times["draft"] += 1e3 * (drafted - begin)
        times["target"] += 1e3 * (ran - prepared)
        times["verify"] += 1e3 * (verified - ran)
        times["other"] += 1e3 * (prepared - drafted + end - verified)
        return output

    def _propose(self) -> Proposal | None:
        """A draft as deep as what may still be emitted allows: the step adds one token of the target's own to it."""
        max_depth = self.limits.room - len(self.result.tokens) - 1
        if self.proposer is None or self.context is None or max_depth < 1:
            return None
        proposal = self.proposer.propose(self.state, self.context, max_depth)
        if proposal is not None and not 1 <= proposal.tree.max_depth <= max_depth:
            raise ValueError(
                f"the proposer drafted {proposal.tree.max_depth} deep where 1 to {max_depth} was asked for"
            )
        return proposal

    def _emit(self, tokens: list[int], num_accepted: int) -> StepOutput:
        """Cuts ``tokens`` behind the first EOS or stop text, adds them to the result and notes whether the row ends."""
        ends = self.limits.eos
        stop = next((i for i, token in enumerate(tokens) if token in ends), None)
        reason = "eos"
        found = self.limits.stops.find(tokens)
        if found is not None and (stop is None or found < stop):
            stop, reason = found, "stop"
        if stop is not None:
            tokens = tokens[: stop + 1]
            self.result.finish_reason = reason
        self.result.tokens += tokens
        if stop is None and len(self.result.tokens) >= self.limits.room:
            self.result.finish_reason = self.limits.at_room
        del self.result.first_margins[len(self.result.tokens) :]
        return StepOutput(tokens, min(num_accepted, len(tokens)))

    def _count(self, plan: TreePlan, row: int, output: StepOutput) -> None:
        """Enters the step that accepted ``row`` into the counts."""
        whole = len(output.tokens) == len(plan.path_rows[row])
        tested = output.num_accepted + (1 if whole and plan.has_children[row] else 0)
        self.result.count_step(plan.size - 1, output.num_accepted, tested)

    def _follow(self, verdict: Verdict, features: Features, path: Tensor, length: int) -> None:
        """Sets the next step's root and, for a proposer, what this step committed from position ``length`` on."""
        self.root = verdict.following[-1:]
        if self.proposer:
            self.context = DraftContext(
                verdict.following[None], features.select(path), length, verdict.emitted, self.judge.sampler
            )

    def _margins(self, logits: Tensor, path: Tensor, count: int) -> None:
        """Records the distance between the two best logits after each of the ``count`` rows of ``path``."""
        if self.trace:
            best = logits.index_select(0, path[:count]).float().topk(2, dim=-1).values
            self.result.first_margins += (best[:, 0] - best[:, 1]).tolist()
