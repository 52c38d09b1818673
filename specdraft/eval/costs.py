"""What a step costs on this machine: target forwards by tokens, drafts by depth and width, measured in turns."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

from specdraft.core.tree import DraftTree
from specdraft.core.types import DraftContext
from specdraft.decode.cache import KVCache
from specdraft.decode.plan import TreePlan
from specdraft.decode.proposers import HeadProposer
from specdraft.eval.speed import synchronize
from specdraft.heads.base import DraftHead
from specdraft.targets.hf import HFTarget

COMMITTED = 2
"""Tokens a drafting step takes in, about what a step emits."""


@dataclass(frozen=True)
class CostTable:
    """Milliseconds, each the median of several measurements.

    target_ms: tokens of a forward (the root and the drafted nodes) -> forward, logits and the copy of the choices.
    chain_ms: depth -> drafting a chain. level_ms: queries of a level -> what a level of that many queries, one of them
    with two continuations, costs more than a level of a chain. step_ms: what a speculative step takes besides (plan,
    acceptance, cache, bookkeeping). plain_ms: the same of a plain step.
    """

    target_ms: Mapping[int, float]
    chain_ms: Mapping[int, float]
    level_ms: Mapping[int, float]
    step_ms: float
    plain_ms: float

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

    def step(self, tree: DraftTree) -> float:
        """Milliseconds of a step that drafts ``tree``."""
        return interpolate(self.target_ms, len(tree) + 1) + self.draft(tree) + self.step_ms

    def as_json(self) -> dict[str, Any]:
        """The table with keys as text."""
        return {
            key: {str(size): ms for size, ms in value.items()} if isinstance(value, dict) else value
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
    """

    def __init__(self, target: HFTarget, head: DraftHead, context: list[int], max_nodes: int) -> None:
        self.target = target
        self.head = head
        self.request = head.features()
        self.ids = torch.tensor([context], device=target.device)
        self.max_nodes = max_nodes
        self.capacity = len(context) + max_nodes + 1
        self.cache = KVCache(target.spec.num_hidden_layers, self.capacity)
        positions = torch.arange(len(context), device=target.device)[None]
        with torch.inference_mode():
            self.features = target.forward_cached(self.ids, positions, None, None, self.cache, self.request)
            self.cache.commit(range(len(context)))

    def measure(self, max_queries: int, rounds: int, seed: int = 0) -> dict[str, dict[int, float]]:
        """``target_ms``, ``chain_ms`` and ``level_ms`` of a CostTable: medians of ``rounds``, in a new order each round."""
        depth = self.head.config.num_draft_tokens
        queries = [count for count in (1, 2, 4, 8, 16, 32, 64) if count < max_queries] + [max_queries]
        parts: dict[tuple[str, int], Callable[[], object]] = {}
        for size in sizes_up_to(self.max_nodes + 1):
            parts["target", size] = self._target(size)
        for deep in range(1, depth + 1):
            parts["chain", deep] = self._draft(DraftTree.chain(deep))
        for count in queries:
            parts["wide", count] = self._draft(wide_tree(count, depth))
        times = timed(parts, rounds, seed, self.target.device)
        chain = {size: ms for (part, size), ms in times.items() if part == "chain"}
        wide = {size: ms for (part, size), ms in times.items() if part == "wide"}
        return {
            "target_ms": {size: ms for (part, size), ms in times.items() if part == "target"},
            "chain_ms": chain,
            "level_ms": {count: (ms - chain[depth]) / depth for count, ms in wide.items()},
        }

    def _target(self, size: int) -> Callable[[], object]:
        """A target forward over ``size`` tokens that leaves the cache as it was."""
        has_full = "full_attention" in self.target.layer_types
        tree = DraftTree.chain(size - 1)
        plan = TreePlan(tree, self.capacity, self.target.sliding_window, has_full, self.target.device)
        length = self.cache.length
        repeated = self.ids[0].repeat(-(-size // length))[:size][None]

        def run() -> object:
            positions, (full, sliding) = plan.positions(length), plan.masks(length)
            features = self.target.forward_cached(repeated, positions, full, sliding, self.cache, self.request)
            return self.target.logits(features.last_hidden[0]).argmax(dim=-1).tolist()

        return run

    def _draft(self, tree: DraftTree) -> Callable[[], object]:
        """A draft of ``tree`` that takes in a few committed tokens, always the same."""
        proposer = HeadProposer(self.head, self.target, tree)
        length = self.ids.shape[1]
        state = proposer.begin(length)
        start = length - 1 - COMMITTED
        with torch.inference_mode():
            before = torch.arange(start, device=self.ids.device)
            first = DraftContext(self.ids[:, 1 : start + 1], self.features.select(before), 0)
            proposer.propose(state, first, tree.max_depth)
        following = torch.arange(start, length - 1, device=self.ids.device)
        context = DraftContext(self.ids[:, start + 1 :], self.features.select(following), start)
        return lambda: proposer.propose(state, context, tree.max_depth)


@torch.inference_mode()
def timed(
    parts: Mapping[tuple[str, int], Callable[[], object]], rounds: int, seed: int, device: torch.device
) -> dict[tuple[str, int], float]:
    """Median milliseconds of each part: ``rounds`` times all of them in a new order, after one untimed round."""
    order: Sequence[tuple[str, int]] = list(parts)
    shuffle = random.Random(seed)
    times: dict[tuple[str, int], list[float]] = {key: [] for key in order}
    for turn in range(rounds + 1):
        for key in shuffle.sample(order, len(order)):
            synchronize(device)
            begin = perf_counter()
            parts[key]()
            synchronize(device)
            if turn:
                times[key].append(1e3 * (perf_counter() - begin))
    return {key: median(values) for key, values in times.items()}
