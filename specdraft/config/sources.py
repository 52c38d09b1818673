"""Where heads and their targets are, as sub-commands are told, and the sub-command that brings heads in."""

from __future__ import annotations

from dataclasses import dataclass, field
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


@dataclass(slots=True, kw_only=True)
class ImportRun:
    """Brings a head of another project (EAGLE, Medusa, SpecForge, speculators, vLLM, SGLang, TGI) into our own format."""

    source: str = "???"
    """Folder or Hub id of the head."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id; null = the default branch."""
    target: TargetSource = field(default_factory=TargetSource)
    """Its target, whose files are read; null = the one that the head names; ``target=PATH`` for short."""
    num_draft_tokens: int | None = None
    """Depth of drafts; null = as the checkpoint says, else 4."""
    output: str | None = None
    """Folder that is written; null = ``import-<last part of source>`` here; ``out=`` for short."""

    def __post_init__(self) -> None:
        if not self.source:
            raise ConfigError("source: must not be empty, got ''; give a folder or a Hub id")
        if self.revision is not None and Path(self.source).is_dir():
            raise ConfigError(f"revision: has no effect without a Hub id, got {self.revision!r}; remove it")
        if self.num_draft_tokens is not None and not 1 <= self.num_draft_tokens <= 32:
            raise ConfigError(f"num_draft_tokens: must lie in 1..32, got {self.num_draft_tokens}; use e.g. 4 or null")
        if self.output is not None and not self.output:
            raise ConfigError("output: must not be empty, got ''; use null or a folder")
