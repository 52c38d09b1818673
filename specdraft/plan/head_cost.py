"""What training a head takes beside its weights: memory and operations of its own code, run on narrow copies and scaled up.

A copy has the head's depth, settings and attention heads and a fraction r of every width. On a row of T tokens the memory
that the forward pass leaves for the backward pass is a sum of terms in T, T^2 (attention), r T, r T^2 and, for tables and
copies of weights, r and r^2; operations are a sum of terms in r T, r T^2 and r^2 T. Six copies fix the factors, so that no
kind of head needs a formula of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from specdraft.core.types import Features, TargetSpec, TokenBatch, Unembedding
from specdraft.heads._config import HeadConfig
from specdraft.losses.alignment import build_draft_batch

WIDTHS = (4, 8)
"""Dimensions of an attention head in the copies."""
LENGTHS = (32, 64, 96)
BACKWARD = 2
"""Operations of the backward pass as a multiple of those of the forward pass: every product has two in return."""
PEAK = 1.1
"""The most that is held during the backward pass as a multiple of what it starts with; 1.03 to 1.2 for our kinds."""
SHARES = 16
VOCABULARY = 64
"""Tokens of the copies; what the real vocabulary takes is known exactly and added elsewhere."""


@dataclass(frozen=True)
class HeadCost:
    """What a row adds, as factors of T and T^2; both are without lm_heads.

    memory: in bytes, and what does not grow with the rows (rotary tables, copies of
    weights in lower precision). flops: operations, forward and backward.
    """

    memory: tuple[float, float, float]
    flops: tuple[float, float]

    def memory_bytes(self, rows: float, length: float) -> float:
        """What the backward pass of so many rows of ``length`` tokens starts with."""
        return max(0.0, rows * (self.memory[0] * length + self.memory[1] * length**2)) + max(0.0, self.memory[2])

    def row_flops(self, length: float) -> float:
        """Operations of a training step for a row of ``length`` tokens."""
        return max(0.0, self.flops[0] * length + self.flops[1] * length**2)


_KNOWN: dict[str, HeadCost] = {}
"""By settings; a process asks for few."""


def head_cost(config: HeadConfig, spec: TargetSpec, share: float, mixed_precision: str) -> HeadCost:
    """Measured on the CPU in some tenths of a second, once for the same settings.

    ``share``: supervised share of a row's tokens, taken to the nearest sixteenth.
    """
    share = max(1, round(share * SHARES)) / SHARES
    key = repr((config, spec, share, mixed_precision != "no"))
    if key not in _KNOWN:
        _KNOWN[key] = _fitted(config, spec, share, mixed_precision != "no")
    return _KNOWN[key]


def _fitted(config: HeadConfig, spec: TargetSpec, share: float, mixed: bool) -> HeadCost:
    points = [(width / spec.head_dim, length) for width in WIDTHS for length in LENGTHS]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = [
            _measure(_narrow(config, ratio), _narrow_spec(spec, ratio), length, share, mixed)
            for ratio, length in points
        ]
    memory = _fit(points, [bytes_ for bytes_, _ in found], _memory_terms)
    flops = _fit(points, [flops for _, flops in found], _flop_terms)
    # At r = 1.
    return HeadCost(
        (memory[0] + memory[2], memory[1] + memory[3], memory[4] + memory[5]), (flops[0] + flops[2], flops[1])
    )


def _memory_terms(ratio: float, length: float) -> list[float]:
    return [length, length**2, ratio * length, ratio * length**2, ratio, ratio**2]


def _flop_terms(ratio: float, length: float) -> list[float]:
    return [ratio * length, ratio * length**2, ratio**2 * length]


def _fit(
    points: Sequence[tuple[float, float]], values: Sequence[float], terms: Callable[[float, float], list[float]]
) -> list[float]:
    """Factors of the terms, by least squares on columns of equal size."""
    matrix = torch.tensor([terms(*point) for point in points], dtype=torch.float64)
    scale = matrix.norm(dim=0)
    wanted = torch.tensor(values, dtype=torch.float64)[:, None]
    solution = torch.linalg.lstsq(matrix / scale, wanted, driver="gelsd").solution[:, 0] / scale
    factors: list[float] = solution.tolist()
    return factors


def _narrow_spec(spec: TargetSpec, ratio: float) -> TargetSpec:
    def scaled(size: int) -> int:
        return max(2, round(size * ratio))

    return replace(
        spec,
        hidden_size=scaled(spec.hidden_size),
        intermediate_size=scaled(spec.intermediate_size),
        head_dim=scaled(spec.head_dim),
        vocab_size=VOCABULARY,
        eos_token_ids=(),
    )


def _narrow(config: HeadConfig, ratio: float) -> HeadConfig:
    changed: dict[str, Any] = {"draft_vocab_size": None, "draft_vocab_coverage": None}
    width = vars_of(config).get("intermediate_size")
    if width is not None:
        changed["intermediate_size"] = max(2, round(width * ratio))
    return replace(config, **changed)


def vars_of(config: HeadConfig) -> Mapping[str, Any]:
    """The settings of a kind by name."""
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def _measure(config: HeadConfig, spec: TargetSpec, length: int, share: float, mixed: bool) -> tuple[float, float]:
    """Bytes held at the end of the forward pass over one row, and operations of a training step."""
    head = config.build(spec).train()
    table = torch.randn(spec.vocab_size, spec.hidden_size)
    unembed = Unembedding(table)
    head.init_from_target(lambda ids: table[ids], unembed)
    tokens = _row(length, share, spec.vocab_size)
    num_aux = len(head.features().aux_layers)
    aux = torch.randn(1, length, num_aux * spec.hidden_size) if num_aux else None
    batch = build_draft_batch(tokens, Features(torch.randn(1, length, spec.hidden_size), aux))
    with tracked() as found, torch.autocast("cpu", torch.bfloat16) if mixed else nullcontext():
        steps = head(batch, lambda ids: table[ids], unembed)
    assert steps
    return found.at_end, (1 + BACKWARD) * found.flops


def _row(length: int, share: float, vocabulary: int) -> TokenBatch:
    answer = min(max(2, round(length * share)), length - 2)
    ones = torch.ones(1, length, dtype=torch.bool)
    positions = torch.arange(length)[None]
    return TokenBatch(
        input_ids=torch.randint(vocabulary, (1, length)),
        attention_mask=ones,
        loss_mask=positions >= length - answer,
        position_ids=positions,
        document_ids=torch.zeros_like(positions),
        row_ids=torch.zeros(1, dtype=torch.int64),
    )


@contextmanager
def tracked() -> Iterator[Tracker]:
    """Counts the bytes of the tensors made in the block (``peak``; ``at_end``: when it was left) and its ``flops``."""
    tracker = Tracker()
    with tracker:
        yield tracker
        tracker.at_end = tracker.now


class Tracker(TorchDispatchMode):
    """Counts the storages that operations make, until they are freed, and what products take.

    now, peak, at_end: bytes. flops: operations.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = self.at_end = self.flops = 0.0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(storage) for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        for storage in _storages(result):
            if id(storage) not in before:
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._known and self._known[key]() is storage:
            return

        def freed(reference: weakref.ref[Any]) -> None:
            self.now -= size
            if self._known.get(key) is reference:
                del self._known[key]

        self._known[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    if isinstance(value, Tensor):
        yield value.untyped_storage()
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _storages(item)
    elif isinstance(value, dict):
        yield from _storages(list(value.values()))
