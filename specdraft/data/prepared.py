"""A prepared data set on disk: token ids, loss masks and the manifest that says what they were made of."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdraft.core.errors import DataError
from specdraft.data.chat import ChatRenderer, TokenRow, tokenizer_hash
from specdraft.data.sources import file_sha256

FORMAT = 1
MANIFEST_NAME = "manifest.json"
TOKENS_NAME = "tokens.safetensors"


@dataclass(frozen=True)
class PreparedData:
    """R rows of N tokens in all.

    input_ids: ``[N]`` int32, the rows one after the other. loss_mask: ``[N]`` bool, True = supervised.
    offsets: ``[R+1]`` int64, row i is ``offsets[i]:offsets[i+1]``. manifest: see ``prepare.prepare``.
    """

    folder: Path
    manifest: dict[str, Any]
    input_ids: Tensor
    loss_mask: Tensor
    offsets: Tensor

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of every row."""
        lengths: list[int] = self.offsets.diff().tolist()
        return lengths

    def row(self, index: int) -> TokenRow:
        """One row."""
        start, end = self.offsets[index : index + 2].tolist()
        return TokenRow(self.input_ids[start:end].tolist(), self.loss_mask[start:end].tolist())

    def rows(self, indices: Sequence[int]) -> list[TokenRow]:
        """Several rows, in the order of ``indices``."""
        return [self.row(index) for index in indices]


def token_counts(data: PreparedData, vocab_size: int) -> Tensor:
    """``[V]`` int64: how often each token is supervised; the statistics a draft vocabulary is chosen by.

    Raises:
        DataError: a token lies outside the target's vocabulary, so the data was prepared for another target.
    """
    highest = int(data.input_ids.max())
    if highest >= vocab_size:
        raise DataError(
            f"data.cache_dir: the rows hold token {highest} and the target has {vocab_size}, got "
            f"{data.folder}; prepare the data for this target"
        )
    return torch.bincount(data.input_ids[data.loss_mask].long(), minlength=vocab_size)


def held_out_counts(data: PreparedData, vocab_size: int, every: int = 10) -> tuple[Tensor, Tensor] | None:
    """Two ``token_counts``: of the rows but one in ``every``, and of these; None with fewer than ``every`` rows.

    What is chosen by the first is measured fairly by the second.
    """
    if len(data) < every:
        return None
    row = torch.repeat_interleave(torch.arange(len(data)), data.offsets.diff())
    left_out = row % every == 0
    ids = data.input_ids.long()
    parts = (ids[data.loss_mask & ~left_out], ids[data.loss_mask & left_out])
    kept, held = (torch.bincount(part, minlength=vocab_size) for part in parts)
    return kept, held


def save_prepared(folder: Path, rows: Sequence[TokenRow], manifest: dict[str, Any]) -> PreparedData:
    """Writes rows and manifest to ``folder``, which appears whole or not at all.

    Raises:
        DataError: they cannot be written (disk full, no permission).
    """
    tensors = {
        "input_ids": torch.tensor([token for row in rows for token in row.input_ids], dtype=torch.int32),
        "loss_mask": torch.tensor([on for row in rows for on in row.loss_mask], dtype=torch.bool),
        "offsets": torch.tensor([0, *(len(row.input_ids) for row in rows)]).cumsum(0),
    }
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            save_file(tensors, temporary / TOKENS_NAME)
            manifest = {**manifest, "format": FORMAT, "tokens_sha256": file_sha256(temporary / TOKENS_NAME)}
            (temporary / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n")
            for path in temporary.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            temporary.chmod(0o755)
            if not (folder / MANIFEST_NAME).exists():  # else another run prepared the same data meanwhile
                temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"data.cache_dir: the prepared data cannot be saved, got {folder} ({error}); free space or "
            "choose another folder"
        ) from error
    return load_prepared(folder)


def load_prepared(folder: Path, renderer: ChatRenderer | None = None) -> PreparedData:
    """A prepared data set; with ``renderer``, only if the same tokenizer and chat template made it.

    Raises:
        DataError: a file is missing, torn or altered, or another tokenizer or template made the rows.
    """
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text())
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise DataError(
                f"data.cache_dir: not prepared data of format {FORMAT}, got {folder}; prepare the data again"
            )
        if file_sha256(folder / TOKENS_NAME) != manifest["tokens_sha256"]:
            raise DataError(
                f"data.cache_dir: {TOKENS_NAME} is not what was saved (checksum differs), got {folder}; "
                "remove the folder and prepare the data again"
            )
        tensors = load_file(folder / TOKENS_NAME)
    except (OSError, json.JSONDecodeError, KeyError, SafetensorError) as error:
        raise DataError(
            f"data.cache_dir: the prepared data cannot be read, got {folder} ({error}); remove the folder "
            "and prepare the data again"
        ) from error
    if renderer is not None:
        _check_renderer(folder, manifest["identity"], renderer)
    return PreparedData(folder, manifest, tensors["input_ids"], tensors["loss_mask"], tensors["offsets"])


def _check_renderer(folder: Path, identity: dict[str, Any], renderer: ChatRenderer) -> None:
    mine = {"tokenizer": tokenizer_hash(renderer.tokenizer), "template": renderer.template_hash}
    for what, expected in mine.items():
        if identity[what] != expected:
            raise DataError(
                f"data.cache_dir: the rows were made with another {what} ({identity[what]}), got {expected} "
                f"in {folder}; prepare the data with this target and these settings"
            )
