"""What a row does with the target's logits: which drafts it keeps, and what it writes behind them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

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

    row: the deepest accepted row of the tree. emitted: the tokens along its path below the root and the one behind them.
    following: the same on the device, ``[n]`` int64.
    """

    row: int
    emitted: list[int]
    following: Tensor


class Judge(ABC):
    """Decides the steps of one row; the prefill is a step without a draft.

    A step has two halves, so that the rows of a batch can share the one copy to the host between them: ``weigh`` works on
    the device, ``read`` with what arrived on the host. Calling the judge does both.
    """

    sampler: DraftSampler | None = None
    """With what drafts are to be drawn; None = the proposer's most likely tokens."""

    def __init__(self) -> None:
        self._step = 0

    @abstractmethod
    def weigh(self, plan: TreePlan, tokens: Tensor, logits: Tensor, proposal: Proposal | None) -> Tensor:
        """Decides a step without a look at the host.

        Args:
            plan: the tree with its root.
            tokens: ``[N+1]`` int64, the root and the drafted tokens.
            logits: ``[N+1, V]`` of the target after each.
            proposal: where the drafted tokens come from; None without any.

        Returns:
            ``[max_depth + 3]`` int64: a code of faults, the accepted row, and the token behind each row of its path. What
            follows those is of no meaning.
        """

    def read(self, plan: TreePlan, decided: Tensor, held: list[int]) -> Verdict:
        """The outcome of the step. ``held`` is ``decided``, what ``weigh`` returned, on the host.

        Raises:
            DecodeError: logits or draft are not finite, or every token is forbidden.
        """
        _check(held[0], self._step)
        self._step += 1
        row = held[1]
        end = 2 + len(plan.path_rows[row])
        return Verdict(row, held[2:end], decided[2:end])

    def __call__(self, plan: TreePlan, tokens: Tensor, logits: Tensor, proposal: Proposal | None) -> Verdict:
        """``weigh``, one copy to the host, and ``read``."""
        decided = self.weigh(plan, tokens, logits, proposal)
        return self.read(plan, decided, decided.tolist())


class GreedyJudge(Judge):
    """The target's most likely token, by its own logits."""

    def weigh(self, plan: TreePlan, tokens: Tensor, logits: Tensor, proposal: Proposal | None) -> Tensor:
        """See ``Judge``."""
        best, choices = logits.max(dim=-1)
        return _pack(plan, tokens, choices, _fault(best, proposal))


class RuledJudge(Judge):
    """Any settings: logits shaped per node, then the most likely token or a draw, by the verifier of the settings.

    Args:
        config: the settings.
        rules: what shapes the row's logits; None where nothing does.
        device: of the target.
    """

    def __init__(self, config: SamplingConfig, rules: LogitsRules | None, device: torch.device) -> None:
        super().__init__()
        self._config = config
        self._rules = rules
        self._random = RowRandom(config.seed, device)
        if config.samples_drafts:
            self.sampler = WarpedSampler(config, self._random)

    def weigh(self, plan: TreePlan, tokens: Tensor, logits: Tensor, proposal: Proposal | None) -> Tensor:
        """See ``Judge``."""
        fault = _fault(logits.amax(dim=-1), proposal)
        scores = logits.float()
        if self._rules is not None:
            scores = self._rules(logits, tokens, plan)
            forbidden = ~scores.amax(dim=-1).isfinite().all()
            fault = torch.where((fault == 0) & forbidden, RULES_FAULT, fault)
        return self._decide(plan, tokens, scores, proposal, fault)

    def read(self, plan: TreePlan, decided: Tensor, held: list[int]) -> Verdict:
        """See ``Judge``."""
        verdict = super().read(plan, decided, held)
        self._random.consume(len(verdict.emitted))
        if self._rules is not None:
            self._rules.extend(verdict.following)
        return verdict

    def _decide(
        self, plan: TreePlan, tokens: Tensor, scores: Tensor, proposal: Proposal | None, fault: Tensor
    ) -> Tensor:
        """What ``weigh`` returns, from the shaped ``scores``."""
        if self._config.is_greedy:
            return _pack(plan, tokens, scores.argmax(dim=-1), fault)
        probs = truncate(scores, self._config).softmax(dim=-1)
        # A faulty distribution is reported below; until then it must not reach a kernel that asserts.
        if proposal is not None and self._config.verifier == "typical":
            row = accept_typical(plan, tokens, probs, self._config.typical_epsilon, self._config.typical_delta)
            return self._pack_row(plan, tokens, row, probs.index_select(0, row[None]), fault)
        if proposal is None or proposal.probs is None:
            uniform = self._random.ahead(plan.tree.max_depth + 1)
            choices = draw(probs, uniform[plan.ranking - 1])
            return _pack(plan, tokens, choices, fault)
        row, odds = self._odds(plan, tokens, probs, proposal.probs)
        return self._pack_row(plan, tokens, row, odds.rest(row[None]), fault)

    def _odds(self, plan: TreePlan, tokens: Tensor, probs: Tensor, drafted: Tensor) -> tuple[Tensor, Odds]:
        """The accepted row of a draft that was drawn, and how it was decided."""
        tree = plan.tree
        if not isinstance(tree, DraftTree):
            raise TypeError(
                "a tree grown on the device holds no drawn tokens, but its proposal has their probabilities"
            )
        siblings = siblings_of(tree, tokens.device)
        drafted = drafted.to(probs.dtype)
        uniform = self._random.fresh(plan.size)
        if self._config.verifier == "block" and tree.is_chain:
            odds = block_odds(tokens, probs, drafted)
            return take_last(odds.accept, uniform), odds
        odds = sibling_odds(siblings, tokens, probs, drafted)
        return take_siblings(plan, siblings, odds.accept, uniform), odds

    def _pack_row(self, plan: TreePlan, tokens: Tensor, row: Tensor, rest: Tensor, fault: Tensor) -> Tensor:
        """What ``weigh`` returns, from the row and the weights ``rest`` (``[1, V]``) that the token behind it is drawn by."""
        bonus = draw(rest, self._random.fresh(1))
        path = tokens[plan.paths.index_select(0, row[None])[0]]
        behind = path.roll(-1).scatter(0, plan.ranking.index_select(0, row[None]) - 1, bonus)
        return torch.cat([fault[None], row[None], behind])


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


def _pack(plan: TreePlan, tokens: Tensor, choices: Tensor, fault: Tensor) -> Tensor:
    """What ``weigh`` returns, from the token chosen after each row, ``[N+1]``."""
    if plan.size == 1:
        return torch.cat([fault[None], plan.paths[0], choices])
    row = accept_greedy(plan, tokens, choices)[None]
    return torch.cat([fault[None], row, choices[plan.paths.index_select(0, row)[0]]])
