"""Writing a feature store: by several processes, within a budget, whole shards only, and on from where a kill left it."""

from __future__ import annotations

import logging
import math
import re
import shutil
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from specdraft.core.errors import ConfigError, DataError
from specdraft.core.files import write_json
from specdraft.core.threads import background_thread
from specdraft.core.types import Features, TokenBatch
from specdraft.data._quantized import DTYPES, LARGEST
from specdraft.data.feature_layout import CODE_BYTES, Places, kept_positions
from specdraft.data.feature_shards import RowStates, Shard, row_key, shard_content, write_shard
from specdraft.data.feature_store import (
    FORMAT,
    STORE_NAME,
    FeatureStore,
    ShardEntry,
    StoreIdentity,
    check_identity,
    documents,
    index_name,
    read_index,
)

GIB = 1 << 30
_SHARD = re.compile(r"shard-(\d{4})-(\d{6})\.safetensors")
_TEMPORARY = re.compile(r"\.shard-(\d{4})-(\d{6})\.(\d+)\.tmp")

logger = logging.getLogger(__name__)


def _shard_number(path: Path) -> tuple[int, int]:
    """Process and number of a shard, whole or not; (-1, -1) of other files."""
    found = _SHARD.fullmatch(path.name) or _TEMPORARY.fullmatch(path.name)
    return (int(found[1]), int(found[2])) if found else (-1, -1)


def _is_finite(states: Tensor) -> bool:
    """Whether all numbers are; their extremes tell it, forty times as fast on a CPU as one by one."""
    return not states.numel() or all(math.isfinite(extreme) for extreme in torch.aminmax(states))


class BudgetSpentError(DataError):
    """The store has taken all that it may."""


def check_room(folder: Path, num_bytes: int, budget_bytes: int | None) -> None:
    """Whether a store of ``num_bytes`` may be written to ``folder``, where part of it may be already.

    Raises:
        ConfigError: it exceeds the budget, or what the disk has free.
    """
    lower = "use features.precision=int8, fewer rows (data.limit), or features=online"
    if budget_bytes is not None and num_bytes > budget_bytes:
        raise ConfigError(
            f"features.budget_gib: the store needs {num_bytes / GIB:.2f} GiB, got {budget_bytes / GIB:.2f}; raise it, "
            f"or {lower}"
        )
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free, written = shutil.disk_usage(place).free, used_bytes(folder)
    if num_bytes - written > free:
        raise ConfigError(
            f"features.dir: the store needs {(num_bytes - written) / GIB:.2f} GiB more, got a disk with "
            f"{free / GIB:.2f} GiB free; choose another folder, or {lower}"
        )


def used_bytes(folder: Path) -> int:
    """What the shards in a folder take, with those that are being written."""
    total = 0
    for path in folder.iterdir() if folder.is_dir() else ():
        pending = _TEMPORARY.fullmatch(path.name)
        try:
            if pending is not None or _SHARD.fullmatch(path.name):
                total += max(path.stat().st_size, int(pending[3]) if pending else 0)
        except FileNotFoundError:  # another process has just given it its name
            continue
    return total


