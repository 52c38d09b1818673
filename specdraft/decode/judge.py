"""What a row does with the target's logits: which drafts it keeps, and what it writes behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdraft.core.errors import DecodeError
from specdraft.core.tree import DraftTree, Proposal
from specdraft.core.types import DraftSampler
from specdraft.decode._sampling_config import SamplingConfig
from specdraft.decode.plan import TreePlan
from specdraft.decode.sampling import LogitsRules, RowRandom, WarpedSampler, draw, truncate
from specdraft.decode.verify import (
    Odds,
    accept_greedy,
    accept_typical,
    block_odds,
    sibling_odds,
    siblings_of,
    take_last,
    take_siblings,
)

TARGET_FAULT, RULES_FAULT, HEAD_FAULT = 1, 2, 4
FAULTS = {
    TARGET_FAULT: "target: its logits are not finite, got NaN or infinity in step {step}; load it in float32 or bfloat16",
    RULES_FAULT: "sampling: no token is left to choose, got all of them forbidden in step {step}; allow some in bad_words",
    HEAD_FAULT: "head: what it drafts from is not finite, got NaN or infinity in step {step}; train it again or load it in "
    "float32",
}


@dataclass(frozen=True)
class Verdict:
    """The outcome of a step.

    row: the deepest accepted row of the tree. emitted: the tokens along its path and the one behind them.
    following: the same on the device, ``[n]`` int64.
    """

    row: int
    emitted: list[int]
    following: Tensor


class Judge(Protocol):
    """Decides the steps of one row; the prefill is a step without a draft."""

    @property
    def sampler(self) -> DraftSampler | None:
        """With what drafts are to be drawn; None = the proposer's most likely tokens."""
        ...

    def __call__(self, plan: TreePlan, tokens: Tensor, logits: Tensor, proposal: Proposal | None) -> Verdict:
        """The outcome of a step, read from the device in one copy.

        Args:
            plan: the tree with its root.
            tokens: ``[N+1]`` int64, the root and the drafted tokens.
            logits: ``[N+1, V]`` of the target after each.
            proposal: where the drafted tokens come from; None without any.

        Raises:
            DecodeError: logits or draft are not finite, or every token is forbidden.
        """
        ...


class GreedyJudge:
    """The target's most likely token, by its own logits."""

    sampler: DraftSampler | None = None

    def __init__(self) -> None:
        self._step = 0

    def __call__(self, plan: TreePlan, tokens: Tensor, logits: Tensor, proposal: Proposal | None) -> Verdict:
        """See ``Judge``."""
        best, choices = logits.max(dim=-1)
        fault = _fault(best, proposal)
        row, emitted = _read(plan, tokens, choices, fault, self._step)
        self._step += 1
        path = plan.path_rows[row]
        if len(path) == choices.numel():
            return Verdict(row, emitted, choices)
        return Verdict(row, emitted, choices.index_select(0, plan.paths[row, : len(path)]))


