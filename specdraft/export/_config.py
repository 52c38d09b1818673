"""Settings of an export. No torch here."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from specdraft.core.errors import ConfigError

FORMATS = tuple(sorted(path.stem for path in (Path(__file__).parent / "formats").glob("[!_]*.py")))
"""Names of the formats, one file each."""
ENGINES_OF = {
    "eagle3": ("vllm",),
    "speculators": ("vllm",),
    "vllm_eagle": ("vllm",),
    "medusa": ("vllm",),
    "gguf": ("llamacpp",),
    "openvino": ("openvino", "optimum"),
}
"""Format -> environments that ``verify=engine`` needs: that of the engine which runs it on a CPU first."""
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]*")


@dataclass(slots=True, kw_only=True)
class ExportConfig:
    """Into which format a head is written, and where it goes."""

    format: list[str] = field(default_factory=lambda: ["hf"])
    """hf = our own, which every command reads as ``head``; or one or several of the serving engines' formats; all = every
    one that can carry the head."""
    push_to: str | None = None
    """Hub repository ``user/name`` that receives the folder; null = nothing is uploaded."""
    private: bool = False
    """Whether a repository made by ``push_to`` is private."""
    dry_run: bool = False
    """True: print what would be written and uploaded, and do neither."""
    output: str | None = None
    """Folder that is written, or that holds one for each of several formats; null = ``export-<format>`` beside the head's
    folder, or here for a head from the Hub."""
    license: str | None = None
    """Licence of the head as the Hub writes it, e.g. apache-2.0; null = the model card names none."""
    verify: str = "files"
    """files = what was written is read back and its drafts are compared with the head's; engine = then it is also run in
    the engine that reads it, on the CPU in float32."""
    engines: dict[str, str] = field(default_factory=dict)
    """Python of an engine's environment by the engine's name (vllm, llamacpp, openvino, optimum); those that are not named
    are looked for in ``.engines/<name>`` here, where ``scripts/engines.sh`` puts them."""

    def __post_init__(self) -> None:
        if not self.format or len(set(self.format)) != len(self.format):
            raise ConfigError(f"export.format: is empty or has one twice, got {self.format}; use e.g. hf")
        for name in self.format:
            if name not in FORMATS and self.format != ["all"]:
                raise ConfigError(f"export.format: unknown, got {name!r}; use all, or {', '.join(FORMATS)}")
        if self.push_to is not None and not _REPO.fullmatch(self.push_to):
            raise ConfigError(
                f"export.push_to: is not of the form user/name, got {self.push_to!r}; use e.g. me/my-head"
            )
        if self.private and self.push_to is None:
            raise ConfigError("export.private: has no effect without push_to, got true; add push_to=user/name")
        if self.output is not None and not self.output:
            raise ConfigError("export.output: must not be empty, got ''; use null or a folder")
        if self.license is not None and not _LICENSE.fullmatch(self.license):
            raise ConfigError(
                f"export.license: is not written as on the Hub, got {self.license!r}; use e.g. apache-2.0 or other"
            )
        self._check_engines()

    def _check_engines(self) -> None:
        if self.verify not in ("files", "engine"):
            raise ConfigError(f"export.verify: unknown, got {self.verify!r}; use files or engine")
        known = sorted({engine for engines in ENGINES_OF.values() for engine in engines})
        for name in self.engines:
            if name not in known:
                raise ConfigError(f"export.engines: no such engine, got {name!r}; use {', '.join(known)}")
        if self.verify == "files":
            if self.engines:
                raise ConfigError(
                    f"export.engines: has no effect without verify=engine, got {self.engines}; add verify=engine"
                )
            return
        unread = [name for name in self.format if name not in ENGINES_OF and name != "all"]
        if unread:
            raise ConfigError(
                f"export.verify: no engine reads {' and '.join(unread)} on a CPU, got engine; use verify=files, or "
                f"format={', '.join(ENGINES_OF)}"
            )
