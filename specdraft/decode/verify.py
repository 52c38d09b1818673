"""Which drafted tokens the target accepts. Pure functions on any tree, without copies to the host."""

from __future__ import annotations

from torch import Tensor

from specdraft.decode.plan import TreePlan


def accept_greedy(plan: TreePlan, tokens: Tensor, choices: Tensor) -> Tensor:
    """The deepest row whose whole path repeats the target's own most likely tokens.

    A node is accepted when it holds its parent's choice and its parent is accepted, so with distinct siblings the
    accepted nodes are one path, and decoding with it gives exactly the target's greedy text.
    Source: Leviathan et al. 2023, algorithm 1 at temperature 0; for trees Miao et al. 2024 (SpecInfer), algorithm 2.

    Args:
        plan: the tree with its root.
        tokens: ``[N+1]`` int64, the root's token and the drafted ones.
        choices: ``[N+1]`` int64, the target's most likely token after each row.

    Returns:
        0-d int64: the accepted row, 0 when only the root stands. ``choices[row]`` is the bonus token.
    """
    agrees = tokens == choices[plan.parents]
    accepted = (agrees | plan.unrelated).all(dim=-1)
    return (accepted * plan.ranking).argmax()
