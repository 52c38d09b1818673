"""The law of what every verifier emits, enumerated: equal to plain sampling's, or shown not to be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specdraft.core.tree import DraftTree
from specdraft.decode.verify import Odds, Siblings, accept_typical, sibling_odds
from tests.decode.exact import error, fixed_step, mean_emitted, plan_of, random_model, sampled_step

CHAIN = DraftTree.chain(3)
SHORT = DraftTree.chain(2)
TREE = DraftTree.from_paths([[0], [1], [0, 0], [0, 1]])
WIDE = DraftTree.from_paths([[0], [1], [2], [1, 0]])
LATE = DraftTree.from_paths([[0], [0, 0], [0, 1], [0, 2]])
"""The root has fewer children than a node below it."""
TINY = 1e-12


@pytest.mark.parametrize(
    ("tree", "vocab"),
    [(CHAIN, 3), (SHORT, 4), (TREE, 3), (WIDE, 3), (LATE, 3)],
    ids=["chain", "short", "tree", "wide", "late"],
)
def test_drawn_drafts_leave_the_law_alone(tree: DraftTree, vocab: int) -> None:
    target, draft = random_model(vocab, 1), random_model(vocab, 101)
    assert error(sampled_step(tree, target, draft, "siblings"), target) < TINY


@pytest.mark.parametrize(("tree", "vocab", "seed"), [(CHAIN, 3, 0), (CHAIN, 3, 1), (SHORT, 5, 0)])
def test_block_verification_leaves_the_law_alone_and_accepts_no_less(tree: DraftTree, vocab: int, seed: int) -> None:
    target, draft = random_model(vocab, seed), random_model(vocab, seed + 100)
    block = sampled_step(tree, target, draft, "block")
    assert error(block, target, length=3 if vocab == 5 else 4) < TINY
    assert mean_emitted(block) > mean_emitted(sampled_step(tree, target, draft, "siblings")) + 1e-6


@pytest.mark.parametrize("tree", [CHAIN, TREE, WIDE], ids=["chain", "tree", "wide"])
def test_fixed_drafts_leave_the_law_alone(tree: DraftTree) -> None:
    target, draft = random_model(3, 5), random_model(3, 6)
    step = fixed_step(tree, target, draft)
    assert error(step, target, length=3) < TINY
    # A child x of the root is accepted with probability p(x).
    width = sum(parent < 0 for parent in tree.parents)
    children = draft((0, 1)).argsort(descending=True)[:width]
    accepted = sum(weight for text, weight in step((0, 1)) if len(text) > 1)
    assert accepted == pytest.approx(float(target((0, 1))[children].sum()))


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
def test_equal_and_disjoint_distributions(tree: DraftTree) -> None:
    """p = q leaves nothing to draw a rejected token from, and is never rejected; disjoint drafts are always rejected."""
    same = random_model(3, 3)
    for rule in ("siblings", "block") if tree.is_chain else ("siblings",):
        step = sampled_step(tree, same, same, rule)
        assert error(step, same, length=3) < TINY
        assert mean_emitted(step) == pytest.approx(tree.max_depth + 1)

        def half(prefix: tuple[int, ...], low: bool) -> Tensor:
            probs = same(prefix) * torch.tensor([1.0, 1.0, 0.0] if low else [0.0, 0.0, 1.0])
            return probs / probs.sum()

        apart = sampled_step(SHORT, lambda p: half(p, True), lambda p: half(p, False), rule)
        assert error(apart, lambda p: half(p, True)) < TINY
        assert mean_emitted(apart) == pytest.approx(1)


def test_more_siblings_than_the_draft_has_tokens() -> None:
    """A drafter with two tokens draws three siblings: the third stands for no draw, and the law stays."""
    target, inner = random_model(4, 8), random_model(4, 9)

    def draft(prefix: tuple[int, ...]) -> Tensor:
        probs = inner(prefix) * torch.tensor([1.0, 1.0, 0.0, 0.0])
        return probs / probs.sum()

    tree = DraftTree.from_paths([[0], [1], [2]])
    assert error(sampled_step(tree, target, draft, "siblings"), target) < TINY


def without_normalising(siblings: Siblings, tokens: Tensor, probs: Tensor, drafted: Tensor) -> Odds:
    """Wrong: a rejected sibling is taken out of the draft's distribution, which is not normalised afterwards."""
    accept, rest, left = torch.ones_like(probs[:, 0]), probs.clone(), drafted.clone()
    for children in siblings.rounds:
        for parent, child in zip(siblings.parents.tolist(), children.tolist(), strict=True):
            x = int(tokens[child])
            accept[child] = (rest[parent, x] / left[parent, x]).clamp(max=1)
            reduced = (rest[parent] - left[parent]).clamp(min=0)
            rest[parent] = reduced / reduced.sum()
            left[parent, x] = 0
    return Odds(accept, lambda rows: rest[rows])


