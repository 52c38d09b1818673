"""Shapes of drafts: what is tuned, in words and as decode.json has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from specdraft.core.tree import DraftTree, TreeGrowth

Shape: TypeAlias = "DraftTree | TreeGrowth"
PLAIN = DraftTree((), ())
"""Plain decoding: nothing is drafted."""
SHAPE_KEYS = (
    "num_draft_tokens",
    "tree",
    "dynamic_total_tokens",
    "dynamic_depth",
    "dynamic_top_k",
)
"""The settings of ``decode`` that give a shape."""


def is_plain(shape: Shape) -> bool:
    """Whether nothing is drafted."""
    return isinstance(shape, DraftTree) and not len(shape)


def is_chain(shape: Shape) -> bool:
    """Whether ``shape`` is what ``decode.num_draft_tokens`` gives: a path of likeliest tokens, at least one."""
    return isinstance(shape, DraftTree) and bool(len(shape)) and shape == DraftTree.chain(len(shape))


def num_nodes(shape: Shape) -> int:
    """Drafted tokens of a step."""
    return shape.total_tokens if isinstance(shape, TreeGrowth) else len(shape)


def shape_json(shape: Shape) -> dict[str, Any]:
    """A shape as decode.json has it: ``plain``, and the settings of ``decode`` that give it."""
    found: dict[str, Any] = {"plain": is_plain(shape), **dict.fromkeys(SHAPE_KEYS)}
    if isinstance(shape, TreeGrowth):
        values = {"total_tokens": shape.total_tokens, "depth": shape.depth, "top_k": shape.top_k}
        found.update({f"dynamic_{name}": value for name, value in values.items()})
    elif is_chain(shape):
        found["num_draft_tokens"] = len(shape)
    elif len(shape):
        found["tree"] = shape.paths()
    return found


def describe(shape: Shape) -> str:
    """A shape in words."""
    return describe_json(shape_json(shape), shape.max_depth)


def describe_json(shape: Mapping[str, Any], depth: int | None = None) -> str:
    """What ``shape_json`` gave, in words. depth: of a tree, said where it is given."""
    if shape["plain"]:
        return "plain decoding"
    if shape["num_draft_tokens"]:
        return f"a chain of {shape['num_draft_tokens']}"
    if shape.get("dynamic_total_tokens"):
        levels = f"{shape['dynamic_depth']} levels of {shape['dynamic_top_k']}"
        return f"a grown tree of {shape['dynamic_total_tokens']} nodes, {levels}"
    return f"a tree of {len(shape['tree'])} nodes" + ("" if depth is None else f" and depth {depth}")
