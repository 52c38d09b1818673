"""The target's features of training rows: from the target, from a store, or from memory after their first use."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from specdraft.core.errors import DataError
from specdraft.core.types import FeatureRequest, Features, TokenBatch
from specdraft.data.feature_store import FeatureStore, StoredFeatures, documents
from specdraft.data.feature_writer import BudgetSpentError, FeatureWriter
from specdraft.targets.base import Target

REFRESH_S = 5.0
"""Seconds between two looks for rows that other processes have stored."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredBatch(TokenBatch):
    """A batch that brings its stored features along."""

    stored: StoredFeatures

    @property
    def tokens(self) -> TokenBatch:
        """Without the features."""
        return TokenBatch(**_token_fields(self))

    def to(self, device: torch.device | str) -> StoredBatch:
        """The same batch on ``device``."""
        return StoredBatch(**_token_fields(self.tokens.to(device)), stored=self.stored.to(device))

    def pinned(self) -> StoredBatch:
        """The same batch in page-locked memory."""
        return StoredBatch(**_token_fields(self.tokens.pinned()), stored=self.stored.pinned())


def _token_fields(tokens: TokenBatch) -> dict[str, Tensor]:
    return {name: getattr(tokens, name) for name in TokenBatch.__dataclass_fields__}


class StoredRows:
    """A store as training uses it. With a writer, rows that it lacks are captured and added; else it must hold all."""

    def __init__(self, store: FeatureStore, writer: FeatureWriter | None = None) -> None:
        self.store = store
        self._writer = writer
        self._must_hold = writer is None
        self._looked = time.monotonic()

    def attach(self, tokens: TokenBatch) -> TokenBatch:
        """The batch with its features, if all its rows are stored. Called by the thread that makes batches.

        Raises:
            DataError: a row cannot be read, or is not stored though none is captured.
        """
        stored = self.store.read(tokens)
        if stored is None and time.monotonic() - self._looked > REFRESH_S:
            self.store.refresh()
            self._looked = time.monotonic()
            stored = self.store.read(tokens)
        if stored is not None:
            return StoredBatch(**_token_fields(tokens), stored=stored)
        if self._must_hold:
            rows = [row for row, b, start, stop in documents(tokens) if tokens.loss_mask[b, start + 2 : stop].any()]
            lacking = self.store.missing(rows)[0]
            raise DataError(
                f"features.dir: the store lacks row {lacking}, got {self.store.folder}; run specdraft prepare with the same "
                "settings, or use features=hybrid"
            )
        return tokens

    def add(self, tokens: TokenBatch, features: Features) -> None:
        """Stores what was captured of a batch, as long as the budget lasts.

        Raises:
            DataError: a state is not finite, or the store cannot be written.
        """
        if self._writer is None:
            return
        try:
            self._writer.add_batch(tokens, features, self.store)
        except BudgetSpentError as error:
            logger.warning("%s; the other rows are captured in every epoch", str(error).partition(";")[0])
            self._writer.release()
            self._writer = None

    def close(self) -> None:
        """Writes what was added last.

        Raises:
            DataError: it cannot be written.
        """
        if self._writer is not None:
            try:
                self._writer.close()
            except BudgetSpentError as error:
                logger.warning("%s", str(error).partition(";")[0])


class FeatureMemory:
    """Captures features by batch and keeps them by row, so that a second epoch needs no target forward.

    A row's states are those of the batch in which it was captured; in another batch the target's kernels may round them
    otherwise, so training with a memory equals training without it up to rounding.

    Args of the constructor: ``limit_bytes`` is what the kept states may take, on the target's device; 0 keeps nothing.
    ``store``: what batches come from that bring their features along, and where others are added.
    """

    def __init__(
        self, target: Target, request: FeatureRequest, limit_bytes: int, store: StoredRows | None = None
    ) -> None:
        self.target = target
        self.request = request
        self.limit_bytes = limit_bytes
        self.store = store
        self.num_bytes = 0
        self._rows: dict[int, Features] = {}

    def holds(self, tokens: TokenBatch) -> bool:
        """Whether all rows of a batch are kept here."""
        return bool(self._rows) and all(place in self._rows for place, *_ in documents(tokens))

    def capture(self, tokens: TokenBatch) -> Features:
        """Features of ``tokens``, ``[B, T, ·]``; what stands on padding is arbitrary but finite."""
        if not self.limit_bytes:
            return self._found(tokens)
        places = list(documents(tokens))
        known = [(b, start, self._rows.get(row)) for row, b, start, _ in places]
        if all(features is not None for _, _, features in known):
            parts = [(b, start, features) for b, start, features in known if features is not None]
            last = _laid_out([(b, start, own.last_hidden) for b, start, own in parts], tokens)
            aux = [(b, start, own.aux_hidden) for b, start, own in parts if own.aux_hidden is not None]
            return Features(last, _laid_out(aux, tokens) if aux else None)
        features = self._found(tokens)
        self._keep(places, features)
        return features

    def _found(self, tokens: TokenBatch) -> Features:
        """What a batch brought along, or the target's states, which then join the store."""
        if isinstance(tokens, StoredBatch):
            return tokens.stored.features()
        features = self.target.capture(tokens, self.request)
        if self.store is not None:
            self.store.add(tokens, features)
        return features

    def _keep(self, places: list[tuple[int, int, int, int]], features: Features) -> None:
        """Copies of the rows that are new, as long as there is room. Stand-in rows (negative ids) are not kept."""
        for row, b, start, stop in places:
            if row < 0 or row in self._rows:
                continue
            aux = None if features.aux_hidden is None else features.aux_hidden[b, start:stop]
            parts = [part for part in (features.last_hidden[b, start:stop], aux) if part is not None]
            size = sum(part.numel() * part.element_size() for part in parts)
            if self.num_bytes + size > self.limit_bytes:
                continue
            self.num_bytes += size
            self._rows[row] = Features(parts[0].clone(), None if aux is None else parts[1].clone())


def _laid_out(parts: list[tuple[int, int, Tensor]], tokens: TokenBatch) -> Tensor:
    """States ``[t_i, H]`` at their rows and columns -> ``[B, T, H]``, zeros elsewhere."""
    first = parts[0][2]
    out = torch.zeros(*tokens.input_ids.shape, first.shape[-1], dtype=first.dtype, device=first.device)
    for b, start, states in parts:
        out[b, start : start + states.shape[0]] = states
    return out
