"""A prepared data set on disk: token ids and loss masks in Arrow shards, and the manifest that says what they were made of."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from specdraft.core.errors import DataError
from specdraft.core.files import file_sha256, replacing, sync
from specdraft.data.chat import ChatRenderer, TokenRow, tokenizer_hash
from specdraft.data.shards import TokenRows, TokenShard, write_batch

FORMAT = 2
MANIFEST_NAME = "manifest.json"
RELEASE_READS = 1024
"""Rows read one by one after which the memory of their pages is given back."""


@dataclass(frozen=True)
class TokenBlock:
    """Rows that follow each other. input_ids: ``[N]`` int32. loss_mask: ``[N]`` bool, True = supervised.

    offsets: ``[R+1]`` int64, row ``first_row + i`` is ``offsets[i]:offsets[i+1]``.
    """

    first_row: int
    input_ids: Tensor
    loss_mask: Tensor
    offsets: Tensor


class PreparedData(Sequence[TokenRow]):
    """R rows in shards that stay on the disk; several processes that open the same folder share what is in memory of it.

    manifest: see ``prepare.prepare``.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], shards: Sequence[TokenShard]) -> None:
        self.folder, self.manifest = folder, manifest
        self._shards = list(shards)
        self._ends = np.cumsum([len(shard) for shard in self._shards]).tolist()
        self._reads = 0

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends else 0

    @cached_property
    def lengths(self) -> array[int]:
        """Tokens of every row, 8 bytes each."""
        lengths = array("q")
        for shard in self._shards:
            lengths.frombytes(np.diff(shard.offsets).tobytes())
        return lengths

    @overload
    def __getitem__(self, index: int) -> TokenRow: ...

    @overload
    def __getitem__(self, index: slice) -> list[TokenRow]: ...

    def __getitem__(self, index: int | slice) -> TokenRow | list[TokenRow]:
        return self.rows(range(*index.indices(len(self)))) if isinstance(index, slice) else self.row(index)

    def row(self, index: int) -> TokenRow:
        """One row."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        number = bisect_right(self._ends, index)
        row = self._shards[number].row(index - (self._ends[number - 1] if number else 0))
        self._reads += 1
        if self._reads % RELEASE_READS == 0:
            self._release()
        return row

    def rows(self, indices: Sequence[int]) -> list[TokenRow]:
        """Several rows, in the order of ``indices``."""
        return [self.row(index) for index in indices]

    def blocks(self) -> Iterator[TokenBlock]:
        """All rows, shard by shard; one of them is in memory."""
        first = 0
        for shard in self._shards:
            mask = shard.mask(0, len(shard.ids))
            tensors = (torch.from_numpy(np.array(values)) for values in (shard.ids, mask, shard.offsets))
            yield TokenBlock(first, *tensors)
            first += len(shard)
            shard.release()

    def _release(self) -> None:
        for shard in self._shards:
            shard.release()


def token_counts(data: PreparedData, vocab_size: int) -> Tensor:
    """``[V]`` int64: how often each token is supervised; the statistics a draft vocabulary is chosen by.

    Raises:
        DataError: a token lies outside the target's vocabulary, so the data was prepared for another target.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for block in data.blocks():
        highest = int(block.input_ids.max()) if block.input_ids.numel() else 0
        if highest >= vocab_size:
            raise DataError(
                f"data.cache_dir: the rows hold token {highest} and the target has {vocab_size}, got "
                f"{data.folder}; prepare the data for this target"
            )
        counts += torch.bincount(block.input_ids[block.loss_mask].long(), minlength=vocab_size)
    return counts


def held_out_counts(data: PreparedData, vocab_size: int, every: int = 10) -> tuple[Tensor, Tensor] | None:
    """Two ``token_counts``: of the rows but one in ``every``, and of these; None with fewer than ``every`` rows.

    What is chosen by the first is measured fairly by the second.
    """
    if len(data) < every:
        return None
    kept, held = (torch.zeros(vocab_size, dtype=torch.int64) for _ in range(2))
    for block in data.blocks():
        rows = torch.arange(block.first_row, block.first_row + block.offsets.numel() - 1)
        left_out = torch.repeat_interleave(rows % every == 0, block.offsets.diff())
        for counts, mask in ((kept, block.loss_mask & ~left_out), (held, block.loss_mask & left_out)):
            counts += torch.bincount(block.input_ids[mask].long(), minlength=vocab_size)
    return kept, held


