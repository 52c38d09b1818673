"""Settings of an export. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from specdraft.core.errors import ConfigError

FORMATS = ("hf",)


@dataclass(slots=True, kw_only=True)
class ExportConfig:
    """Into which format a head is written, and where it goes."""

    format: str = "hf"
    """hf = a folder (or Hub repository) that ``load_head`` reads, with a model card."""
    push_to: str | None = None
    """Hub repository ``user/name`` that receives the folder; null = nothing is uploaded."""
    private: bool = False
    """Whether a repository made by ``push_to`` is private."""
    dry_run: bool = False
    """True: print what would be written and uploaded, and do neither."""
    output: str | None = None
    """Folder that is written; null = ``export-<format>`` beside the head's folder."""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ConfigError(f"export.format: unknown, got {self.format!r}; use {', '.join(FORMATS)}")
        if self.push_to is not None and self.push_to.count("/") != 1:
            raise ConfigError(f"export.push_to: is not of the form user/name, got {self.push_to!r}; add your user name")
        if self.private and self.push_to is None:
            raise ConfigError("export.private: has no effect without push_to, got true; add push_to=user/name")