def test_the_two_known_wrong_rules_are_found_out() -> None:
    target, draft = random_model(4, 0), random_model(4, 100)

    def likeliest(prefix: tuple[int, ...]) -> Tensor:
        return torch.nn.functional.one_hot(draft(prefix).argmax(), 4).double()

    def as_if_drawn(siblings: Siblings, tokens: Tensor, probs: Tensor, drafted: Tensor) -> Odds:
        """Wrong: the draft is the likeliest token, and is tested as if it had been drawn."""
        return sibling_odds(siblings, tokens, probs, torch.stack([draft((0, 1))] * len(drafted)))

    chain = DraftTree.chain(1)
    assert error(sampled_step(chain, target, likeliest, "siblings", as_if_drawn), target, 1, 2) > 0.05
    assert error(sampled_step(chain, target, likeliest, "siblings"), target, 1, 2) < TINY
    pair = DraftTree.from_paths([[0], [1]])
    assert error(sampled_step(pair, target, draft, "siblings", without_normalising), target) > 1e-3
    assert error(sampled_step(pair, target, draft, "siblings"), target) < TINY


def test_typical_acceptance_changes_the_law() -> None:
    target, draft = random_model(3, 5), random_model(3, 6)
    assert error(fixed_step(CHAIN, target, draft, (0.09, 0.3)), target) > 0.01
    # With a threshold that nothing passes it is plain sampling.
    assert error(fixed_step(CHAIN, target, draft, (1.0, 1e9)), target) < TINY
    assert mean_emitted(fixed_step(CHAIN, target, draft, (1.0, 1e9))) == 1


def test_typical_acceptance_takes_the_longest_and_then_the_likeliest_path() -> None:
    plan = plan_of(DraftTree.from_paths([[0], [1], [0, 0], [1, 0]]))
    tokens = torch.tensor([0, 1, 2, 1, 2])
    probs = torch.full((5, 3), 1 / 3, dtype=torch.float64)
    probs[0] = torch.tensor([0.1, 0.5, 0.4])
    probs[1] = torch.tensor([0.2, 0.4, 0.4])
    probs[2] = torch.tensor([0.1, 0.1, 0.8])
    assert int(accept_typical(plan, tokens, probs, 0.3, 10.0)) == 4  # 0.4 * 0.8 > 0.5 * 0.4
    assert int(accept_typical(plan, tokens, probs, 0.45, 10.0)) == 1
    probs[2] = torch.tensor([0.5, 0.3, 0.2])
    assert int(accept_typical(plan, tokens, probs, 0.3, 10.0)) == 3
    # The entropy's side of the minimum: p(x) must exceed delta * exp(-H).
    entropy = float(-(probs[0] * (probs[0] + 1e-5).log()).sum())
    edge = 0.5 / torch.tensor(-entropy).exp()
    assert int(accept_typical(plan_of(DraftTree.chain(1)), tokens[:2], probs[:2], 0.99, float(edge) * 0.99)) == 1
    assert int(accept_typical(plan_of(DraftTree.chain(1)), tokens[:2], probs[:2], 0.99, float(edge) * 1.01)) == 0
