"""What a writer works from: the head, its record, and its target's files."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from specdraft.core.errors import CheckpointError, ExportError
from specdraft.core.files import file_sha256
from specdraft.core.types import TargetSpec
from specdraft.export.card import hub_id, portable
from specdraft.export.license import License, find_license
from specdraft.export.probe import Drafts
from specdraft.export.tensors import all_finite
from specdraft.heads.base import DraftHead
from specdraft.heads.storage import WEIGHTS_NAME, load_head, read_head_config
from specdraft.targets.weights import TargetFiles

RESULTS_NAME = "results.json"
RESULTS_SCHEMA = 1
MAIN = "main"
"""The branch that a repository shows."""
DEFAULT_TRIO = "2, n/2 and n-3"
"""Layers that every engine taps for EAGLE-3 when nothing is said, as indices into hidden_states of n layers."""


@dataclass(frozen=True)
class Place:
    """Where in a repository an export is. branch: of the repository; folder: in it, empty = its root."""

    branch: str = MAIN
    folder: str = ""

    def path(self, name: str) -> str:
        """Of a file of the export, in the repository."""
        return f"{self.folder}/{name}" if self.folder else name


@dataclass
class Material:
    """One head to be exported.

    folder: of the head. target_name, target_revision: where its target is; None = as recorded. repo_id: where the export
    will be uploaded, if anywhere. license: that was given for the head.
    """

    folder: Path
    target_name: str | None = None
    target_revision: str | None = None
    repo_id: str | None = None
    license: str | None = None
    head: DraftHead = field(init=False)
    record: dict[str, Any] = field(init=False)
    target_gguf: bool = field(init=False, default=False)
    """Whether format gguf holds the target, too."""
    place: Place = field(init=False, default=Place())
    """In the repository."""
    drafts: dict[bool, Drafts] = field(init=False, default_factory=dict)
    """What the head drafts over its own vocabulary (False) and over the whole one (True), kept for several formats."""

    def __post_init__(self) -> None:
        self.record = read_head_config(self.folder)
        self.head = load_head(self.folder, mapped=True)
        self.tensors = self.head.state_dict()
        broken = next((name for name, value in self.tensors.items() if not all_finite(value)), None)
        if broken is not None:
            raise CheckpointError(
                f"head: tensor {broken} holds NaN or infinity, got {self.folder}; use another checkpoint"
            )

    def release(self) -> None:
        """Gives back the memory of the pages of the head's file that were read."""
        self.head.load_state_dict(load_file(self.folder / WEIGHTS_NAME), assign=True)
        self.tensors = self.head.state_dict()

    @property
    def in_subfolder(self) -> bool:
        """Whether the repository's id is not enough for engines, since the export is in a folder of it or on a branch."""
        return self.place != Place()

    @property
    def branch(self) -> str | None:
        """Of the repository; None = main."""
        return None if self.place.branch == MAIN else self.place.branch

    @property
    def kind(self) -> str:
        """Of the head."""
        return self.head.config.kind

    @property
    def spec(self) -> TargetSpec:
        """The target as the head knows it."""
        return self.head.spec

    @property
    def settings(self) -> dict[str, Any]:
        """The head's settings as recorded."""
        settings: dict[str, Any] = self.record["head"]
        return settings

    @property
    def dtype(self) -> torch.dtype:
        """Of the head's weights as saved."""
        return torch.empty(0).to(next(v for v in self.tensors.values() if v.is_floating_point()).dtype).dtype

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Fused layers in the order of the fused columns, as indices into hidden_states."""
        return self.head.features().aux_layers

    @property
    def draft_ids(self) -> Tensor | None:
        """``[D]`` target ids of the draft vocabulary; None = all."""
        return None if self.head.vocab is None else self.head.vocab.draft_token_ids()

    @property
    def public_target(self) -> str:
        """The target's Hub id, or the last part of its folder's name."""
        name = self.record["target"]["name"]
        return hub_id(name) or str(portable(name))

    @cached_property
    def results(self) -> dict[str, Any] | None:
        """results.json of the head; see ``read_results``."""
        return read_results(self.folder)

    @cached_property
    def published_license(self) -> License | None:
        """The licence for the card."""
        target = self.record["target"]
        name = self.target_name or target["name"]
        return find_license(
            self.license, name, self.target_revision or (None if self.target_name else target["revision"])
        )

    @cached_property
    def weights_sha256(self) -> str:
        """Of the head's weights as saved."""
        return file_sha256(self.folder / WEIGHTS_NAME)

    @cached_property
    def target(self) -> TargetFiles:
        """The target's files.

        Raises:
            ConfigError, CheckpointError, UnsupportedTargetError: it cannot be had.
            ExportError: it is not the target that the head was trained for.
        """
        name = self.target_name or self.record["target"]["name"]
        revision = self.target_revision or (None if self.target_name else self.record["target"]["revision"])
        files = TargetFiles(name, None if Path(name).is_dir() else revision)
        spec = files.spec()
        if spec.fingerprint != self.spec.fingerprint:
            raise ExportError(
                f"target: is not the one the head was trained for ({self.spec.name}, fingerprint "
                f"{self.spec.fingerprint}), got {name} ({spec.fingerprint}); give that target"
            )
        return files


def read_results(folder: Path) -> dict[str, Any] | None:
    """results.json of a head without folders of this machine; None if it was not evaluated.

    Raises:
        ExportError: torn, of another schema, or measured with other weights.
    """
    path = folder / RESULTS_NAME
    if not path.exists():
        return None
    try:
        results = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ExportError(
            f"head: {RESULTS_NAME} cannot be read, got {path} ({error}); evaluate the head again"
        ) from error
    if not isinstance(results, dict) or results.get("schema") != RESULTS_SCHEMA:
        raise ExportError(
            f"head: {RESULTS_NAME} is not of schema {RESULTS_SCHEMA}, got {path}; evaluate the head again"
        )
    measured = results["head"]["sha256"]
    if measured is not None and measured != file_sha256(folder / WEIGHTS_NAME):
        raise ExportError(f"head: {RESULTS_NAME} was measured with other weights, got {path}; evaluate the head again")
    portable_results: dict[str, Any] = portable(results)
    return portable_results


def default_trio(num_layers: int) -> tuple[int, int, int]:
    """The layers that engines tap when a config names none."""
    return 2, num_layers // 2, num_layers - 3
