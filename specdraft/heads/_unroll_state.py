"""Decoding state of a row of an unrolled head: the cache of its layer, and the levels of its trees, prepared once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from specdraft.core.compiling import COLUMNS
from specdraft.core.tree import DraftTree
from specdraft.core.types import Unembedding


@dataclass(frozen=True)
class TreeLevel:
    """How one depth of a tree is drafted. Queries are the nodes of the depth before that have children (or the root).

    query_parents: ``[m]`` int64, rows of the previous level's outputs that the queries continue.
    query_tokens: ``[m]`` int64, the queries' places among the previous level's drafted tokens.
    rows, ranks: ``[n]`` int64, per drafted node its query and its rank there. mask: buffer ``[m, max_length + w]`` bool
    whose last w columns (keys written for the tree so far) are the ancestors, or None when all keys are visible.
    """

    query_parents: Tensor
    query_tokens: Tensor
    rows: Tensor
    ranks: Tensor
    max_rank: int
    mask: Tensor | None


@dataclass(frozen=True)
class TreePlan:
    """The levels of a tree, prepared once per tree."""

    levels: list[TreeLevel]

    @classmethod
    def of(cls, tree: DraftTree, max_length: int, device: torch.device) -> TreePlan:
        """The plan of ``tree`` for prefixes of at most ``max_length`` positions."""
        with_children = set(tree.parents)
        levels = []
        queries: list[int] = [-1]
        previous_queries: list[int] = []
        written: list[int] = []

        def ids(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        for depth, nodes in enumerate(tree.levels):
            parents: list[int] = []
            tokens: list[int] = []
            mask = None
            if depth:
                above = tree.levels[depth - 1]
                queries = [node for node in above if node in with_children]
                parents = [previous_queries.index(tree.parents[node]) for node in queries]
                tokens = [above.index(node) for node in queries]
                written += queries
                if len(written) > depth:  # more than one path: not every key is an ancestor
                    ancestors = tree.ancestor_mask(device)[ids(queries) + 1][:, ids(written) + 1]
                    prefix = torch.ones(len(queries), max_length, dtype=torch.bool, device=device)
                    mask = torch.cat([prefix, ancestors], -1)
            ranks = [tree.ranks[node] for node in nodes]
            rows = ids([queries.index(tree.parents[node]) for node in nodes])
            levels.append(TreeLevel(ids(parents), ids(tokens), rows, ids(ranks), max(ranks), mask))
            previous_queries = queries
        return cls(levels)


class UnrollState:
    """Key-value cache of a draft layer for one decoded row, and what is prepared per tree."""

    def __init__(self, keys: Tensor, values: Tensor, unembed: Unembedding, max_length: int) -> None:
        self.keys, self.values = keys, values
        self.unembed = unembed
        self.max_length = max_length
        self._plans: dict[DraftTree, TreePlan] = {}
        self._static: tuple[Tensor, Tensor] | None = None

    def plan(self, tree: DraftTree, device: torch.device) -> TreePlan:
        """The prepared levels of ``tree``."""
        if tree not in self._plans:
            self._plans[tree] = TreePlan.of(tree, self.max_length, device)
        return self._plans[tree]

    def static_views(self, filled: int) -> tuple[Tensor, Tensor] | None:
        """The first columns of the keys and values: a multiple of ``COLUMNS``, at least ``filled``; None if too few."""
        capacity = self.keys.shape[2]
        if filled > capacity:
            return None
        end = min(-(-filled // COLUMNS) * COLUMNS, capacity)
        if self._static is None or self._static[0].shape[2] != end:
            # Through DLPack each view is a storage of its own to a compiler, which copies what might share memory.
            self._static = from_dlpack(self.keys[:, :, :end]), from_dlpack(self.values[:, :, :end])
        return self._static

    def write(self, start: int, keys: Tensor, values: Tensor) -> None:
        """Stores ``[n, kv_heads, head_dim]`` at cache rows ``start .. start + n - 1``."""
        stop = start + keys.shape[0]
        self.keys[0, :, start:stop] = keys.transpose(0, 1)
        self.values[0, :, start:stop] = values.transpose(0, 1)

    def attend(self, query: Tensor, filled: int, mask: Tensor | None) -> Tensor:
        """``[m, heads, head_dim]`` over the first ``filled`` rows -> ``[m, heads * head_dim]``.

        ``mask``: a TreeLevel's buffer; its columns are aligned to the right end of the filled rows.
        """
        visible = None if mask is None else mask[:, mask.shape[1] - filled :]
        out = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            self.keys[:, :, :filled],
            self.values[:, :, :filled],
            attn_mask=visible,
            enable_gqa=self.keys.shape[1] != query.shape[1],
        )
        return out[0].transpose(0, 1).reshape(query.shape[0], -1)