class FeatureWriter:
    """Adds rows to a store; each process of a run has a writer with its rank. Close it: that writes the last shard.

    A shard is written by a thread while the next one fills. What was not in a whole shard when a process is killed is
    captured again; nothing else is.
    """

    def __init__(
        self,
        folder: Path,
        identity: StoreIdentity,
        *,
        rank: int = 0,
        world_size: int = 1,
        shard_bytes: int = 256 << 20,
        budget_bytes: int | None = None,
        verify: bool = False,
    ) -> None:
        """Opens or makes the store, mends its index and drops shards that are not what was written.

        verify: whether all bytes of all shards are compared with their checksums; else their sizes and tables.

        Raises:
            DataError: the store is for something else, another run writes it, or the folder cannot be written.
        """
        self.folder, self.identity, self.rank = folder, identity, rank
        self.shard_bytes, self.budget_bytes = shard_bytes, budget_bytes
        self.num_rows = 0
        self._added = bytearray(identity.num_rows)
        self._rows: list[RowStates] = []
        self._filled = 0
        self._pending: Future[None] | None = None
        self._pool = background_thread("features")
        self._lock = FileLock(folder / f"writer-{rank:04d}.lock")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            self._entries = self._prepare(world_size, verify)
        except Timeout as error:
            raise DataError(
                f"features.dir: another run is writing the store, got {folder}; wait for it, or use another folder"
            ) from error
        except OSError as error:
            self._lock.release()
            raise self._unwritable(error) from error
        except DataError:
            self._lock.release()
            raise
        numbers = [number for owner, number in map(_shard_number, folder.iterdir()) if owner == rank]
        self._number = max(numbers, default=-1)

    def _prepare(self, world_size: int, verify: bool) -> list[ShardEntry]:
        """Makes the store or mends what this process is in charge of; the process's own shards."""
        if not check_identity(self.folder, self.identity):
            write_json(self.folder / STORE_NAME, {"format": FORMAT, **asdict(self.identity)})
        for rank in [self.rank, *(self._left_over(world_size) if self.rank == 0 else ())]:
            self._mend(rank, verify)
        return read_index(self.folder / index_name(self.rank))

    def _left_over(self, world_size: int) -> list[int]:
        """Ranks beyond those of this run that an earlier run with more processes had."""
        found = {owner for owner, _ in map(_shard_number, self.folder.iterdir())}
        return sorted(rank for rank in found if rank >= world_size)

    def _mend(self, rank: int, verify: bool) -> None:
        """Makes the index of ``rank`` list its whole shards and nothing else; removes what is torn."""
        own = sorted(path for path in self.folder.iterdir() if _shard_number(path)[0] == rank)
        for torn in own:
            if _TEMPORARY.fullmatch(torn.name):
                torn.unlink()
        path = self.folder / index_name(rank)
        try:
            listed = {entry.file: entry for entry in read_index(path)} if path.exists() else {}
        except DataError:
            listed = {}
        entries = []
        for shard_path in own:
            if not _SHARD.fullmatch(shard_path.name):
                continue
            entry = listed.get(shard_path.name)
            size = shard_path.stat().st_size
            try:
                shard = Shard(shard_path, self.identity.digest)
                # One that no index lists was finished just before a kill.
                if (verify or entry is None or entry.num_bytes != size) and not shard.is_whole():
                    raise DataError(f"features.dir: {shard_path.name} is not what was written")
            except DataError as error:
                logger.warning("%s: removed, its rows are captured again", str(error).partition(", got")[0])
                shard_path.unlink()
                continue
            entries.append(ShardEntry(shard_path.name, shard.rows.numel(), size))
        for name in sorted(listed.keys() - {entry.file for entry in entries}):
            if not (self.folder / name).exists():
                logger.warning("features.dir: %s is missing: its rows are captured again", name)
        self._write_index(rank, entries)

    def _write_index(self, rank: int, entries: list[ShardEntry]) -> None:
        write_json(self.folder / index_name(rank), {"format": FORMAT, "shards": [asdict(entry) for entry in entries]})

    def add_batch(self, tokens: TokenBatch, features: Features, known: FeatureStore) -> None:
        """Adds the rows of a batch that ``known`` does not hold; both on any device.

        Raises:
            DataError: a state is not finite, or an earlier shard could not be written.
        """
        request, length = self.identity.request, tokens.input_ids.shape[1]
        wanted: list[tuple[int, int, tuple[int, int]]] = []
        last_at: list[Places] = []
        aux_at: list[Places] = []
        ids, masks = tokens.input_ids.cpu().numpy(), tokens.loss_mask.cpu().numpy()
        for place, b, start, stop in documents(tokens):
            last, aux = kept_positions(masks[b, start:stop], request)
            if place < 0 or not last.size or known.has(place) or self._added[place]:
                continue
            key = row_key(ids[b, start:stop], masks[b, start:stop])
            wanted.append((place, key, (last.size, aux.size)))
            last_at.append(last + b * length + start)
            aux_at.append(aux + b * length + start)
        if not wanted:
            return
        last_states = self._taken(features.last_hidden, last_at)
        aux_states = None if features.aux_hidden is None else self._taken(features.aux_hidden, aux_at)
        parts = last_states.split([counts[0] for _, _, counts in wanted])
        layers = None if aux_states is None else aux_states.split([counts[1] for _, _, counts in wanted])
        for i, (place, key, _) in enumerate(wanted):
            self.add(RowStates(place, key, parts[i], None if layers is None else layers[i]))

    def _taken(self, states: Tensor, places: list[Places]) -> Tensor:
        """States ``[B, T, W]`` at flat positions, on the host."""
        taken = states.flatten(0, 1).index_select(0, torch.from_numpy(np.concatenate(places)).to(states.device))
        if self.identity.precision not in LARGEST:  # those with scales are made from the states as they are
            taken = taken.to(DTYPES[self.identity.precision])
        return taken.cpu()

    def add(self, row: RowStates) -> None:
        """Adds one row, with the states at ``kept_positions``. It must not be in the store.

        Raises:
            DataError: the states are not those of a row of this store or not finite, or an earlier shard could not be
                written.
        """
        identity = self.identity
        width = len(identity.aux_layers) * identity.hidden_size
        shapes = (row.last.shape[1:], None if row.aux is None else row.aux.shape[1:])
        if shapes != ((identity.hidden_size,), (width,) if width else None) or not 0 <= row.row < identity.num_rows:
            raise DataError(
                f"features.dir: a row does not fit the store, got row {row.row} with states of {shapes}; give "
                f"{identity.hidden_size} and {width} numbers a position, for rows 0 to {identity.num_rows - 1}"
            )
        for states in (row.last, row.aux):
            if states is not None and not _is_finite(states):
                raise DataError(
                    f"target.dtype: the hidden states of row {row.row} are not finite, got {identity.dtype}; use another "
                    "dtype, or leave the row out"
                )
        self._rows.append(row)
        self.num_rows += 1
        self._added[row.row] = 1
        numbers = row.last.numel() + (0 if row.aux is None else row.aux.numel())
        self._filled += numbers * CODE_BYTES[identity.precision]
        if self._filled >= self.shard_bytes:
            self._submit()

    def _submit(self) -> None:
        """Hands the rows that have come together to the thread, once it is done with those before."""
        self.wait()
        rows, self._rows, self._filled = self._rows, [], 0
        self._pending = self._pool.submit(self._commit, rows)

    def wait(self) -> None:
        """Returns when every shard that was begun is on the disk.

        Raises:
            DataError: one could not be written, or would exceed the budget.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def flush(self) -> None:
        """Writes all rows added so far.

        Raises:
            DataError: see ``wait``.
        """
        if self._rows:
            self._submit()
        self.wait()

    def _commit(self, rows: list[RowStates]) -> None:
        content = shard_content(rows, self.identity.precision, self.identity.hidden_size)
        size, number = content.num_bytes, self._number + 1
        name = f"shard-{self.rank:04d}-{number:06d}"
        temporary, path = self.folder / f".{name}.{size}.tmp", self.folder / f"{name}.safetensors"
        try:
            # The file of that name is what other processes count until it is whole.
            with FileLock(self.folder / "budget.lock"):
                self._check_budget(size)
                temporary.touch()
            write_shard(temporary, path, content, self.identity.digest)
            self._number = number
            self._entries.append(ShardEntry(path.name, len(rows), path.stat().st_size))
            self._write_index(self.rank, self._entries)
        except OSError as error:
            raise self._unwritable(error) from error
        finally:
            temporary.unlink(missing_ok=True)

    def _check_budget(self, size: int) -> None:
        if self.budget_bytes is None:
            return
        used = used_bytes(self.folder)
        if used + size > self.budget_bytes:
            raise BudgetSpentError(
                f"features.budget_gib: the store has {used / GIB:.2f} GiB and needs more, got {self.budget_bytes / GIB:.2f}; "
                "raise it and start again, which goes on from here"
            )

    def _unwritable(self, error: BaseException) -> DataError:
        return DataError(
            f"features.dir: cannot be written ({error}), got {self.folder}; free space or choose another folder, and start "
            "again, which goes on from here"
        )

    def close(self) -> None:
        """Writes what is left and lets others write the store.

        Raises:
            DataError: see ``wait``.
        """
        try:
            self.flush()
        finally:
            self.release()

    def release(self) -> None:
        """Lets others write the store; rows that are not in a shard yet are given up."""
        self._pool.shutdown(cancel_futures=True)
        self._lock.release()
