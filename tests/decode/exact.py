"""Exact laws of what the verifiers emit over small vocabularies: every draft and every decision, with its probability."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor

from specdraft.core.tree import DraftTree
from specdraft.decode.plan import TreePlan
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

CPU = torch.device("cpu")
Law = dict[tuple[int, ...], float]
Model = Callable[[tuple[int, ...]], Tensor]
"""Prefix -> the distribution of the next token, ``[V]`` float64."""


def random_model(vocab: int, seed: int, sharpness: float = 1.5) -> Model:
    """Logits that depend on the last two tokens and the length."""

    @cache
    def model(prefix: tuple[int, ...]) -> Tensor:
        place = sum((token + 1) * 7**i for i, token in enumerate(prefix[-2:]))
        generator = torch.Generator().manual_seed(seed * 10007 + place * 31 + len(prefix))
        return (torch.randn(vocab, generator=generator, dtype=torch.float64) * sharpness).softmax(-1)

    return model


def plan_of(tree: DraftTree) -> TreePlan:
    return TreePlan(tree, 8, None, True, CPU)


def plain_law(target: Model, prefix: tuple[int, ...], length: int) -> Law:
    """The law of the next ``length`` tokens by plain sampling."""
    law: Law = {(): 1.0}
    for _ in range(length):
        law = {
            (*text, token): weight * float(p)
            for text, weight in law.items()
            for token, p in enumerate(target(prefix + text))
        }
    return law


def node_texts(tree: DraftTree, tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The drafted tokens on the path to every row, the root first."""
    texts: list[tuple[int, ...]] = [()]
    for parent, token in zip(tree.parents, tokens, strict=True):
        texts.append((*texts[parent + 1], token))
    return texts


