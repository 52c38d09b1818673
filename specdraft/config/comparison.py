"""`specdraft compare`: several heads at an equal budget, and the run of each that its words stand for."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdraft.config.experiment import MISSING
from specdraft.config.paths import check_name, check_output
from specdraft.core.errors import ConfigError
from specdraft.data._answers_config import FREE as ANSWERS_FREE

if TYPE_CHECKING:
    from specdraft.config.experiment import PipelineRun

BUDGETS = ("tokens", "minutes", "parameters")
TRAINING_NAME = "training.json"
"""In the folder of a head whose training is finished."""
SAME = (
    "seed",
    "target",
    "data",
    "eval",
    "decode.max_new_tokens",
    "decode.ignore_eos",
    "trainer.eval_prompts",
    "trainer.eval_max_new_tokens",
)
"""Settings that all heads of a comparison must share, so that the head is what differs."""
OWN = ("data.batch_size", "data.bucket", "data.packing")
"""Those of them that a head may choose: how the same rows are put into batches."""


@dataclass(slots=True, kw_only=True)
class CompareConfig:
    """Which heads are compared, and what they have equally much of."""

    heads: list[str] = field(default_factory=list)
    """A text for each head: an option of ``head`` (or ``experiment=...``), then whatever it has of its own, as words of
    `specdraft run`, e.g. 'eagle name=hass loss=hass head.unroll_steps=3'. ``heads=[...]`` for short."""
    budget: str = "tokens"
    """What is equal: tokens (of training, prompts included, repeated ones counted again), minutes (of training, without
    measuring and saving) or parameters (the size of each head is fitted; length of training as trainer says)."""
    value: float | None = None
    """How much of it; needed."""

    def __post_init__(self) -> None:
        if self.budget not in BUDGETS:
            raise ConfigError(f"compare.budget: unknown, got {self.budget!r}; use {', '.join(BUDGETS)}")
        if not self.heads:
            raise ConfigError("heads: are needed, got none; add e.g. heads=[medusa,eagle3]")
        if self.value is None or not 0.0 < self.value < float("inf"):
            raise ConfigError(
                f"compare.value: is needed and must be positive, got {self.value}; give the {self.budget} of each head"
            )
        if self.budget != "minutes" and self.value != int(self.value):
            raise ConfigError(f"compare.value: must be a whole number of {self.budget}, got {self.value}; round it")


@dataclass(slots=True, kw_only=True)
class CompareRun:
    """Trains several heads with an equal budget on the same data, measures each, and prints one table.

    Settings of `specdraft run` (target, data, optim, ...) go to every head.
    """

    name: str = MISSING
    """Folder of the comparison under output_dir; it holds a run for each head. Started again, it continues."""
    output_dir: str = "outputs"
    """Folder that holds comparisons and the prepared data."""
    shared: list[str] = field(default_factory=list)
    """Words of `specdraft run` for every head. Such words on the command line are put here, in the place of these."""
    compare: CompareConfig = field(default_factory=lambda: CompareConfig(heads=[MISSING], value=1.0))
    """The heads and their budget."""

    def __post_init__(self) -> None:
        check_name(self.name)
        if not self.output_dir:
            raise ConfigError("output_dir: must not be empty, got ''; use e.g. outputs")

    @property
    def folder(self) -> Path:
        """The comparison's folder."""
        return Path(self.output_dir) / self.name


def head_runs(run: CompareRun) -> list[PipelineRun]:
    """The run of every head, composed and checked; its name is the head's in the comparison.

    Raises:
        ConfigError: words that do not compose, two heads of one name, settings that make the heads incomparable, or a
            limit of training beside the budget.
    """
    runs: list[PipelineRun] = []
    for entry in run.compare.heads:
        words = _words(entry)
        try:
            found = _composed(run, words)
        except ConfigError as error:
            raise ConfigError(f"heads: {entry}: {error}") from error
        if any(found.name == other.name for other in runs):
            raise ConfigError(f"heads: two are called {found.name}, got {run.compare.heads}; add name=... to one")
        runs.append(_with_budget(run, found, [*run.shared, *words]))
    for other in runs[1:]:
        differing = list(_differences(_shared_settings(runs[0]), _shared_settings(other)))
        if differing:
            raise ConfigError(
                f"heads: {runs[0].name} and {other.name} differ in {differing[0]}, which all must share, got "
                f"{run.compare.heads}; give it once for all"
            )
    return runs


