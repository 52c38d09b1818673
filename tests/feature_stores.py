"""A small feature store of a tiny target, for the tests of what it keeps and of what goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdraft.core.types import FeatureRequest, TokenBatch
from specdraft.data.batching import collate
from specdraft.data.chat import TokenRow
from specdraft.data.feature_capture import capture_rows
from specdraft.data.feature_layout import (
    kept_positions,
)
from specdraft.data.feature_store import FeatureStore, StoreIdentity, store_identity
from specdraft.data.feature_writer import FeatureWriter
from specdraft.targets.hf import HFTarget
from tests.training import make_rows

ROWS = [*make_rows(10), TokenRow([5, 6, 7], [False] * 3), TokenRow([5, 6, 7], [True, True, False])]
"""The last two have nothing to store."""
BATCHES = [[[0], [1], [2]], [[3], [4], [10]], [[5], [6], [11]], [[7], [8], [9]]]
REQUEST = FeatureRequest((1, 3), last="none")


def rows_of(places: Any) -> list[TokenRow]:
    return [ROWS[place] for place in places]


def identity_of(target: HFTarget, request: FeatureRequest = REQUEST, precision: str = "fp32") -> StoreIdentity:
    return store_identity(target.spec, target.dtype, request, precision, {"identity": "x"}, len(ROWS))


def write(folder: Path, target: HFTarget, identity: StoreIdentity | None = None, **settings: Any) -> FeatureStore:
    """The whole store, its shards of about two batches each."""
    identity = identity or identity_of(target)
    writer = FeatureWriter(folder, identity, **{"shard_bytes": 12_000, **settings})
    try:
        store = FeatureStore(folder, identity, target.dtype)
        capture_rows(target, rows_of, BATCHES, writer, store, 0)
    finally:
        writer.release()
    store.refresh()
    return store


def batch(*places: int) -> TokenBatch:
    return collate(rows_of(places), 0, places)


def kept(tokens: TokenBatch, states: Tensor, request: FeatureRequest, which: int) -> Tensor:
    """The states of a batch at the positions that are stored."""
    parts = []
    for b in range(states.shape[0]):
        length = int(tokens.attention_mask[b].sum())
        parts.append(states[b, kept_positions(tokens.loss_mask[b, :length], request)[which]])
    return torch.cat(parts)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))
