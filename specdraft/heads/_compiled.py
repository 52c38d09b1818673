"""The pass of an unrolled head's layer over one row's cache as one compiled graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from specdraft.core.compiling import StaticGraph, kept, rounded

if TYPE_CHECKING:
    from specdraft.core.types import Unembedding
    from specdraft.heads._unroll import UnrolledHead
    from specdraft.heads._unroll_state import UnrollState


class CompiledPass:
    """Stands in for the plain pass of ``UnrolledHead`` where the rows fit the cache with their padding.

    The graph writes the new keys and values at places given as a tensor, and attends behind a mask to the columns of
    ``UnrollState.static_views``. Rows are padded to a power of two; what the padding writes lies
    behind the rows that are filled, where the next pass writes.

    Raises of the constructor:
        ConfigError: there is no compiler.
    """

    def __init__(self, head: UnrolledHead) -> None:
        self.head = head
        self.device = head.layer.qkv_proj.weight.device
        self._graph = StaticGraph(head.config.kind, self._run, self.device)

    def __call__(
        self,
        state: UnrollState,
        hidden: Tensor,
        embedded: Tensor,
        positions: Tensor,
        start: int,
        mask: Tensor | None,
        last_only: bool,
    ) -> tuple[Tensor, Tensor] | None:
        """As ``UnrolledHead.layer_pass``; None where the padded rows do not fit."""
        count = positions.numel()
        rows = rounded(count)
        views = state.static_views(start + rows)
        if views is None:
            return None
        places = torch.arange(start, start + rows, device=self.device)
        queries = 1 if last_only else rows
        bias = hidden.new_full((1, 1, queries, views[0].shape[2]), float("-inf"))
        visible = mask if mask is None else mask[:, mask.shape[1] - start - count :]
        own = bias[:, :, : 1 if last_only else count, : start + count]
        own.copy_(
            own.new_zeros(()) if visible is None else own.new_zeros(visible.shape).masked_fill_(~visible, -torch.inf)
        )
        bias[:, :, count:, 0] = 0.0  # a softmax over nothing would be NaN
        asked = torch.arange(count - 1, count, device=self.device) if last_only else None
        output, logits = self._graph(
            views,
            (bias,),
            _padded(hidden, rows),
            _padded(embedded, rows),
            _padded(positions, rows),
            views,
            places,
            bias,
            asked,
            state.unembed,
        )
        return kept(output[:count]), kept(logits[:count])

    def _run(
        self,
        hidden: Tensor,
        embedded: Tensor,
        positions: Tensor,
        views: tuple[Tensor, Tensor],
        places: Tensor,
        bias: Tensor,
        asked: Tensor | None,
        unembed: Unembedding,
    ) -> tuple[Tensor, Tensor]:
        keys, values = views
        x, residual = self.head.mix(hidden, embedded)
        query, key, value = self.head.layer.project(x, positions)
        keys.index_copy_(2, places, key.transpose(0, 1)[None])
        values.index_copy_(2, places, value.transpose(0, 1)[None])
        if asked is not None:
            query, residual = query.index_select(0, asked), residual.index_select(0, asked)
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys, values, attn_mask=bias, enable_gqa=keys.shape[1] != query.shape[1]
        )
        output = self.head.layer.finish(attended[0].transpose(0, 1).reshape(query.shape[0], -1), residual)
        return output, unembed(self.head.readout(output))


def _padded(rows: Tensor, count: int) -> Tensor:
    """``[n, ...]`` -> ``[count, ...]``: the last row again and again."""
    missing = count - rows.shape[0]
    return torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])]) if missing else rows
