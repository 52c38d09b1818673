"""Draft trees: which node continues which, at which rank, and the masks and paths that follow. Pure functions of shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specdraft.core.errors import ConfigError


@dataclass(frozen=True)
class DraftTree:
    """A fixed tree of N drafted nodes under the root (the last emitted token), in breadth-first order.

    parents[i] is the index of node i's parent among the drafted nodes, -1 for the root; parents[i] < i.
    ranks[i] says which of the parent's continuations node i is: 0 the most likely, 1 the second, ...
    A chain of K tokens is the tree with parents (-1, 0, ..., K-2) and ranks 0.

    Row and column 0 of the tensors below stand for the root, i + 1 for node i.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.ranks):
            raise ConfigError(
                f"decode.tree: parents and ranks differ in length, got {len(self.parents)} and {len(self.ranks)}"
            )
        depths = self.depths
        for i, parent in enumerate(self.parents):
            if not -1 <= parent < i:
                raise ConfigError(f"decode.tree: a node must come after its parent, got parent {parent} of node {i}")
            if i and depths[i] < depths[i - 1]:
                raise ConfigError("decode.tree: nodes must be in breadth-first order; sort the paths by length")
        if len(set(zip(self.parents, self.ranks, strict=True))) != len(self.parents):
            raise ConfigError("decode.tree: two nodes are the same continuation of one parent; remove one")

    @classmethod
    def chain(cls, num_draft_tokens: int) -> DraftTree:
        """The tree of one path of ``num_draft_tokens`` nodes."""
        return cls(tuple(range(-1, num_draft_tokens - 1)), (0,) * num_draft_tokens)

    @classmethod
    def from_paths(cls, paths: list[list[int]]) -> DraftTree:
        """A tree from its paths of ranks, as in Medusa's choices: ``[[0], [1], [0, 0]]``. Every prefix must be present."""
        order = sorted({tuple(p) for p in paths}, key=lambda p: (len(p), p))
        index = {path: i for i, path in enumerate(order)}
        parents = []
        for path in order:
            if not path or min(path) < 0:
                raise ConfigError(f"decode.tree: a path is a non-empty list of ranks from 0, got {list(path)}")
            if len(path) > 1 and path[:-1] not in index:
                raise ConfigError(f"decode.tree: the path {list(path)} lacks its parent; add {list(path[:-1])}")
            parents.append(index[path[:-1]] if len(path) > 1 else -1)
        return cls(tuple(parents), tuple(path[-1] for path in order))

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of every node; children of the root have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @property
    def max_depth(self) -> int:
        """Number of drafted tokens on the longest path (0 for an empty tree)."""
        return self.depths[-1] if self.depths else 0

    @cached_property
    def is_chain(self) -> bool:
        """True when every node continues the one before it."""
        return self.parents == tuple(range(-1, len(self) - 1))

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Node indices by depth: ``levels[0]`` are the children of the root."""
        return tuple(
            tuple(i for i, d in enumerate(self.depths) if d == depth) for depth in range(1, self.max_depth + 1)
        )

    @cached_property
    def max_rank(self) -> int:
        """Highest rank used by any node."""
        return max(self.ranks, default=0)

    def paths(self) -> list[list[int]]:
        """Ranks from the root to every node, in node order; inverse of ``from_paths``."""
        result: list[list[int]] = []
        for parent, rank in zip(self.parents, self.ranks, strict=True):
            result.append([*(result[parent] if parent >= 0 else []), rank])
        return result

    def truncate(self, max_depth: int) -> DraftTree:
        """The nodes of depth at most ``max_depth``."""
        keep = sum(1 for d in self.depths if d <= max_depth)
        return DraftTree(self.parents[:keep], self.ranks[:keep])

    def parent_rows(self, device: torch.device | str = "cpu") -> Tensor:
        """``[N+1]`` int64: the row of every row's parent; the root is its own."""
        return torch.tensor((0, *(parent + 1 for parent in self.parents)), dtype=torch.int64, device=device)

    def ancestor_mask(self, device: torch.device | str = "cpu") -> Tensor:
        """``[N+1, N+1]`` bool, True where the column's node is the row's node or one of its ancestors (root included)."""
        size = len(self) + 1
        mask = torch.zeros(size, size, dtype=torch.bool)
        mask[:, 0] = True
        for i, parent in enumerate(self.parents):
            mask[i + 1] = mask[parent + 1]
            mask[i + 1, i + 1] = True
        return mask.to(device)

    def depth_tensor(self, device: torch.device | str = "cpu") -> Tensor:
        """``[N+1]`` int64: 0 for the root, then the depth of every node."""
        return torch.tensor((0, *self.depths), dtype=torch.int64, device=device)

    def path_table(self, device: torch.device | str = "cpu") -> Tensor:
        """``[N+1, max_depth+1]`` int64: rows (root first) from the root to each node, padded with the node's own row."""
        rows = [[0] * (self.max_depth + 1)]
        for i, depth in enumerate(self.depths):
            row = [*rows[self.parents[i] + 1][:depth], i + 1]
            rows.append(row + [i + 1] * (self.max_depth + 1 - len(row)))
        return torch.tensor(rows, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class TreeGrowth:
    """How a tree is grown anew at every step from the head's own probabilities (Li et al. 2024, EAGLE-2).

    At each of ``depth`` levels the ``top_k`` nodes of highest probability along their path are continued by their
    ``top_k`` likeliest tokens; of all nodes the ``total_tokens`` of highest probability become the draft (the root is
    not counted).
    """

    depth: int
    top_k: int
    total_tokens: int

    def __post_init__(self) -> None:
        if self.total_tokens > self.pool_size:
            raise ConfigError(
                f"decode.dynamic_total_tokens: depth {self.depth} and top_k {self.top_k} give {self.pool_size} nodes, "
                f"got {self.total_tokens}; lower it, or raise dynamic_depth or dynamic_top_k"
            )

    @property
    def max_depth(self) -> int:
        """No node is deeper."""
        return self.depth

    @property
    def pool_size(self) -> int:
        """Nodes among which the draft is chosen."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    def cut(self, max_depth: int) -> TreeGrowth:
        """The same growth to a depth of at most ``max_depth`` (at least 1)."""
        shallow = TreeGrowth(min(self.depth, max_depth), self.top_k, 1)
        return TreeGrowth(shallow.depth, self.top_k, min(self.total_tokens, shallow.pool_size))

    @cached_property
    def beams(self) -> DraftTree:
        """The nodes that are continued, as if they were ``top_k`` chains: what a head allocates for."""
        chains = [[rank, *[0] * below] for below in range(self.depth) for rank in range(self.top_k)]
        return DraftTree.from_paths(chains)

    @cached_property
    def largest(self) -> DraftTree:
        """Some tree of ``total_tokens`` nodes as deep as a draft can be: what a decoder allocates for."""
        depth = min(self.depth, self.total_tokens)
        return DraftTree.from_paths(
            [[0] * below for below in range(1, depth + 1)]
            + [[rank] for rank in range(1, self.total_tokens - depth + 1)]
        )


@dataclass(frozen=True, eq=False)
class GrownTree:
    """A tree whose shape was decided on the device, in breadth-first order; it is drafted once and never seen again.

    rows: ``[N+1]`` int64, the row of every row's parent, the root (row 0) its own. max_depth: no node is deeper; known
    without a look at the device. scores: ``[N]``, the log-probability of the path down to every node, where it is known.
    """

    rows: Tensor
    max_depth: int
    scores: Tensor | None = None

    def __len__(self) -> int:
        return self.rows.shape[0] - 1

    def parent_rows(self, device: torch.device | str = "cpu") -> Tensor:
        """``[N+1]`` int64: the row of every row's parent; the root is its own."""
        return self.rows.to(device)


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens of one decoded row.

    tokens: ``[1, N]`` int64, node i of ``tree``; siblings hold distinct tokens, unless they were drawn from fewer than
    there are. probs: ``[Q, V]``, for each of the Q rows with children (the root first, then the nodes in order) the
    probabilities that the children were drawn from, by rank and without replacement; None = they were not drawn, but are
    decided by what was written before. finite: 0-d bool, whether the numbers behind the draft are; None = not looked at.
    confidence: ``[N]``, of a chain, the proposer's estimate that node i is accepted if those before it are; node i's own token
    has no part in it. None = no estimate.
    """

    tokens: Tensor
    tree: DraftTree | GrownTree
    probs: Tensor | None = None
    finite: Tensor | None = None
    confidence: Tensor | None = None

    def cut(self, threshold: float) -> Proposal | None:
        """A chain without what follows the first node whose path is accepted with a confidence below ``threshold``.

        That node is left out, too; None = nothing is left. Where it ends depends on the tokens before alone, so that drawn
        drafts stay what they were drawn from (DSpark, its appendix on the scheduler). Reads the length from the device.
        """
        if self.confidence is None:
            return self
        kept = int((self.confidence.float().cumprod(0) >= threshold).int().cumprod(0).sum())
        if kept == len(self.tree):
            return self
        if not kept:
            return None
        probs = None if self.probs is None else self.probs[:kept]
        return Proposal(self.tokens[:, :kept], DraftTree.chain(kept), probs, self.finite, self.confidence[:kept])
