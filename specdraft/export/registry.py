"""The formats of exports. A format is one file under specdraft/export/formats, which holds ``FORMAT``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from specdraft.core.errors import ExportError
from specdraft.export._config import FORMATS
from specdraft.export.material import Material
from specdraft.export.probe import Reading


@dataclass(frozen=True)
class Engine:
    """How one engine is started on an export. ``command``: its exact lines; ``reason``: why it cannot read the folder."""

    name: str
    command: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Format:
    """One way to write a head.

    kinds: of head that it has a place for; empty = all.
    refuse: what of this head it cannot say and where that can go, or None.
    write: puts every file of the export but SERVE.md into an empty folder.
    readings: how engines understand the written files, one for each convention that differs. Empty = the format is our
        own and ``write`` has loaded it back.
    engines: who reads the folder and how it is started, given the folder's name.
    widens: True = it has no draft vocabulary for heads on the target's lm_head, and drafts every token.
    absent: why a kind that its readers have under the same name is not among ``kinds``, and where that can go.
    rounds: True = weights are combined in the head's dtype, so that logits agree to its precision only.
    """

    name: str
    kinds: tuple[str, ...]
    refuse: Callable[[Material], str | None]
    write: Callable[[Material, Path], None]
    readings: Callable[[Path, Material], list[Reading]]
    engines: Callable[[Material, str], list[Engine]]
    widens: bool = False
    rounds: bool = False
    absent: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        """Whether it is read by specdraft alone, and verified when it is written."""
        return not self.kinds

    def refusal(self, material: Material) -> str | None:
        """Why the head cannot be written so; None = it can."""
        if self.kinds and material.kind not in self.kinds:
            if material.kind in self.absent:
                return self.absent[material.kind]
            return f"{self.name} carries {' and '.join(self.kinds)} heads; {nearest(material.kind)}"
        return self.refuse(material)


@cache
def find_format(name: str) -> Format:
    """The format called ``name``."""
    found: Format = importlib.import_module(f"specdraft.export.formats.{name}").FORMAT
    return found


def nearest(kind: str, without: str = "") -> str:
    """The advice which formats carry a kind of head."""
    names = [name for name in FORMATS if name != without and kind in find_format(name).kinds]
    return f"use format={' or '.join([*names, 'hf'])}"


def choose(wanted: list[str], material: Material) -> tuple[list[Format], dict[str, str]]:
    """The formats to write; with ``all`` also why others that have a place for its kind are left out, by name.

    Raises:
        ExportError: a format that was named cannot carry the head.
    """
    everything = wanted == ["all"]
    chosen, left_out = [], {}
    for name in FORMATS if everything else wanted:
        kinds = find_format(name).kinds
        if everything and kinds and material.kind not in kinds and material.kind not in find_format(name).absent:
            continue
        reason = find_format(name).refusal(material)
        if reason is None:
            chosen.append(find_format(name))
        elif everything:
            left_out[name] = reason
        else:
            raise ExportError(f"export.format: cannot carry this head, got {name} for {material.kind}: {reason}")
    return chosen, left_out
