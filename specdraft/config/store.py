"""From YAML and overrides to a checked run: composing, converting, and writing what was resolved."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from hydra import compose, initialize_config_dir
from hydra._internal.hydra import Hydra
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from specdraft.config.diagnose import explain
from specdraft.config.head_schemas import head_schemas
from specdraft.config.overrides import check_hydra_overrides, escape_interpolation, no_such_option
from specdraft.config.paths import config_dir
from specdraft.config.schema import RUNS, SHORTHANDS, ExperimentRun
from specdraft.core.errors import ConfigError, SpecDraftError
from specdraft.core.files import replacing
from specdraft.decode._proposer_config import PROPOSERS, ProposerConfig
from specdraft.heads._config import HeadConfig

C = TypeVar("C")
VERSION_BASE = "1.3"
COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, YAMLError, ValueError)
"""What Hydra raises for a mistake in YAML or overrides."""


@cache
def register_schemas(command: str) -> None:
    """Enters ``base_<command>`` and, by kind, ``head/base_<kind>`` and ``proposer/base_<kind>`` into Hydra's store."""
    store = ConfigStore.instance()
    store.store(name=f"base_{command}", node=_schema(RUNS[command]))
    for kind, config_class in head_schemas().items():
        store.store(group="head", name=f"base_{kind}", node=_schema(config_class))
    for kind, proposer_class in PROPOSERS.items():
        store.store(group="proposer", name=f"base_{kind}", node=_schema(proposer_class))


def _schema(config_class: type) -> DictConfig:
    """Typed config of a dataclass, its dictionaries empty: merging YAML would add to their defaults."""
    schema: DictConfig = OmegaConf.structured(config_class)
    _empty_dictionaries(schema)
    return schema


def _empty_dictionaries(node: DictConfig) -> None:
    for key in node:
        child = node._get_node(key)
        if not isinstance(child, DictConfig):
            continue
        if OmegaConf.get_type(child) is dict:
            node[key] = {}
        else:
            _empty_dictionaries(child)


def compose_config(
    command: str, overrides: Sequence[str], *, config_dirs: Sequence[str] = (), config_name: str | None = None
) -> DictConfig:
    """The composed YAML of a sub-command with overrides applied; values may still be missing.

    ``config_dirs`` are searched after specdraft's own folder and before ``hydra.searchpath``.

    Raises:
        ConfigError: an override, key, value, group option or folder that does not exist or does not fit.
    """
    register_schemas(command)
    overrides = check_hydra_overrides(overrides)
    # Another composition of this process (a notebook, a test) may have been left initialised.
    GlobalHydra.instance().clear()
    try:
        with (
            initialize_config_dir(str(config_dir()), job_name="specdraft", version_base=VERSION_BASE),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("error", message="provider=.* is not available")
            if config_dirs:
                _search(config_dirs)
            return compose(config_name or command, overrides=overrides)
    except UserWarning as warning:
        folder = str(warning).partition("path=")[2].removesuffix(" is not available.")
        raise ConfigError(f"hydra.searchpath: no such folder, got {folder}; give [file://FOLDER]") from None
    except SpecDraftError:
        raise
    except COMPOSE_ERRORS as error:
        raise explain(error, RUNS[command], overrides) from error


def _search(folders: Sequence[str]) -> None:
    """Adds folders to the search path as Hydra's --config-dir does. A primary config can lie in one of them."""
    path = GlobalHydra.instance().config_loader().get_search_path()
    for folder in folders:
        if not Path(folder).is_dir():
            raise ConfigError(f"--config-dir: no such folder, got {folder}; give a folder with YAML")
        path.prepend("command-line", f"file://{Path(folder).absolute()}", SearchPathQuery(provider="schema"))
    GlobalHydra.instance().clear()
    Hydra.create_main_hydra2(task_name="specdraft", config_search_path=path)


def to_run(command: str, config: DictConfig) -> Any:
    """The run dataclass of a sub-command, with every rule of its groups and between them checked.

    Raises:
        ConfigError: an unknown key, a value that is missing, of the wrong type, or against a rule.
    """
    run_class = RUNS[command]
    # Interpolations stay as they are until to_object: resolved twice, an escaped one would become a real one.
    values = OmegaConf.to_container(config, resolve=False)
    assert isinstance(values, dict)
    try:
        schema = _schema(run_class)
        if issubclass(run_class, ExperimentRun):
            schema.head = _schema(_class_of_kind(config, "head", HeadConfig, head_schemas()))
        if "proposer" in schema:
            schema.proposer = _schema(_class_of_kind(config, "proposer", ProposerConfig, PROPOSERS))
        merged = OmegaConf.merge(schema, values)
        _refuse_missing(command, OmegaConf.missing_keys(merged))
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        key = str(error.full_key)
        raise explain(error, run_class, [f"{key}={_look_up(values, key)}"]) from error


def _look_up(values: Any, key: str) -> Any:
    """The plain value under a dotted key, as it was written."""
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _class_of_kind(config: DictConfig, group: str, base: type[C], kinds: Mapping[str, type[C]]) -> type[C]:
    """The config class that ``<group>.kind`` names; the option of the group must be of that kind."""
    kind = OmegaConf.select(config, f"{group}.kind")
    if kind not in kinds:
        raise no_such_option(f"{group}.kind", kind, kinds)
    chosen = OmegaConf.get_type(config[group])
    if chosen not in (dict, base, kinds[kind]):
        raise ConfigError(f"{group}.kind: comes with the option of {group}, got {kind}; write {group}={kind}")
    return kinds[kind]


def to_proposer(entry: Any) -> ProposerConfig:
    """The settings of one entry of ``proposers``: a kind, or a dictionary of a kind and settings of it.

    Raises:
        ConfigError: another kind, or a setting that does not exist, does not fit or is out of range.
    """
    settings = dict(entry) if isinstance(entry, dict) else {"kind": entry}
    kind = settings.get("kind")
    if kind is None:
        raise ConfigError(f"proposers: an entry lacks its kind, got {entry}; add e.g. kind: suffix")
    if kind not in PROPOSERS or kind == "head":
        raise no_such_option("proposers", kind, [name for name in PROPOSERS if name != "head"])
    try:
        return cast(ProposerConfig, OmegaConf.to_object(OmegaConf.merge(_schema(PROPOSERS[kind]), settings)))
    except OmegaConfBaseException as error:
        key = str(error.full_key)
        found = explain(error, PROPOSERS[kind], [f"{key}={settings.get(key)}"])
        raise ConfigError(f"proposers.{found}") from error


def _refuse_missing(command: str, keys: set[str]) -> None:
    if not keys:
        return
    short = {long: key for key, long in SHORTHANDS.get(command, {}).items()}
    key = min(keys, key=lambda key: (key.count("."), key))
    shown = short.get(key, key)
    raise ConfigError(f"{shown}: is needed, got nothing; add {shown}=...")


def save_resolved(run: Any, folder: Path) -> Path:
    """Writes ``config.yaml``, every value of a run spelled out, atomically. One process of a run calls it.

    ``specdraft <command> --config-dir <folder> --config-name config`` composes the same run again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    with replacing(path) as file:
        file.write(OmegaConf.to_yaml(OmegaConf.create(_escaped(asdict(run)))).encode())
    return path


def _escaped(value: Any) -> Any:
    """``value`` with every text written so that OmegaConf finds no interpolation in it."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return escape_interpolation(value) if isinstance(value, str) else value