def check_comparison(run: CompareRun) -> None:
    """Everything that can be known of a comparison before torch is imported and weights load.

    Raises:
        ConfigError: see ``head_runs``; a folder that cannot be written; a head there that was trained otherwise; a
            launcher of several processes.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"compare: trains one head after the other in a process of its own, got WORLD_SIZE={os.environ['WORLD_SIZE']}; "
            "start it without a launcher, or train by hand and use specdraft eval heads=[...]"
        )
    for found in head_runs(run):
        check_output(found.folder, found.resume)
        before = read_training(found.folder)
        changed = [] if before is None else list(_differences(before["settings"], settings_of_training(run, found)))
        if changed:
            raise ConfigError(
                f"name: the head {found.name} was trained with other settings, got another {changed[0]} for {found.folder}; "
                "use the old ones, another name=, or remove that folder"
            )


def read_training(folder: Path) -> dict[str, Any] | None:
    """What the training of a head that is finished cost, and its settings; None = it is not finished."""
    path = folder / TRAINING_NAME
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(f"name: {path} cannot be read, got {error}; remove it to train that head again") from error
    return found


def _words(entry: str) -> list[str]:
    """``medusa optim.lr=1e-3`` -> ``head=medusa optim.lr=1e-3 name=medusa``."""
    try:
        words = shlex.split(entry)
    except ValueError as error:
        raise ConfigError(f"heads: cannot be read ({error}), got {entry}; close the quotes") from error
    if words and "=" not in words[0]:
        words[0] = f"head={words[0]}"
    given: dict[str, str] = dict(word.partition("=")[::2] for word in words)
    chosen = given.get("head") or given.get("experiment")
    if not chosen:
        raise ConfigError(
            f"heads: names no head, got {entry or repr(entry)}; begin with an option of head, e.g. medusa"
        )
    for key in ("output_dir", "resume", "data.cache_dir"):
        if key in given:
            raise ConfigError(f"heads: {key} is that of the comparison, got {entry}; remove it there")
    return words if "name" in given else [*words, f"name={chosen}"]


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _composed(run: CompareRun, words: list[str]) -> PipelineRun:
    """The run of one head in the comparison's folder."""
    from specdraft.config.overrides import prepare_overrides
    from specdraft.config.store import compose_config, to_run

    own = {_key(word) for word in words}
    words = [*(word for word in run.shared if _key(word) not in own), *words]
    found: PipelineRun = to_run("run", compose_config("run", prepare_overrides("run", words)))
    cache = found.data.cache_dir or str(Path(run.output_dir) / "data")
    return replace(found, output_dir=str(run.folder), resume="auto", data=replace(found.data, cache_dir=cache))


def _with_budget(run: CompareRun, found: PipelineRun, words: list[str]) -> PipelineRun:
    """The run with the limit of training that the budget sets."""
    budget, value = run.compare.budget, run.compare.value
    assert value is not None
    trainer = found.trainer
    if trainer.early_stop is not None:
        raise ConfigError(f"trainer.early_stop: would leave part of the budget, got {trainer.early_stop}; use null")
    if budget == "parameters":
        if found.head.size_setting is None:
            raise ConfigError(
                f"heads: {found.name} has no setting of its size, got compare.budget=parameters; use tokens"
            )
        if found.head.draft_vocab_coverage is not None:
            raise ConfigError(
                "head.draft_vocab_coverage: leaves the size open, got it with compare.budget=parameters; "
                "use head.draft_vocab_size"
            )
        return found
    for key in ("epochs", "max_steps", "max_tokens", "max_minutes"):
        if any(_key(word) == f"trainer.{key}" for word in words):
            raise ConfigError(f"trainer.{key}: the budget says how long to train, got it beside {budget}; remove it")
    limit = {"max_minutes": float(value)} if budget == "minutes" else {"max_tokens": int(value)}
    limits: dict[str, Any] = {"max_steps": None, "max_tokens": None, "max_minutes": None, **limit}
    return replace(found, trainer=replace(trainer, **limits))


def _shared_settings(run: PipelineRun) -> dict[str, Any]:
    """Dotted key -> value of what all heads must share."""
    flat = dict(_flat(asdict(run)))
    return {
        key: value
        for key, value in flat.items()
        if key not in OWN and any(key == same or key.startswith(f"{same}.") for same in SAME)
    }


def settings_of_training(run: CompareRun, found: PipelineRun) -> dict[str, Any]:
    """Dotted key -> value of what a trained head depends on, to find out whether one that is there is the one wanted.

    ``found``: as ``head_runs`` gives it, before its size is fitted.
    """
    groups = ("seed", "target", "head", "adapter", "data", "features", "loss", "optim", "trainer")
    free: tuple[str, ...] = (
        "data.cache_dir",
        "data.generate_batch_size",
        "trainer.log_every",
        "trainer.keep_checkpoints",
    )
    free = (*free, "features.dir", "features.budget_gib", "features.shard_mib")
    free = (*free, *ANSWERS_FREE)
    size = {"compare.value": run.compare.value} if run.compare.budget == "parameters" else {}
    return size | {k: v for k, v in _flat(asdict(found)) if k.partition(".")[0] in groups and k not in free}


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    return (key for key in sorted({*before, *now}) if before.get(key) != now.get(key))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