class RuledJudge:
    """Any settings: logits shaped per node, then the most likely token or a draw, by the verifier of the settings.

    Args:
        config: the settings.
        rules: what shapes the row's logits; None where nothing does.
        device: of the target.
    """

    def __init__(self, config: SamplingConfig, rules: LogitsRules | None, device: torch.device) -> None:
        self._config = config
        self._rules = rules
        self._random = RowRandom(config.seed, device)
        self._step = 0
        self.sampler: DraftSampler | None = WarpedSampler(config, self._random) if config.samples_drafts else None

    def __call__(self, plan: TreePlan, tokens: Tensor, logits: Tensor, proposal: Proposal | None) -> Verdict:
        """See ``Judge``."""
        fault = _fault(logits.amax(dim=-1), proposal)
        scores = logits.float()
        if self._rules is not None:
            scores = self._rules(logits, tokens, plan)
            forbidden = ~scores.amax(dim=-1).isfinite().all()
            fault = torch.where((fault == 0) & forbidden, RULES_FAULT, fault)
        row, emitted = self._decide(plan, tokens, scores, proposal, fault)
        self._step += 1
        self._random.consume(len(emitted))
        following = torch.tensor(emitted, device=tokens.device)
        if self._rules is not None:
            self._rules.extend(following)
        return Verdict(row, emitted, following)

    def _decide(
        self, plan: TreePlan, tokens: Tensor, scores: Tensor, proposal: Proposal | None, fault: Tensor
    ) -> tuple[int, list[int]]:
        """The accepted row and what is written."""
        if self._config.is_greedy:
            return _read(plan, tokens, scores.argmax(dim=-1), fault, self._step)
        probs = truncate(scores, self._config).softmax(dim=-1)
        # A faulty distribution is reported below; until then it must not reach a kernel that asserts.
        if proposal is not None and self._config.verifier == "typical":
            row = accept_typical(plan, tokens, probs, self._config.typical_epsilon, self._config.typical_delta)
            return self._read_row(plan, tokens, row, probs.index_select(0, row[None]), fault)
        if proposal is None or proposal.probs is None:
            uniform = self._random.ahead(plan.tree.max_depth + 1)
            choices = draw(probs, uniform[plan.ranking - 1])
            return _read(plan, tokens, choices, fault, self._step)
        row, odds = self._odds(plan, tokens, probs, proposal.probs)
        return self._read_row(plan, tokens, row, odds.rest(row[None]), fault)

    def _odds(self, plan: TreePlan, tokens: Tensor, probs: Tensor, drafted: Tensor) -> tuple[Tensor, Odds]:
        """The accepted row of a draft that was drawn, and how it was decided."""
        tree = plan.tree
        if not isinstance(tree, DraftTree):
            raise TypeError(
                "a tree grown on the device holds no drawn tokens, but its proposal has their probabilities"
            )
        siblings = siblings_of(tree, tokens.device)
        drafted = drafted.index_select(0, siblings.source).to(probs.dtype)
        uniform = self._random.fresh(plan.size)
        if self._config.verifier == "block" and tree.is_chain:
            odds = block_odds(tokens, probs, drafted)
            return take_last(odds.accept, uniform), odds
        odds = sibling_odds(siblings, tokens, probs, drafted)
        return take_siblings(plan, siblings, odds.accept, uniform), odds

    def _read_row(
        self, plan: TreePlan, tokens: Tensor, row: Tensor, rest: Tensor, fault: Tensor
    ) -> tuple[int, list[int]]:
        """The row, the tokens of its path, and one drawn from the weights ``rest`` (``[1, V]``)."""
        bonus = draw(rest, self._random.fresh(1))
        path = tokens[plan.paths.index_select(0, row[None])[0]]
        accepted, code, following, *held = torch.cat([row[None], fault[None], bonus, path]).tolist()
        _check(code, self._step)
        return accepted, [*held[1 : len(plan.path_rows[accepted])], following]


def _fault(best: Tensor, proposal: Proposal | None) -> Tensor:
    """0-d int64: which of target and head gave what is not finite, 0 for neither. best: ``[N+1]``, the rows' maxima."""
    # The maximum of a row is NaN where one of it is, infinite where one is infinite or all are minus infinity.
    fault = (~best.isfinite().all()).long() * TARGET_FAULT
    if proposal is not None and proposal.finite is not None:
        fault = fault + (~proposal.finite).long() * HEAD_FAULT
    return fault


def _check(code: int, step: int) -> None:
    for fault, message in FAULTS.items():
        if code & fault:
            raise DecodeError(message.format(step=step))


def _read(plan: TreePlan, tokens: Tensor, choices: Tensor, fault: Tensor, step: int) -> tuple[int, list[int]]:
    """The accepted row and the tokens chosen along its path: the one copy to the host of a step."""
    if plan.size == 1:
        code, token = torch.cat([fault[None], choices]).tolist()
        _check(code, step)
        return 0, [token]
    row = accept_greedy(plan, tokens, choices)[None]
    chosen = choices[plan.paths.index_select(0, row)[0]]
    code, first, *emitted = torch.cat([fault[None], row, chosen]).tolist()
    _check(code, step)
    return first, emitted[: len(plan.path_rows[first])]
