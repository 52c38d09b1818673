"""What a step costs on this machine: target forwards by tokens, drafts by depth and width, measured in turns."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch

from specdraft.core.errors import ConfigError
from specdraft.core.tree import DraftTree, TreeGrowth
from specdraft.core.types import DraftContext
from specdraft.decode.batch_cache import BatchCache
from specdraft.decode.plan import TreePlan
from specdraft.decode.proposers import HeadProposer
from specdraft.eval.shapes import Shape, num_nodes
from specdraft.eval.speed import synchronize
from specdraft.heads.base import DraftHead
from specdraft.targets.hf import HFTarget

LEAST_CONTEXT = 4
"""Tokens in front of what is timed."""
COMMITTED = 2
"""Tokens a drafting step takes in, about what a step emits."""


@dataclass(frozen=True)
class CostTable:
    """Milliseconds, each the median of several measurements.

    target_ms: tokens of a forward (the root and the drafted nodes) -> forward, logits and the copy of the choices.
    chain_ms: depth -> drafting a chain. level_ms: queries of a level -> what a level of that many queries, one of them
    with two continuations, costs more than a level of a chain. step_ms: what a speculative step takes besides (plan,
    acceptance, cache, bookkeeping). plain_ms: the same of a plain step. grown_ms: (levels, width) -> drafting a tree that
    is grown; grown_step_ms: what a step with such a tree takes besides. batch_size: rows of each of these forwards, drafts
    and steps.
    """

    target_ms: Mapping[int, float]
    chain_ms: Mapping[int, float]
    level_ms: Mapping[int, float]
    step_ms: float
    plain_ms: float
    grown_ms: Mapping[tuple[int, int], float] = field(default_factory=dict)
    grown_step_ms: float = 0.0
    batch_size: int = 1

    @property
    def plain(self) -> float:
        """Milliseconds of a plain step."""
        return interpolate(self.target_ms, 1) + self.plain_ms

    def draft(self, tree: DraftTree) -> float:
        """Milliseconds of drafting ``tree``."""
        with_children = set(tree.parents)
        extra = 0.0
        for depth, nodes in enumerate(tree.levels):
            queries = 1 if not depth else sum(node in with_children for node in tree.levels[depth - 1])
            if len(nodes) > 1:
                extra += max(interpolate(self.level_ms, queries), 0.0)
        return interpolate(self.chain_ms, tree.max_depth) + extra

    def step(self, shape: Shape) -> float:
        """Milliseconds of a step that drafts ``shape``, or of a plain one."""
        target = interpolate(self.target_ms, num_nodes(shape) + 1)
        if isinstance(shape, TreeGrowth):
            return target + self.grown_ms[shape.depth, shape.top_k] + self.grown_step_ms
        return target + self.draft(shape) + self.step_ms if len(shape) else self.plain

    def as_json(self) -> dict[str, Any]:
        """The table with keys as text."""

        def text(size: int | tuple[int, int]) -> str:
            return str(size) if isinstance(size, int) else f"{size[0]} levels of {size[1]}"

        return {
            key: {text(size): ms for size, ms in value.items()} if isinstance(value, dict) else value
            for key, value in asdict(self).items()
        }


def interpolate(table: Mapping[int, float], size: int) -> float:
    """The value at ``size``, on straight lines between what was measured and, past the end, on the last of them."""
    sizes = sorted(table)
    if size in table or len(sizes) == 1:
        return table.get(size, table[sizes[0]])
    right = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
    low, high = sizes[right - 1], sizes[right]
    return table[low] + (table[high] - table[low]) * (size - low) / (high - low)


def sizes_up_to(largest: int) -> list[int]:
    """Sizes that are measured: all of the small ones, where kernels change, then ever fewer."""
    sizes = [*range(1, 10), 12, 16, 17, 20, 24, 32, 33, 40, 48, 64, 65, 80, 96, 128, 160, 192, 256, 384, 512]
    return [size for size in sizes if size < largest] + [largest]


def wide_tree(num_queries: int, depth: int) -> DraftTree:
    """``num_queries`` chains side by side, with one continuation of rank 1 at every level below the first."""
    paths = [[rank, *[0] * below] for rank in range(num_queries) for below in range(depth)]
    paths += [[0] * below + [1] for below in range(1, depth)]
    if num_queries == 1:
        paths.append([1])
    return DraftTree.from_paths(paths)


class CostProbe:
    """Target and head after a context of typical length, and single parts of a step run on them again and again.

    Args:
        target: the model.
        head: in eval mode, on the target's device.
        context: token ids that lie in the cache while parts are timed; at least four.
        max_nodes: largest tree that is to be priced.
        batch_size: rows of every forward and draft, all with this context.

    Raises:
        ConfigError: the trees leave no room for a prefix in the target's context.
    """

    def __init__(
        self, target: HFTarget, head: DraftHead, context: list[int], max_nodes: int, batch_size: int = 1
    ) -> None:
        # The parts run a chain of the most nodes behind the context, which must not pass the last position.
        room = target.spec.max_position_embeddings - max_nodes - 1
        if room < LEAST_CONTEXT:
            raise ConfigError(
                f"tune.max_nodes: leaves no room in a context of {target.spec.max_position_embeddings} tokens, got "
                f"{max_nodes}; use fewer"
            )
        context = context[:room]
        self.target = target
        self.head = head
        self.request = head.features()
        self.ids = torch.tensor([context], device=target.device)
        self.max_nodes = max_nodes
        self.capacity = len(context) + max_nodes + 1
        self.batch_size = batch_size
        self.cache = BatchCache(target.spec.num_hidden_layers, self.capacity, batch_size)
        positions = torch.arange(len(context), device=target.device)[None]
        with torch.inference_mode():
            for _ in range(batch_size):
                self.cache.open_slot()
                self.features = target.forward_cached(self.ids, positions, None, None, self.cache, self.request)
                self.cache.commit(range(len(context)))
                self.cache.close_slot()

    def measure(
        self, max_queries: int, rounds: int, seed: int = 0, grown: Sequence[tuple[int, int]] = ()
    ) -> dict[str, dict[Any, float]]:
        """``target_ms``, ``chain_ms``, ``level_ms`` and ``grown_ms`` of a CostTable.

        Medians of ``rounds``, in a new order each round. grown: levels and widths of trees that are grown.
        """
        depth = self.head.config.num_draft_tokens
        queries = [count for count in (1, 2, 4, 8, 16, 32, 64) if count < max_queries] + [max_queries]
        parts: dict[tuple[str, Any], Callable[[], object]] = {}
        for size in sizes_up_to(self.max_nodes + 1):
            parts["target", size] = self._target(size)
        for deep in range(1, depth + 1):
            parts["chain", deep] = self._draft(DraftTree.chain(deep))
        for count in queries:
            parts["wide", count] = self._draft(wide_tree(count, depth))
        for levels, width in grown:
            growth = TreeGrowth(levels, width, min(width * levels, TreeGrowth(levels, width, 1).pool_size))
            parts["grown", (levels, width)] = self._draft(growth)
        times = timed(parts, rounds, seed, self.target.device)
        chain = {size: ms for (part, size), ms in times.items() if part == "chain"}
        wide = {size: ms for (part, size), ms in times.items() if part == "wide"}
        return {
            "target_ms": {size: ms for (part, size), ms in times.items() if part == "target"},
            "chain_ms": chain,
            "level_ms": {count: (ms - chain[depth]) / depth for count, ms in wide.items()},
            "grown_ms": {size: ms for (part, size), ms in times.items() if part == "grown"},
        }

    def _target(self, size: int) -> Callable[[], object]:
        """A target forward over ``size`` tokens that leaves the cache as it was."""
        has_full = "full_attention" in self.target.layer_types
        tree = DraftTree.chain(size - 1)
        plan = TreePlan(tree, self.capacity, self.target.sliding_window, has_full, self.target.device)
        length, count = self.cache.lengths[0], self.batch_size
        repeated = self.ids[0].repeat(-(-size // length))[:size].expand(count, -1)

        def run() -> object:
            self.cache.open_rows()
            positions = plan.positions(length).expand(count, -1)
            full, sliding = (None if m is None else m.expand(count, -1, -1, -1) for m in plan.masks(length))
            features = self.target.forward_cached(repeated, positions, full, sliding, self.cache, self.request)
            return self.target.logits(features.last_hidden.flatten(0, 1)).argmax(dim=-1).tolist()

        return run

    def _draft(self, shape: Shape) -> Callable[[], object]:
        """A draft of ``shape`` for every row that takes in a few committed tokens, always the same."""
        proposer = HeadProposer(self.head, self.target, shape)
        length = self.ids.shape[1]
        states = [proposer.begin(length) for _ in range(self.batch_size)]
        start = length - 1 - COMMITTED
        with torch.inference_mode():
            before = torch.arange(start, device=self.ids.device)
            first = DraftContext(self.ids[:, 1 : start + 1], self.features.select(before), 0)
            for state in states:
                proposer.propose(state, first, shape.max_depth)
        following = torch.arange(start, length - 1, device=self.ids.device)
        context = DraftContext(self.ids[:, start + 1 :], self.features.select(following), start)
        contexts, depths = [context] * len(states), [shape.max_depth] * len(states)
        if len(states) == 1:
            return lambda: proposer.propose(states[0], context, shape.max_depth)
        return lambda: proposer.propose_batch(states, contexts, depths)


@torch.inference_mode()
def timed(
    parts: Mapping[tuple[str, Any], Callable[[], object]], rounds: int, seed: int, device: torch.device
) -> dict[tuple[str, Any], float]:
    """Median milliseconds of each part: ``rounds`` times all of them in a new order, after one untimed round."""
    order: Sequence[tuple[str, Any]] = list(parts)
    shuffle = random.Random(seed)
    times: dict[tuple[str, Any], list[float]] = {key: [] for key in order}
    for turn in range(rounds + 1):
        for key in shuffle.sample(order, len(order)):
            synchronize(device)
            begin = perf_counter()
            parts[key]()
            synchronize(device)
            if turn:
                times[key].append(1e3 * (perf_counter() - begin))
    return {key: median(values) for key, values in times.items()}
