"""A folder of stored hidden states: what they are of, its index, and reading them by batch."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdraft.core.errors import DataError
from specdraft.core.types import FeatureRequest, Features, TargetSpec, TokenBatch
from specdraft.data.feature_layout import Places, kept_positions
from specdraft.data.feature_shards import Shard, row_key, shard_error

FORMAT = 1
STORE_NAME = "store.json"
MAX_OPEN = 64
"""Shards that are mapped at the same time."""
PAGES_BYTES = 256 << 20
"""After so many bytes read, the pages of the mapped shards are given back."""


@dataclass(frozen=True, kw_only=True)
class StoreIdentity:
    """What the states of a store are of. Two stores that agree in all of it hold the same."""

    target: str
    """Name of the target."""
    revision: str | None
    fingerprint: str
    """See ``TargetSpec.fingerprint``."""
    dtype: str
    """Of the target when its states were captured."""
    hidden_size: int
    aux_layers: tuple[int, ...]
    """As in ``FeatureRequest``."""
    last: str
    precision: str
    data: str
    """Digest of what the rows were made of."""
    num_rows: int
    final_norm: bool = True
    """The last hidden state is after the target's final norm. There is no store of the other kind."""

    @property
    def request(self) -> FeatureRequest:
        """What is stored of every row."""
        return FeatureRequest(self.aux_layers, self.last)

    @property
    def digest(self) -> str:
        """16 hexadecimal digits. The name and the revision of a target whose weights are the same do not matter."""
        values = {key: value for key, value in asdict(self).items() if key not in ("target", "revision")}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def store_identity(
    spec: TargetSpec,
    dtype: torch.dtype,
    request: FeatureRequest,
    precision: str,
    manifest: Mapping[str, Any],
    num_rows: int,
) -> StoreIdentity:
    """The identity of the store of a target, a head's request and prepared data with this manifest."""
    data = hashlib.sha256(json.dumps(manifest["identity"], sort_keys=True).encode()).hexdigest()[:16]
    return StoreIdentity(
        target=spec.name,
        revision=spec.revision,
        fingerprint=spec.fingerprint,
        dtype=str(dtype).removeprefix("torch."),
        hidden_size=spec.hidden_size,
        aux_layers=tuple(request.aux_layers),
        last=request.last,
        precision=precision,
        data=data,
        num_rows=num_rows,
    )


WHAT = {
    "fingerprint": ("target", "target"),
    "dtype": ("dtype of the target", "target.dtype"),
    "hidden_size": ("target", "target"),
    "aux_layers": ("choice of layers", "head.aux_layers"),
    "last": ("kind of head", "head"),
    "precision": ("precision", "features.precision"),
    "data": ("data", "data"),
    "num_rows": ("data", "data"),
    "final_norm": ("final norm", "features.dir"),
}
"""Field of an identity that must agree -> what differs, and the setting that says so."""


def check_identity(folder: Path, expected: StoreIdentity) -> bool:
    """Whether ``folder`` holds a store, which must then be the expected one.

    Raises:
        DataError: it is for something else, or cannot be read.
    """
    path = folder / STORE_NAME
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.pop("format") != FORMAT:
            raise ValueError(f"not of format {FORMAT}")
        found["aux_layers"] = tuple(found["aux_layers"])
        stored = StoreIdentity(**found)
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"features.dir: {STORE_NAME} cannot be read ({error}), got {folder}; remove the folder and run specdraft prepare"
        ) from error
    for name, (what, key) in WHAT.items():
        own, wanted = getattr(stored, name), getattr(expected, name)
        if own != wanted:
            shown = (stored.target, expected.target) if name in ("fingerprint", "hidden_size") else (own, wanted)
            raise DataError(
                f"features.dir: the store is for another {what} ({shown[0]}), got {shown[1]} in {folder}; "
                f"use another folder, or the {key} that it was made with"
            )
    return True


@dataclass(frozen=True)
class ShardEntry:
    """A shard as the index lists it."""

    file: str
    num_rows: int
    num_bytes: int


