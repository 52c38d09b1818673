"""The flags that Hydra itself answers: --cfg, --info, --hydra-help and --multirun."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from specdraft.config.diagnose import explain
from specdraft.config.paths import config_dir
from specdraft.config.schema import RUNS
from specdraft.config.store import COMPOSE_ERRORS, VERSION_BASE, register_schemas, to_run
from specdraft.core.errors import SpecDraftError


def run_hydra(command: str, overrides: Sequence[str], flags: argparse.Namespace, job: Callable[[Any], None]) -> None:
    """Hands a sub-command to Hydra's own entry; with --multirun, ``job`` runs for one combination after the other.

    It runs here, or where a launcher of Hydra's has it run: in a job of SLURM, whose tasks are the processes of one run.

    Raises:
        SpecDraftError: a mistake in the settings, or in a job, of which the later ones do not run then.
    """
    register_schemas(command)

    def task(config: DictConfig) -> None:
        elsewhere = _join_tasks()
        try:
            job(to_run(command, config))
        except SpecDraftError as error:
            if elsewhere:
                raise  # the launcher takes it to the process that waits for the job
            raise _Stopped(error) from None

    entry = hydra.main(version_base=VERSION_BASE, config_path=str(config_dir()), config_name=command)(task)
    GlobalHydra.instance().clear()
    with _as_hydra_reads(command, [*overrides, *_words(flags)]):
        try:
            entry()
        except _Stopped as stopped:
            raise stopped.error from None
        except SystemExit as leaving:
            if leaving.code:  # --hydra-help leaves the process with 0
                raise
        except COMPOSE_ERRORS as error:
            raise explain(error, RUNS[command], overrides) from error


def _join_tasks() -> bool:
    """Whether this process is in a job of the submitit launcher; its tasks then know each other as those of torchrun do."""
    if "SUBMITIT_EXECUTOR" not in os.environ:
        return False
    from submitit import JobEnvironment
    from submitit.helpers import TorchDistributedEnvironment

    if JobEnvironment().num_tasks > 1:
        TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
    return True


class _Stopped(BaseException):
    """A mistake of the user in a job. Hydra would report an Exception in its own way first."""

    def __init__(self, error: SpecDraftError) -> None:
        super().__init__()
        self.error = error


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
