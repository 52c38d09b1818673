"""Small tools of the decoding tests: one row as a batch, and a count of what a tensor tells the host."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from specdraft.core.types import TokenBatch

READS = ("tolist", "item", "__bool__", "__int__", "__index__", "__float__", "nonzero")
"""What makes the host wait for the device."""


def one_row(ids: list[int]) -> TokenBatch:
    """A batch of one document, all of it supervised."""
    columns = torch.arange(len(ids))[None]
    return TokenBatch(
        torch.tensor([ids]), columns >= 0, columns >= 0, columns, columns * 0, torch.zeros(1, dtype=torch.int64)
    )


def count_reads(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts the calls of ``READS`` from now on, by name, until ``monkeypatch`` is undone."""
    counts = dict.fromkeys(READS, 0)

    def counted(name: str) -> Any:
        inner = getattr(torch.Tensor, name)

        def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return inner(self, *args, **kwargs)

        return call

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, counted(name))
    return counts


@contextmanager
def only_new_objects() -> Iterator[None]:
    """Inside, ``live_storages`` looks at what was made inside: what other tests left takes it seconds a call."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def live_storages() -> dict[int, int]:
    """Address -> bytes of all memory that tensors hold; packed weights, which do not tell, are left out."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors if not tensor.is_mkldnn and not tensor.is_meta]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
