"""torch.compile for the passes of decoding: one graph for every rounded number of rows, on caches that stay in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._dynamo import mark_static_address, maybe_mark_dynamic
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from specdraft.core.errors import ConfigError

COLUMNS = 256
"""A graph attends to a multiple of this many columns: a graph that is replayed is recorded once for each multiple."""
MAX_GRAPHS = 64


class StaticGraph:
    """A function of tensors as one compiled graph; on a CUDA device it is recorded as a CUDA graph and replayed.

    Args:
        name: of what is compiled.
        function: without anything in it that a graph cannot hold.
        device: where its tensors lie.

    Raises:
        ConfigError: there is no compiler.
    """

    def __init__(self, name: str, function: Callable[..., Any], device: torch.device) -> None:
        if device.type == "cpu":
            _check_compiler()
        self.name = name
        mode = "reduce-overhead" if device.type == "cuda" else None
        self._graph: Callable[..., Any] = torch.compile(function, mode=mode, fullgraph=True)

    def __call__(self, caches: Iterable[Tensor], biases: Iterable[Tensor], *args: Any) -> Any:
        """``function(*args)``.

        A replayed graph writes its results to the same place every time: the caller copies what it keeps, see ``kept``.

        Args:
            caches: those among ``args`` that keep their place in memory, ``[B, heads, L, d]`` with any L.
            biases: those among ``args`` that are as wide as the caches, ``[B, 1, n, L]``.
            args: of the function.
        """
        for cache in caches:
            mark_static_address(cache, guard=False)
            maybe_mark_dynamic(cache, 2)
        for bias in biases:
            maybe_mark_dynamic(bias, 3)
        with dynamo_config.patch(recompile_limit=MAX_GRAPHS), warnings.catch_warnings():
            # What inductor says of its own internals.
            warnings.simplefilter("ignore")
            return self._graph(*args)


def kept(result: Tensor) -> Tensor:
    """What a graph gave, safe from its next replay."""
    return result.clone() if result.device.type == "cuda" else result


def rounded(rows: int) -> int:
    """The power of two that ``rows`` are padded to: few graphs serve every tree."""
    return 1 << (rows - 1).bit_length()


def _check_compiler() -> None:
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ConfigError("target.compile: needs a C++ compiler, got none; install g++ or set it to false") from error
