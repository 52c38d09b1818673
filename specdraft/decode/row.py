"""One row being decoded: what it drafts, emits and counts. The forwards of its steps are the decoder's or the batch's."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from specdraft.core.tree import DraftTree, Proposal
from specdraft.core.types import DraftContext, FeatureRequest, Features
from specdraft.decode.cache import KVCache
from specdraft.decode.judge import Judge, Verdict
from specdraft.decode.plan import TreePlan, chunk_masks
from specdraft.decode.proposers import AttentiveProposer, Proposer
from specdraft.decode.result import DecodeResult, StepOutput
from specdraft.decode.words import StopFinder
from specdraft.targets.base import Target

NO_TREE = DraftTree((), ())


@dataclass(frozen=True)
class Limits:
    """When a row ends: after ``room`` tokens, for the reason ``at_room``, at one of ``eos``, or at a text of ``stops``."""

    room: int
    at_room: str
    eos: frozenset[int]
    stops: StopFinder


class Row:
    """One row being decoded: ``prefill``, then in every step ``propose``, a forward from outside, and ``accept``.

    Args:
        target: runs the prompt.
        proposer: drafts; None = plain decoding.
        limits: when the row ends.
        judge: decides its steps.
        trace: also record ``first_margins``.
        result: grows with the row.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None,
        limits: Limits,
        judge: Judge,
        trace: bool,
        result: DecodeResult,
    ) -> None:
        self.target = target
        self.proposer = proposer
        self.request = proposer.features() if proposer else FeatureRequest()
        self.limits = limits
        self.judge = judge
        self.trace = trace
        self.result = result
        self.state: Any = None
        self.root = torch.empty(0, dtype=torch.int64)
        self.context: DraftContext | None = None

    @torch.inference_mode()
    def prefill(self, prompt: Tensor, cache: KVCache, plan: TreePlan, chunk: int | None) -> StepOutput:
        """Runs the prompt ``[1, P]`` into the empty ``cache`` and emits the first token.

        plan: of a step without a draft. chunk: tokens of the prompt run at a time; None = all.
        """
        begin = perf_counter()
        length = prompt.shape[1]
        if self.proposer:
            self.state = self.proposer.begin(length + self.limits.room)
        features = self._run(prompt, cache, chunk or length)
        logits = self.target.logits(features.last_hidden[0, -1:])
        verdict = self.judge(plan, prompt[0, -1:], logits, None)
        self.root = verdict.following
        following = torch.cat([prompt[:, 1:], self.root[None]], dim=1)
        new_ids = [*prompt[0].tolist(), *verdict.emitted] if self.proposer else []
        self.context = DraftContext(following, features, 0, new_ids, self.judge.sampler)
        self._margins(logits, plan.paths[0], 1)
        output = self._emit(verdict.emitted, 0)
        self.result.time_ms["prefill"] += 1e3 * (perf_counter() - begin)
        return output

    def _run(self, prompt: Tensor, cache: KVCache, chunk: int) -> Features:
        """The states of the prompt, committed ``chunk`` tokens at a time."""
        found: list[Features] = []
        has_full = "full_attention" in self.target.layer_types
        for tokens in prompt.split(chunk, dim=1):
            start, count = cache.length, tokens.shape[1]
            positions = torch.arange(start, start + count, device=prompt.device)[None]
            # Into an empty cache the target's own mask is cheaper, or none at all.
            masks: tuple[Tensor | None, Tensor | None] = (None, None)
            if start:
                masks = chunk_masks(start, count, self.target.sliding_window, has_full, prompt.device)
            found.append(self.target.forward_cached(tokens, positions, *masks, cache, self.request))
            cache.commit(range(count))
        return found[0] if len(found) == 1 else Features.concatenate(found)

    @property
    def max_depth(self) -> int:
        """How deep the next draft may be: the step adds one token of the target's own to what it accepts."""
        return self.limits.room - len(self.result.tokens) - 1

    def propose(self) -> Proposal | None:
        """A draft of at most ``max_depth``, or None."""
        if self.proposer is None or self.context is None or self.max_depth < 1:
            return None
        return self.check(self.proposer.propose(self.state, self.context, self.max_depth))

    def check(self, proposal: Proposal | None) -> Proposal | None:
        """The proposal, if it is as deep as it may be; ValueError tells a faulty proposer."""
        if proposal is not None and not 1 <= proposal.tree.max_depth <= self.max_depth:
            raise ValueError(
                f"the proposer drafted {proposal.tree.max_depth} deep where 1 to {self.max_depth} was asked for"
            )
        return proposal

    def accept(self, plan: TreePlan, verdict: Verdict, features: Features, logits: Tensor, length: int) -> StepOutput:
        """Takes in a step's outcome, emits its tokens and counts them.

        Args:
            plan: the step's tree.
            verdict: what the judge decided on it.
            features: ``[1, N+1, ...]`` of the target over the tree; padding behind it is not read.
            logits: ``[N+1, V]`` of the target.
            length: tokens committed before the step.
        """
        rows = plan.path_rows[verdict.row]
        path = plan.paths[verdict.row, : len(rows)]
        self._margins(logits, path, len(rows))
        output = self._emit(verdict.emitted, len(rows) - 1)
        self._count(plan, verdict.row, output)
        self.root = verdict.following[-1:]
        if self.proposer:
            self.context = DraftContext(
                verdict.following[None], features.select(path), length, verdict.emitted, self.judge.sampler
            )
        return output

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
        if self.result.finish_reason and isinstance(self.proposer, AttentiveProposer):
            self.proposer.finish(self.state, self.result.tokens)
        del self.result.first_margins[len(self.result.tokens) :]
        return StepOutput(tokens, min(num_accepted, len(tokens)))

    def _count(self, plan: TreePlan, row: int, output: StepOutput) -> None:
        """Enters the step that accepted ``row`` into the counts."""
        whole = len(output.tokens) == len(plan.path_rows[row])
        tested = output.num_accepted + (1 if whole and plan.has_children[row] else 0)
        self.result.count_step(plan.size - 1, output.num_accepted, tested)

    def _margins(self, logits: Tensor, path: Tensor, count: int) -> None:
        """Records the distance between the two best logits after each of the ``count`` rows of ``path``."""
        if self.trace:
            best = logits.index_select(0, path[:count]).float().topk(2, dim=-1).values
            self.result.first_margins += (best[:, 0] - best[:, 1]).tolist()