def shard_name(number: int) -> str:
    """The file of a shard in its folder."""
    return f"rows-{number:05d}.arrow"


def save_prepared(folder: Path, rows: Sequence[TokenRow], manifest: Mapping[str, Any]) -> PreparedData:
    """Writes rows that are in memory, as one shard, and the manifest to ``folder``, which appears whole or not at all.

    Raises:
        DataError: they cannot be written (disk full, no permission).
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            write_batch(temporary / shard_name(0), TokenRows(rows).batch(), {"rows": len(rows)})
            publish(temporary, folder, 1, manifest)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise not_saved(folder, error) from error
    return load_prepared(folder)


def publish(work: Path, folder: Path, num_shards: int, manifest: Mapping[str, Any]) -> None:
    """Adds the manifest to the shards in ``work``, which then becomes ``folder``, unless that was published meanwhile.

    Raises:
        OSError: the files cannot be written or moved.
    """
    names = [shard_name(number) for number in range(num_shards)]
    checksums = {name: file_sha256(work / name) for name in names}
    with replacing(work / MANIFEST_NAME) as file:
        file.write(json.dumps({**manifest, "format": FORMAT, "shards": checksums}, indent=2).encode() + b"\n")
    work.chmod(0o755)
    sync(work)
    if not (folder / MANIFEST_NAME).exists():
        work.rename(folder)
        sync(folder.parent)


def not_saved(folder: Path, error: OSError) -> DataError:
    """The error of a full disk or a folder without permission."""
    return DataError(
        f"data.cache_dir: the prepared data cannot be saved, got {folder} ({error}); free space or choose another folder, "
        "and run again: what was done is kept"
    )


def load_prepared(
    folder: Path, renderer: ChatRenderer | None = None, identity: Mapping[str, Any] | None = None
) -> PreparedData:
    """A prepared data set; with ``renderer``, only if the same tokenizer and chat template made it.

    ``identity``: what the manifest must say that the rows were made of.

    Raises:
        DataError: a file is missing, torn or altered, or other things made the rows.
    """
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text())
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or not manifest.get("identity"):
            raise DataError(
                f"data.cache_dir: not prepared data of format {FORMAT}, got {folder}; remove the folder and prepare the "
                "data again"
            )
        made_of = manifest["identity"]
        for name, checksum in manifest["shards"].items():
            if os.sep in name or file_sha256(folder / name) != checksum:
                raise DataError(
                    f"data.cache_dir: {name} is not what was saved (checksum differs), got {folder}; "
                    "remove the folder and prepare the data again"
                )
        shards = [TokenShard(folder / name) for name in manifest["shards"]]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, AttributeError) as error:
        raise DataError(
            f"data.cache_dir: the prepared data cannot be read, got {folder} ({error}); remove the folder "
            "and prepare the data again"
        ) from error
    if identity is not None and made_of != json.loads(json.dumps(identity)):
        other = [key for key in {**made_of, **identity} if made_of.get(key) != identity.get(key)]
        raise DataError(
            f"data.cache_dir: the manifest is of another data set ({', '.join(other)} differ), got {folder}; remove the "
            "folder and prepare the data again"
        )
    if renderer is not None:
        _check_renderer(folder, made_of, renderer)
    return PreparedData(folder, manifest, shards)


def _check_renderer(folder: Path, identity: dict[str, Any], renderer: ChatRenderer) -> None:
    mine = {"tokenizer": tokenizer_hash(renderer.tokenizer), "template": renderer.template_hash}
    for what, expected in mine.items():
        if identity[what] != expected:
            raise DataError(
                f"data.cache_dir: the rows were made with another {what} ({identity[what]}), got {expected} "
                f"in {folder}; prepare the data with this target and these settings"
            )