def drawn_drafts(tree: DraftTree, draft: Model, prefix: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every assignment of tokens to nodes, siblings drawn without replacement, and its probability."""
    vocab = draft(prefix).numel()
    for tokens in itertools.product(range(vocab), repeat=len(tree)):
        texts = node_texts(tree, tokens)
        weight = 1.0
        left: dict[int, Tensor] = {}
        for node, (parent, token) in enumerate(zip(tree.parents, tokens, strict=True)):
            q = left.setdefault(parent, draft(prefix + texts[parent + 1]))
            total = float(q.sum())
            weight *= float(q[token]) / total if total > 0 else float(token == vocab - 1)
            left[parent] = q.scatter(0, torch.tensor(token), 0.0)
            if not weight:
                break
            assert texts[node + 1][-1] == token
        if weight:
            yield tokens, weight


def sibling_outcomes(plan: TreePlan, odds: Odds) -> Iterator[tuple[int, float]]:
    """Every row that sibling odds can lead to, through the real decision: each row passes or fails."""
    siblings = siblings_of(plan.tree, CPU)
    for passes in itertools.product((False, True), repeat=plan.size - 1):
        weight = 1.0
        uniform = torch.zeros(plan.size, dtype=torch.float64)
        for row, passed in enumerate(passes, 1):
            weight *= float(odds.accept[row] if passed else 1 - odds.accept[row])
            uniform[row] = 0.0 if passed else 1.0
        if weight > 0:
            yield int(take_siblings(plan, siblings, odds.accept, uniform)), weight


def block_outcomes(odds: Odds) -> Iterator[tuple[int, float]]:
    for passes in itertools.product((False, True), repeat=odds.accept.numel() - 1):
        weight = 1.0
        uniform = torch.zeros(odds.accept.numel(), dtype=torch.float64)
        for row, passed in enumerate(passes, 1):
            weight *= float(odds.accept[row] if passed else 1 - odds.accept[row])
            uniform[row] = 0.0 if passed else 1.0
        if weight > 0:
            yield int(take_last(odds.accept, uniform)), weight


Step = Callable[[tuple[int, ...]], list[tuple[tuple[int, ...], float]]]
"""Prefix -> what one step can emit, each with its probability."""


def _finish(
    outcomes: Iterator[tuple[int, float]], rest: Callable[[Tensor], Tensor], texts: list[tuple[int, ...]], weight: float
) -> Iterator[tuple[tuple[int, ...], float]]:
    for row, chance in outcomes:
        weights = rest(torch.tensor([row]))[0]
        last = weights / weights.sum()
        for token, p in enumerate(last.tolist()):
            if p > 0:
                yield (*texts[row], token), weight * chance * p


def sampled_step(
    tree: DraftTree, target: Model, draft: Model, rule: str, odds_of: Callable[..., Odds] = sibling_odds
) -> Step:
    """A step with a drawn draft: ``siblings`` or ``block``."""
    plan = plan_of(tree)
    siblings = siblings_of(tree, CPU)

    def step(prefix: tuple[int, ...]) -> list[tuple[tuple[int, ...], float]]:
        found: list[tuple[tuple[int, ...], float]] = []
        for tokens, weight in drawn_drafts(tree, draft, prefix):
            texts = node_texts(tree, tokens)
            rows = torch.tensor([0, *tokens])
            probs = torch.stack([target(prefix + text) for text in texts])
            drafted = torch.stack([draft(prefix + texts[row]) for row in siblings.parents.tolist()])
            if rule == "block":
                odds = block_odds(rows, probs, drafted)
                outcomes = block_outcomes(odds)
            else:
                odds = odds_of(siblings, rows, probs, drafted)
                outcomes = sibling_outcomes(plan, odds)
            found += _finish(outcomes, odds.rest, texts, weight)
        return found

    return step


def fixed_step(tree: DraftTree, target: Model, draft: Model, typical: tuple[float, float] | None = None) -> Step:
    """A step whose draft are the likeliest tokens: the point-mass rule, or typical acceptance with (epsilon, delta)."""
    plan = plan_of(tree)

    def step(prefix: tuple[int, ...]) -> list[tuple[tuple[int, ...], float]]:
        tokens: list[int] = []
        texts: list[tuple[int, ...]] = [()]
        for parent, rank in zip(tree.parents, tree.ranks, strict=True):
            above = texts[parent + 1]
            tokens.append(int(draft(prefix + above).argsort(descending=True)[rank]))
            texts.append((*above, tokens[-1]))
        rows = torch.tensor([0, *tokens])
        probs = torch.stack([target(prefix + text) for text in texts])
        if typical is not None:
            row = int(accept_typical(plan, rows, probs, *typical))
            return list(_finish(iter([(row, 1.0)]), lambda rows: probs[rows], texts, 1.0))
        found = []
        for choices in itertools.product(range(probs.shape[1]), repeat=plan.size):
            weight = float(probs.gather(1, torch.tensor(choices)[:, None]).prod())
            row = int(accept_greedy(plan, rows, torch.tensor(choices)))
            found.append(((*texts[row], choices[row]), weight))
        return found

    return step


def law_of_steps(step: Step, target: Model, prefix: tuple[int, ...], num_steps: int, length: int) -> Law:
    """The law of the first ``length`` tokens of ``num_steps`` steps; what a step emits short of it, plain sampling adds."""
    law: Law = {}
    pending = [((), 1.0)]
    for _ in range(num_steps):
        merged: Law = {}
        for text, weight in pending:
            for emitted, chance in step(prefix + text) if len(text) < length else [((), 1.0)]:
                key = (*text, *emitted)[:length]
                merged[key] = merged.get(key, 0.0) + weight * chance
        pending = list(merged.items())
    for text, weight in pending:
        for rest, chance in plain_law(target, prefix + text, length - len(text)).items():
            law[text + rest] = law.get(text + rest, 0.0) + weight * chance
    return law


def error(step: Step, target: Model, num_steps: int = 2, length: int = 4) -> float:
    """How far the joint law of the first tokens of two steps is from plain sampling's: the largest difference."""
    prefix = (0, 1)
    found = law_of_steps(step, target, prefix, num_steps, length)
    wanted = plain_law(target, prefix, length)
    assert abs(sum(found.values()) - 1) < 1e-9
    return max(abs(found.get(text, 0.0) - p) for text, p in wanted.items())


def mean_emitted(step: Step, prefix: tuple[int, ...] = (0, 1)) -> float:
    """Tokens a step emits on average."""
    return sum(len(text) * weight for text, weight in step(prefix))
