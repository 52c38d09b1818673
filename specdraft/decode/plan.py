"""What one forward over a draft tree needs, made once a tree: positions, masks and paths."""

from __future__ import annotations

import torch
from torch import Tensor

from specdraft.core.tree import DraftTree


class TreePlan:
    """Tensors and tables of a tree for a target and a cache. Row 0 is the root, row i + 1 the tree's node i.

    The masks are views: column c of a buffer ``[N+1, capacity + N+1]`` stands for a fixed distance to the first new
    row, so the mask over a prefix of any length is the buffer without its first columns. That holds for windows too,
    since what a window cuts off depends on that distance and on the node's depth alone.

    Args:
        tree: the drafted nodes; no nodes for a plain step.
        capacity: rows of the cache.
        sliding_window: keys a query of a sliding layer sees, itself included; None without such layers.
        has_full: the target has layers that see everything.
        device: where the tensors lie.
    """

    def __init__(
        self, tree: DraftTree, capacity: int, sliding_window: int | None, has_full: bool, device: torch.device
    ) -> None:
        self.tree = tree
        self.size = len(tree) + 1
        self.paths = tree.path_table(device)
        depths = tree.depth_tensor(device)
        self._depths = depths[None]
        self._capacity = capacity
        self._window = sliding_window
        ancestors = tree.ancestor_mask(device)
        self._full = None
        if has_full and (self.size > 1 or sliding_window is not None):
            self._full = torch.cat([ancestors.new_ones(self.size, capacity), ancestors], dim=1)
        self._sliding = None
        if sliding_window is not None:
            distance = torch.arange(capacity, 0, -1, device=device)
            prefix = distance[None] < sliding_window - depths[:, None]
            near = depths[:, None] - depths[None] < sliding_window
            self._sliding = torch.cat([prefix, ancestors & near], dim=1)
        self.parents = torch.tensor((0, *(parent + 1 for parent in tree.parents)), device=device)
        self.unrelated = ~ancestors
        # The root was emitted before: it is accepted whatever the comparison of its token says.
        self.unrelated[:, 0] = True
        self.ranking = depths + 1
        path_rows = self.paths.tolist()
        self.path_rows = [row[: depth + 1] for row, depth in zip(path_rows, (0, *tree.depths), strict=True)]
        with_children = set(tree.parents)
        self.has_children = [row - 1 in with_children for row in range(self.size)]

    def positions(self, length: int) -> Tensor:
        """``[1, N+1]`` int64 positions after ``length`` committed tokens."""
        return self._depths + length

    def masks(self, length: int) -> tuple[Tensor | None, Tensor | None]:
        """Masks for the full and for the sliding layers over ``length`` committed keys and the tree.

        Each is ``[1, 1, N+1, length + N+1]`` bool, True = may attend. None where the target has no such layers; both
        None for a single row that sees every key anyway.
        """
        if self.size == 1 and (self._window is None or length < self._window):
            return None, None
        return self._cut(self._full, length), self._cut(self._sliding, length)

    def _cut(self, buffer: Tensor | None, length: int) -> Tensor | None:
        return None if buffer is None else buffer[None, None, :, self._capacity - length :]
