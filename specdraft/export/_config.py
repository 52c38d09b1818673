"""Settings of an export. No torch here."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from specdraft.core.errors import ConfigError

FORMATS = tuple(sorted(path.stem for path in (Path(__file__).parent / "formats").glob("[!_]*.py")))
"""Names of the formats, one file each."""
LAYOUTS = ("folders", "branches")
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
_BRANCH = re.compile(r"[A-Za-z0-9][\w.-]*")
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
    revision: str | None = None
    """Branch of the repository that receives the export, made where there is none; null = main."""
    layout: str = "folders"
    """Of several formats in one repository: folders = each in a folder of its name, hf at the root; branches = each on a
    branch of its name, hf on main."""
    results_only: bool = False
    """True: nothing is exported; the cards in the repository get the figures of the head's results.json."""
    dry_run: bool = False
    """True: print what would be written and uploaded, and do neither."""
    output: str | None = None
    """Folder that is written, or that holds one for each of several formats; null = ``export-<format>`` beside the head's
    folder, or here for a head from the Hub."""
    license: str | None = None
    """Licence of the head as the Hub writes it, e.g. apache-2.0; null = the target's, as far as its own card says one."""
    verify: str = "files"
    """files = what was written is read back and its drafts are compared with the head's; engine = then it is also run in
    the engine that reads it, on the CPU in float32."""
    engines: dict[str, str] = field(default_factory=dict)
    """Python of an engine's environment by the engine's name (vllm, llamacpp, openvino, optimum); those that are not named
    are looked for in ``.engines/<name>`` here, where ``scripts/engines.sh`` puts them."""
    target_gguf: bool = False
    """True: format gguf holds the target beside the draft, as ``target.gguf`` with its tokenizer and chat template, so that
    llama.cpp needs no converter."""

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
        self._check_hub()
        if self.output is not None and not self.output:
            raise ConfigError("export.output: must not be empty, got ''; use null or a folder")
        if self.license is not None and not _LICENSE.fullmatch(self.license):
            raise ConfigError(
                f"export.license: is not written as on the Hub, got {self.license!r}; use e.g. apache-2.0 or other"
            )
        if self.target_gguf and "gguf" not in self.format and self.format != ["all"]:
            raise ConfigError(f"export.target_gguf: is of format gguf, got {', '.join(self.format)}; add format=gguf")
        self._check_engines()

    def _check_hub(self) -> None:
        if self.layout not in LAYOUTS:
            raise ConfigError(f"export.layout: unknown, got {self.layout!r}; use {' or '.join(LAYOUTS)}")
        if self.push_to is None:
            for name in ("private", "revision", "results_only"):
                value = getattr(self, name)
                if value:
                    shown = "true" if value is True else value
                    raise ConfigError(
                        f"export.{name}: has no effect without push_to, got {shown}; add push_to=user/name"
                    )
            if self.layout != LAYOUTS[0]:
                raise ConfigError(
                    f"export.layout: has no effect without push_to, got {self.layout}; add push_to=user/name"
                )
        if self.revision is not None and not _BRANCH.fullmatch(self.revision):
            raise ConfigError(f"export.revision: is no name of a branch, got {self.revision!r}; use e.g. v2")
        if self.revision is not None and self.layout == "branches":
            raise ConfigError(
                f"export.revision: names one branch where layout=branches makes several, got {self.revision}; leave one out"
            )
        if self.results_only:
            for name, nothing in (("private", False), ("output", None), ("license", None), ("verify", "files")):
                value = getattr(self, name)
                if value != nothing:
                    shown = "true" if value is True else value
                    raise ConfigError(f"export.{name}: has no effect with results_only, got {shown}; leave it out")
            if self.format != ["hf"] or self.target_gguf:
                raise ConfigError(
                    f"export.format: has no effect with results_only, got {', '.join(self.format)}; leave it out"
                )

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
