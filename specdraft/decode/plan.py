"""What one forward over a draft tree needs, made once a tree: positions, masks and paths."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from specdraft.core.tree import DraftTree, GrownTree


class TreePlan:
    """Tensors and tables of a tree for a target and a cache. Row 0 is the root, row i + 1 the tree's node i.

    All of it comes from the parents in a few operations a level, without a look at the host, so that a tree grown on
    the device gets its plan in every step.

    ancestors: ``[N+1, N+1]`` bool, True where the column is the row or one of its ancestors. depths: ``[N+1]`` int64.

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
        self,
        tree: DraftTree | GrownTree,
        capacity: int,
        sliding_window: int | None,
        has_full: bool,
        device: torch.device,
    ) -> None:
        self.tree = tree
        self.size = len(tree) + 1
        self.parents = tree.parent_rows(device)
        lineage = [torch.arange(self.size, device=device)]
        for _ in range(tree.max_depth):
            lineage.append(self.parents[lineage[-1]])
        above = torch.stack(lineage, dim=1)  # [N+1, max_depth+1]: the row, its parent, ..., the root again and again
        depths = above.ne(0).sum(dim=1)
        columns = torch.arange(tree.max_depth + 1, device=device)
        # Rows from the root to each row, padded with the row itself.
        self.paths = above.gather(1, (depths[:, None] - columns).clamp(min=0))
        self.ancestors = torch.zeros(self.size, self.size, dtype=torch.bool, device=device).scatter_(1, above, True)
        self.depths = depths
        self._capacity = capacity
        self._window = sliding_window
        self._has_full = has_full
        self.unrelated = ~self.ancestors
        # The root was emitted before: it is accepted whatever the comparison of its token says.
        self.unrelated[:, 0] = True
        self.ranking = depths + 1
        continued = torch.zeros_like(depths).index_fill_(0, self.parents[1:], 1)
        self._host = _HostCopy(torch.cat([depths[:, None], continued[:, None], self.paths], dim=1))

    @cached_property
    def _full(self) -> Tensor | None:
        """Buffer of the masks for full layers; None where none is needed."""
        if not self._has_full or (self.size == 1 and self._window is None):
            return None
        return torch.cat([self.ancestors.new_ones(self.size, self._capacity), self.ancestors], dim=1)

    @cached_property
    def _sliding(self) -> Tensor | None:
        """Buffer of the masks for sliding layers; None where there are none."""
        if self._window is None:
            return None
        distance = torch.arange(self._capacity, 0, -1, device=self.depths.device)
        prefix = distance[None] < self._window - self.depths[:, None]
        near = self.depths[:, None] - self.depths[None] < self._window
        return torch.cat([prefix, self.ancestors & near], dim=1)

    @cached_property
    def path_rows(self) -> list[list[int]]:
        """Per row, the rows from the root to it."""
        return [row[2 : row[0] + 3] for row in self._host.rows]

    @cached_property
    def has_children(self) -> list[bool]:
        """Per row, whether a drafted node continues it."""
        return [row[1] > 0 for row in self._host.rows]

    def positions(self, length: int) -> Tensor:
        """``[1, N+1]`` int64 positions after ``length`` committed tokens."""
        return self.depths[None] + length

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


def chunk_masks(
    start: int, count: int, window: int | None, has_full: bool, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """What ``TreePlan.masks`` gives, for ``count`` tokens of a text behind ``start`` committed ones of it."""
    queries = torch.arange(start, start + count, device=device)[:, None]
    distance = queries - torch.arange(start + count, device=device)
    causal = (distance >= 0)[None, None]
    return causal if has_full else None, None if window is None else causal & (distance < window)


class _HostCopy:
    """A small table on its way to the host: by the time it is read, after the target's forward, it has arrived."""

    def __init__(self, table: Tensor) -> None:
        self._arrived = None
        self._table = table
        if table.device.type == "cuda":
            self._table = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
            self._table.copy_(table, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    @cached_property
    def rows(self) -> list[list[int]]:
        """The table as lists."""
        if self._arrived is not None:
            self._arrived.synchronize()
        rows: list[list[int]] = self._table.cpu().numpy().tolist()
        return rows
