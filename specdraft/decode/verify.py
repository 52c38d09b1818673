"""Which drafted tokens are accepted. Pure functions on any tree, without copies to the host.

Row 0 is the root, row i + 1 the drafted node i, as in ``TreePlan``. ``probs`` are the target's: row i is what plain
sampling draws the token after row i from. ``drafted`` are the proposer's: row i is what the children of the i-th row with
children were drawn from, one after another, each without those before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from specdraft.core.errors import ConfigError
from specdraft.core.tree import DraftTree
from specdraft.decode.plan import TreePlan


def accept_greedy(plan: TreePlan, tokens: Tensor, choices: Tensor) -> Tensor:
    """The deepest row whose whole path repeats the target's choices.

    A node is accepted when it holds its parent's choice and its parent is accepted, so with distinct siblings the
    accepted nodes are one path. With the most likely tokens as choices this is greedy decoding, exactly. With choices
    drawn from the target's distribution it is the rule for drafts that were not drawn (a point mass each): a child x is
    accepted with probability p(x), and what is emitted has the distribution p whichever children there are.
    Source: Leviathan et al. 2023, algorithm 1; for trees Miao et al. 2024 (SpecInfer), algorithm 2.

    Args:
        plan: the tree with its root.
        tokens: ``[N+1]`` int64, the root's token and the drafted ones.
        choices: ``[N+1]`` int64, the target's token after each row.

    Returns:
        0-d int64: the accepted row, 0 when only the root stands. ``choices[row]`` is the bonus token.
    """
    return _deepest(plan, tokens == choices[plan.parents])


def _deepest(plan: TreePlan, agrees: Tensor) -> Tensor:
    """The deepest row all of whose path ``agrees`` (``[N+1]`` bool; the root counts as agreeing)."""
    accepted = (agrees | plan.unrelated).all(dim=-1)
    return (accepted * plan.ranking).argmax()


@dataclass(frozen=True)
class Odds:
    """How a rule decides, before anything is drawn.

    accept: ``[N+1]``, the probability with which a row is accepted; what it is conditional on is the rule's. Row 0: 1.
    rest: of rows ``[n]``, the weights ``[n, V]``, not normalised, that the token after a row is drawn from when the row
    is the last one. A function, since one row of them is needed and a table of all costs more than the rest of a step.
    """

    accept: Tensor
    rest: Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Siblings:
    """Who is whose child in a tree of drawn tokens.

    parents: ``[P]`` int64, the rows with children, ascending. most_first: ``[P]`` int64, places in ``parents``, those with
    most children first. rounds: for r = 0, 1, ... the r-th child of every row that has one, in the order of ``most_first``.
    elder: ``[N+1, N+1]`` bool, True where the column is an elder sibling of the row. place, rank: ``[N+1]`` int64: of a row
    with children in ``parents`` and in ``most_first``, 0 for the others. has_child: ``[N+1]`` bool.
    """

    parents: Tensor
    most_first: Tensor
    rounds: list[Tensor]
    elder: Tensor
    place: Tensor
    rank: Tensor
    has_child: Tensor


@lru_cache(maxsize=64)
def siblings_of(tree: DraftTree, device: torch.device) -> Siblings:
    """The tables of a tree.

    Raises:
        ConfigError: the ranks of some siblings are not 0, 1, 2, ... in this order: what was drawn between them is unknown.
    """
    children: dict[int, list[int]] = {}
    for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks, strict=True)):
        known = children.setdefault(parent + 1, [])
        if rank != len(known):
            raise ConfigError(
                f"decode.tree: the ranks of siblings must be 0, 1, 2, ... where drafts are drawn, got {rank} in place of "
                f"{len(known)}; add the missing paths or use sampling.verifier=point_mass"
            )
        known.append(node + 1)
    size, parents = len(tree) + 1, sorted(children)
    elder = torch.zeros(size, size, dtype=torch.bool)
    for known in children.values():
        for i, child in enumerate(known):
            elder[child, known[:i]] = True
    most_first = sorted(range(len(parents)), key=lambda place: -len(children[parents[place]]))
    place, rank = torch.zeros(2, size, dtype=torch.int64)
    place[parents] = torch.arange(len(parents))
    rank[[parents[i] for i in most_first]] = torch.arange(len(parents))
    by_count = [children[parents[i]] for i in most_first]
    rounds = [[own[r] for own in by_count if len(own) > r] for r in range(len(by_count[0]))]
    has_child = torch.tensor([row in children for row in range(size)])

    def ids(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return Siblings(
        ids(parents),
        ids(most_first),
        [ids(nodes) for nodes in rounds],
        *(table.to(device) for table in (elder, place, rank, has_child)),
    )


def sibling_odds(siblings: Siblings, tokens: Tensor, probs: Tensor, drafted: Tensor) -> Odds:
    """Speculative sampling of a chain, and sampling without replacement on a tree.

    ``accept`` is conditional on the parent being accepted and the elder siblings being rejected. With R = p and D = q at
    the start, sibling x is accepted with probability min(1, R(x) / D(x)); a rejection makes R the positive part of R - D
    and takes x out of D, both normalised. A sibling that D no longer contains was not drawn: it counts as a point mass.
    Source: Leviathan et al. 2023 and Chen et al. 2023 for one child; Chen et al. 2024 (Sequoia), algorithm 2.

    Args:
        siblings: of the tree.
        tokens: ``[N+1]`` int64.
        probs: ``[N+1, V]``.
        drafted: ``[P, V]``, what the children of each row of ``siblings.parents`` were drawn from.
    """
    if len(siblings.rounds) == 1:
        return _only_child_odds(siblings, tokens, probs, drafted)
    accept = torch.ones_like(probs[:, 0])
    # Copies, written in place: the tables are large, and what is left of a round is a prefix of its rows. They are kept as
    # weights, not normalised, which spares two passes over them in every round.
    rest = probs.index_select(0, siblings.parents[siblings.most_first])
    left = drafted.index_select(0, siblings.most_first)
    for children in siblings.rounds:
        own, proposed = rest[: len(children)], left[: len(children)]
        chosen = tokens[children][:, None]
        total, mass = own.sum(dim=-1, keepdim=True), proposed.sum(dim=-1, keepdim=True)
        certain = mass <= 0
        offered = torch.where(certain, 1.0, proposed.gather(1, chosen) / mass)
        # Nothing remains only where p equals q, and there nothing was rejected.
        wanted = torch.where(total > 0, own.gather(1, chosen) / total, 0.0)
        accept[children] = torch.where(wanted >= offered, 1.0, wanted / offered)[:, 0]
        own.addcmul_(proposed, torch.where(certain, 0.0, total / mass), value=-1.0)
        own.scatter_add_(1, chosen, torch.where(certain, -total, 0.0)).clamp_min_(0.0)
        proposed.scatter_(1, chosen, 0.0)

    def rest_of(rows: Tensor) -> Tensor:
        found = rest.index_select(0, siblings.rank[rows])
        changed = siblings.has_child[rows][:, None] & (found.sum(dim=-1, keepdim=True) > 0)
        return torch.where(changed, found, probs.index_select(0, rows))

    return Odds(accept, rest_of)


def _only_child_odds(siblings: Siblings, tokens: Tensor, probs: Tensor, drafted: Tensor) -> Odds:
    """``sibling_odds`` where no node has a sibling: nothing is ever taken out of a distribution."""
    accept = torch.ones_like(probs[:, 0])
    (children,) = siblings.rounds
    chosen = tokens[children]
    wanted = probs[siblings.parents, chosen]
    offered = drafted.gather(1, chosen[:, None])[:, 0]
    accept[children] = torch.where(wanted >= offered, 1.0, wanted / offered)

    def rest(rows: Tensor) -> Tensor:
        own = probs.index_select(0, rows)
        proposed = drafted.index_select(0, siblings.place[rows]) * siblings.has_child[rows][:, None]
        reduced = (own - proposed).clamp_min(0.0)
        return torch.where(reduced.sum(dim=-1, keepdim=True) > 0, reduced, own)

    return Odds(accept, rest)


def take_siblings(plan: TreePlan, siblings: Siblings, accept: Tensor, uniform: Tensor) -> Tensor:
    """The row that ``sibling_odds`` leads to. uniform: ``[N+1]`` in [0, 1). Returns 0-d int64."""
    passes = uniform < accept
    elder_passes = (siblings.elder & passes).any(dim=-1)
    return _deepest(plan, passes & ~elder_passes)


def block_odds(tokens: Tensor, probs: Tensor, drafted: Tensor) -> Odds:
    """Block verification of a chain: accepts on average no fewer tokens than the rule token by token.

    ``accept[i]`` is the probability that a number drawn for row i alone lets the draft stand up to there; the last such
    row is taken. Source: Sun et al. 2024, "Block verification accelerates speculative decoding", algorithm 2.

    Args:
        tokens: ``[K+1]`` int64, the root and the chain.
        probs: ``[K+1, V]``.
        drafted: ``[K, V]``.
    """
    depth = tokens.numel() - 1
    drafted = torch.cat([drafted, torch.zeros_like(drafted[:1])])
    following = tokens[1:, None]
    ratio = (probs[:depth].gather(1, following) / drafted[:depth].gather(1, following))[:, 0]
    kept = [torch.ones_like(ratio[0])]
    for i in range(depth):
        kept.append((kept[-1] * ratio[i]).clamp_max(1.0))
    stands = torch.stack(kept)
    left = (stands[:, None] * probs - drafted).clamp_min(0.0)
    surplus = left.sum(dim=-1)
    missing = surplus + 1.0 - stands
    accept = torch.where(missing > 0, surplus / missing, 0.0)
    accept[0] = 1.0
    accept[depth] = stands[depth]

    def rest(rows: Tensor) -> Tensor:
        found = left.index_select(0, rows)
        return torch.where(surplus[rows][:, None] > 0, found, probs.index_select(0, rows))

    return Odds(accept, rest)


def take_last(accept: Tensor, uniform: Tensor) -> Tensor:
    """The row that ``block_odds`` leads to. uniform: ``[K+1]`` in [0, 1). Returns 0-d int64."""
    rows = torch.arange(accept.numel(), device=accept.device)
    passes = uniform < accept
    return (passes * rows).amax()


def accept_typical(plan: TreePlan, tokens: Tensor, probs: Tensor, epsilon: float, delta: float) -> Tensor:
    """Medusa's typical acceptance: the longest path of tokens that are likely enough. The text's distribution changes.

    A token is accepted when p(x) > min(epsilon, delta exp(-H(p))), H the entropy of p; of paths of one length the most
    likely is taken. Source: Cai et al. 2024 (Medusa), section 3.3, without its greedy first token: the bonus token is
    drawn.

    Returns:
        0-d int64: the accepted row.
    """
    entropy = -(probs * (probs + 1e-5).log()).sum(dim=-1)
    threshold = (delta * (-entropy).exp()).clamp_max(epsilon)
    likelihood = probs[plan.parents].gather(1, tokens[:, None])[:, 0]
    accepted = ((likelihood > threshold[plan.parents]) | plan.unrelated).all(dim=-1)
    longest = (accepted * plan.ranking).amax()
    logs = torch.where(plan.unrelated, 0.0, likelihood.clamp_min(torch.finfo(probs.dtype).tiny).log()).sum(dim=-1)
    return torch.where(accepted & (plan.ranking == longest), logs, -torch.inf).argmax()