def index_name(rank: int) -> str:
    """The part of the index that a process keeps."""
    return f"index-{rank:04d}.json"


def read_index(path: Path) -> list[ShardEntry]:
    """The shards that a part of the index lists.

    Raises:
        DataError: it cannot be read.
    """
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        return [ShardEntry(**{f.name: entry[f.name] for f in fields(ShardEntry)}) for entry in listed["shards"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"features.dir: {path.name} cannot be read ({error}), got {path.parent}; run specdraft prepare with the same "
            "settings, which makes it anew from the shards"
        ) from error


@dataclass(frozen=True)
class StoredFeatures:
    """The stored states of a batch, before they are laid out: ``last[i]`` stands at flat position ``last_at[i]``, ``b*T+t``.

    last: ``[n, H]``; aux: ``[m, A*H]`` or None. shape: (B, T).
    """

    shape: tuple[int, int]
    last: Tensor
    last_at: Tensor
    aux: Tensor | None
    aux_at: Tensor

    def to(self, device: torch.device | str) -> StoredFeatures:
        """The same on ``device``."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> StoredFeatures:
        """The same in page-locked memory."""
        return self._mapped(Tensor.pin_memory)

    def _mapped(self, change: Any) -> StoredFeatures:
        aux = None if self.aux is None else change(self.aux)
        return StoredFeatures(self.shape, change(self.last), change(self.last_at), aux, change(self.aux_at))

    def features(self) -> Features:
        """The states in their places, zeros where nothing reads them."""
        aux = None if self.aux is None else self._laid_out(self.aux, self.aux_at)
        return Features(self._laid_out(self.last, self.last_at), aux)

    def _laid_out(self, states: Tensor, places: Tensor) -> Tensor:
        rows, length = self.shape
        whole = states.new_zeros(rows * length, states.shape[-1]).index_copy_(0, places, states)
        return whole.view(rows, length, -1)


def documents(tokens: TokenBatch) -> Iterator[tuple[int, int, int, int]]:
    """Place in the data set, row of the batch, first column and the column behind the last, of every conversation."""
    for b, (places, numbers) in enumerate(
        zip(tokens.row_ids.view(tokens.input_ids.shape[0], -1).tolist(), tokens.document_ids.tolist(), strict=True)
    ):
        start = 0
        for d, place in enumerate(places):
            stop = start + numbers.count(d)
            if stop > start:
                yield place, b, start, stop
            start = stop


class FeatureStore:
    """Reads a store. Shards that others add are seen after ``refresh``; nothing is ever written here."""

    def __init__(self, folder: Path, identity: StoreIdentity, dtype: torch.dtype) -> None:
        """``dtype``: of the states that are read, the target's.

        Raises:
            DataError: no store, one of something else, or a part of the index or a shard's table is missing or torn.
        """
        if not check_identity(folder, identity):
            raise DataError(
                f"features.dir: no feature store, got {folder}; run specdraft prepare with the same settings"
            )
        self.folder, self.identity, self.dtype = folder, identity, dtype
        self.num_bytes = 0
        self._places = torch.full((identity.num_rows, 2), -1, dtype=torch.int32)
        self._files: list[str] = []
        self._known: set[str] = set()
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._touched = 0
        self.refresh()

    def refresh(self) -> None:
        """Takes in the shards that were added since.

        Raises:
            DataError: see the constructor.
        """
        for path in sorted(self.folder.glob("index-*.json")):
            for entry in read_index(path):
                if entry.file not in self._known:
                    self._add(entry)

    def _add(self, entry: ShardEntry) -> None:
        path = self.folder / entry.file
        if not path.is_file():
            raise shard_error(path, "is missing")
        size = path.stat().st_size
        if size != entry.num_bytes:
            raise shard_error(path, f"has {size:,} bytes and not the {entry.num_bytes:,} that were written")
        number = len(self._files)
        shard = Shard(path, self.identity.digest)
        if shard.rows.numel() and not 0 <= int(shard.rows.min()) <= int(shard.rows.max()) < len(self._places):
            raise shard_error(path, "holds rows that the data does not have")
        self._files.append(entry.file)
        self._known.add(entry.file)
        self.num_bytes += entry.num_bytes
        fresh = self._places[shard.rows, 0] < 0
        slots = torch.arange(shard.rows.numel(), dtype=torch.int32)[fresh]
        self._places[shard.rows[fresh]] = torch.stack([torch.full_like(slots, number), slots], 1)
        self._keep(number, shard)

    def _keep(self, number: int, shard: Shard) -> None:
        self._open[number] = shard
        while len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)

    def _shard(self, number: int) -> Shard:
        if number in self._open:
            self._open.move_to_end(number)
        else:
            self._keep(number, Shard(self.folder / self._files[number], self.identity.digest))
        return self._open[number]

    def has(self, row: int) -> bool:
        """Whether the row at a place of the data set is stored."""
        return int(self._places[row, 0]) >= 0

    @property
    def num_rows(self) -> int:
        """Rows that are stored."""
        return int((self._places[:, 0] >= 0).sum())

    def missing(self, rows: Iterable[int]) -> list[int]:
        """Those of ``rows`` that are not stored."""
        places = torch.tensor(list(rows), dtype=torch.int64)
        lacking: list[int] = places[self._places[places, 0] < 0].tolist()
        return lacking

    def read(self, tokens: TokenBatch) -> StoredFeatures | None:
        """The states of a batch in host memory; None if one of its rows is not stored.

        Stand-in rows (negative places) and rows without anything supervised have none.

        Raises:
            DataError: a shard is not what was written, or a row was captured from other tokens.
        """
        request, length = self.identity.request, tokens.input_ids.shape[1]
        ids, masks = tokens.input_ids.numpy(), tokens.loss_mask.numpy()
        found = []
        for place, b, start, stop in documents(tokens):
            if place < 0:
                continue
            mask = masks[b, start:stop]
            last, aux = kept_positions(mask, request)
            if not last.size:
                continue
            number, slot = self._places[place].tolist()
            if number < 0:
                return None
            shard, offset = self._shard(number), b * length + start
            if shard.key(slot) != row_key(ids[b, start:stop], mask) or shard.counts(slot) != (last.size, aux.size):
                raise DataError(
                    f"features.dir: {shard.path.name} holds row {place} of other data, got {self.folder}; remove the "
                    "folder and run specdraft prepare"
                )
            found.append((shard, slot, last + offset, aux + offset))
        return self._gathered(found, (tokens.input_ids.shape[0], length))

    def _gathered(self, found: list[tuple[Shard, int, Places, Places]], shape: tuple[int, int]) -> StoredFeatures:
        """Reads the rows, each given by shard, slot and its flat positions of both kinds."""
        size, layers = self.identity.hidden_size, len(self.identity.aux_layers)
        none = np.zeros(0, np.int64)
        last_at = torch.from_numpy(np.concatenate([none, *(at for _, _, at, _ in found)]))
        aux_at = torch.from_numpy(np.concatenate([none, *(at for _, _, _, at in found)]))
        last = torch.empty(last_at.numel(), size, dtype=self.dtype)
        aux = torch.empty(aux_at.numel(), layers * size, dtype=self.dtype) if layers else None
        for shard, slot, _, _ in found:
            shard.announce(slot)
        ends = [0, 0]
        for shard, slot, own_last, own_aux in found:
            stops = [ends[0] + own_last.size, ends[1] + own_aux.size]
            shard.read(slot, last[ends[0] : stops[0]], None if aux is None else aux[ends[1] : stops[1]])
            ends = stops
        self._touched += sum(t.numel() * t.element_size() for t in (last, aux) if t is not None)
        if self._touched > PAGES_BYTES:
            self._touched = 0
            for shard in self._open.values():
                shard.forget_pages()
        return StoredFeatures(shape, last, last_at, aux, aux_at)
