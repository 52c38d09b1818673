"""Where trained heads and their targets are, as sub-commands are told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specdraft.core.errors import ConfigError


@dataclass(slots=True, kw_only=True)
class HeadSource:
    """Where a trained head is."""

    path: str | None = None
    """Folder such as outputs/x/best, or Hub id; null = no head, plain decoding."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id; null = the default branch."""

    def __post_init__(self) -> None:
        if self.path is not None and not self.path:
            raise ConfigError("head: must not be empty, got ''; give a folder or a Hub id")
        if self.revision is not None and (self.path is None or Path(self.path).is_dir()):
            raise ConfigError(f"head.revision: has no effect without a Hub id, got {self.revision!r}; remove it")


@dataclass(slots=True, kw_only=True)
class TargetSource:
    """Where the files of a head's target are; they are read, the target is not loaded."""

    name: str | None = None
    """Folder, Hub id or smollm2; null = the one the head was made for."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id; null = the default branch."""

    def __post_init__(self) -> None:
        if self.name is not None and not self.name:
            raise ConfigError("target.name: must not be empty, got ''; give a folder or a Hub id")
        if self.revision is not None and (self.name is None or Path(self.name).is_dir()):
            raise ConfigError(f"target.revision: has no effect without a Hub id, got {self.revision!r}; remove it")
