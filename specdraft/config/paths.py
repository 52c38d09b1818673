"""Where the YAML lies, and the folder that a run writes."""

from __future__ import annotations

import os
import re
from pathlib import Path

from specdraft.core.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def config_dir() -> Path:
    """The folder of the YAML: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def check_name(name: str) -> None:
    """Raises ConfigError unless ``name`` is the name of one folder."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"name: must be one folder name of letters, digits, '.', '_' and '-', got {name!r}; use e.g. my_run"
        )


def check_output(folder: Path, resume: str) -> None:
    """Checks before anything is loaded that a run may write ``folder``. One process of a run calls it.

    Raises:
        ConfigError: the folder is occupied and ``resume`` is never, holds nothing to resume though it must, or cannot
            be written.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"name: a file is in the way of the run's folder, got {folder}; choose another name")
    occupied = folder.is_dir() and any(folder.iterdir())
    if resume == "never" and occupied:
        raise ConfigError(
            f"resume: the run's folder {folder} is not empty, got never; "
            "use resume=auto to continue it, another name=, or remove it"
        )
    if resume == "must" and not any(folder.glob("checkpoints/step-*")):
        raise ConfigError(
            f"resume: no checkpoint under {folder}, got must; use resume=auto or check name and output_dir"
        )
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"output_dir: cannot be written, got {folder.parent}; choose a folder of your own")
