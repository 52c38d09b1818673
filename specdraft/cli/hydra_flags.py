"""The flags that Hydra itself answers: --cfg, --info, --hydra-help and --multirun."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from specdraft.cli.main import check_before_loading, run_command
from specdraft.config.diagnose import explain
from specdraft.config.paths import config_dir
from specdraft.config.schema import RUNS
from specdraft.config.store import COMPOSE_ERRORS, VERSION_BASE, register_schemas, to_run
from specdraft.core.errors import SpecDraftError


def run_hydra(command: str, overrides: Sequence[str], flags: argparse.Namespace) -> None:
    """Hands a sub-command to Hydra's own entry; with --multirun every job runs in this process, one after the other.

    Raises:
        SpecDraftError: a mistake in the settings, or in a job, of which the later ones do not run then.
    """
    register_schemas(command)

    def task(config: DictConfig) -> None:
        run = to_run(command, config)
        check_before_loading(run)
        run_command(command, run)

    entry = hydra.main(version_base=VERSION_BASE, config_path=str(config_dir()), config_name=command)(task)
    GlobalHydra.instance().clear()
    with _as_hydra_reads(command, [*overrides, *_words(flags)]):
        try:
            entry()
        except SpecDraftError:
            raise
        except COMPOSE_ERRORS as error:
            raise explain(error, RUNS[command], overrides) from error


def _words(flags: argparse.Namespace) -> list[str]:
    """The flags as Hydra's parser takes them."""
    words = [f"--{name.replace('_', '-')}" for name in ("hydra_help", "resolve", "multirun") if getattr(flags, name)]
    for name in ("cfg", "info", "package", "config_name", "config_dir"):
        value = getattr(flags, name)
        words += [] if value is None else [f"--{name.replace('_', '-')}", value]
    return words


@contextmanager
def _as_hydra_reads(command: str, words: list[str]) -> Iterator[None]:
    """Hydra reads sys.argv, and raises instead of printing and leaving only if an environment variable tells it so."""
    argv, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [f"{argv[0]} {command}", *words]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        if full is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full
