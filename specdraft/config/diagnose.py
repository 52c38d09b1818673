"""One clear line for what Hydra, OmegaConf and the YAML reader report in several."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
    ValidationError,
)
from yaml import MarkedYAMLError, YAMLError

from specdraft.config.overrides import no_such_option, options_of, unknown_key
from specdraft.core.errors import ConfigError

EXPECTED = (
    ("converted to Float", "must be a number"),
    ("converted to Integer", "must be a whole number"),
    ("type hint 'float'", "must be a number"),
    ("type hint 'int'", "must be a whole number"),
    ("valid bool", "must be true or false"),
    ("not Optional", "must have a value"),
    ("not a ListConfig", "must be a list"),
    ("to Dict", "must be a dictionary"),
    ("to string", "must be one text"),
    ("'dict' could not", "must be one value"),
)
"""Part of OmegaConf's message -> what is wrong, in our words. The last that fits counts."""


def explain(error: Exception, run_class: type, overrides: Sequence[str]) -> ConfigError:
    """The error for the user in place of one that was raised while composing or converting."""
    place = re.match(r"(?:Error merging|In) '([^']+)'", str(error))
    where = f" (in {place[1]}.yaml)" if place and place[1] not in ("", getattr(run_class, "__name__", "")) else ""
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
    if isinstance(error, MissingConfigException):
        return _missing_config(error)
    if isinstance(error, OverrideParseException):
        return _unreadable(error)
    if isinstance(error, YAMLError):
        return _bad_yaml(error)
    if isinstance(cause, InterpolationResolutionError):
        reason = _first_line(cause)
        return ConfigError(
            f"{cause.full_key}: its interpolation has no result, got {reason}{where}; refer to a key that is set"
        )
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)):
        return _no_such_key(error, cause, run_class, overrides, where)
    if isinstance(cause, ValidationError):
        return _wrong_type(cause, overrides, where)
    return _other(error, overrides)


def value_of(key: str, overrides: Sequence[str]) -> str | None:
    """What the command line gave for ``key`` or for the node it lies in."""
    for override in reversed(overrides):
        name, equals, value = override.lstrip("+").partition("=")
        if equals and (name == key or key.startswith((f"{name}.", f"{name}["))):
            return value or "''"
    return None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _missing_config(error: MissingConfigException) -> ConfigError:
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    options = [name for name in error.options or options_of(group) if not name.startswith("base_")]
    if group:
        return no_such_option(group, option, options)
    return ConfigError(f"--config-name: no such file, got {option}.yaml; give --config-dir, and the name without .yaml")


def _unreadable(error: OverrideParseException) -> ConfigError:
    key, equals, value = error.override.lstrip("+~").partition("=")
    if not equals:
        return ConfigError(f"{key}: is no setting, got a word without key=value; write key=value")
    return ConfigError(
        f"{key}: cannot be read, got {value}; quote special characters, e.g. '{key}=\"...\"' with both kinds of quotes"
    )


def _bad_yaml(error: YAMLError) -> ConfigError:
    mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
    if mark is None:
        return ConfigError(f"YAML: cannot be read, got {_first_line(error)}; correct the file")
    problem = getattr(error, "problem", None) or "an error"
    return ConfigError(
        f"{Path(mark.name).name}: is no YAML, got {problem} in line {mark.line + 1} of {mark.name}; correct it"
    )


def _no_such_key(
    error: Exception, cause: OmegaConfBaseException, run_class: type, overrides: Sequence[str], where: str
) -> ConfigError:
    named = re.search(r"Could not override '([^']*)'", str(error))
    key = str(cause.full_key or "")
    if named and len(named[1]) > len(key):
        key = named[1]
    value = value_of(key, overrides)
    shown = f"{value}{where}" if value is not None else f"it{where}".replace("(", "").replace(")", "")
    if cause.object_type is dict:
        add = f"+{key}={value}" if value and not value.startswith("{") else f"+{key}=..."
        parent = key.rpartition(".")[0]
        return ConfigError(
            f"{key}: is not in the dictionary yet, got {shown}; add it with {add}, remove others with ~{parent}.NAME"
        )
    owner = cause.object_type
    at_place = isinstance(owner, type) and is_dataclass(owner) and key == cause.full_key
    siblings = [field.name for field in fields(owner)] if at_place and isinstance(owner, type) else []
    return unknown_key(key, shown, run_class, siblings)


def _wrong_type(cause: OmegaConfBaseException, overrides: Sequence[str], where: str) -> ConfigError:
    key = str(cause.full_key)
    message = str(cause.msg or cause)
    what = next((words for part, words in reversed(EXPECTED) if part in message), None)
    value = value_of(key, overrides)
    if value is None:
        found = re.search(r"(?i:value) '([^']*)'", message)
        value = found[1] if found else _first_line(cause)
    what = what or f"does not fit ({message.partition(chr(10))[0]})"
    default = _default_of(cause.object_type, key.rpartition(".")[2])
    if what == "must be a list":
        advice = f"write {key}=[{value}]"
    else:
        advice = f"use e.g. {default}" if default is not None else "correct it"
    return ConfigError(f"{key}: {what}, got {value}{where}; {advice}")


def _default_of(owner: Any, name: str) -> str | None:
    """The default of a dataclass field as it is written on the command line, where it is a plain value."""
    if not (isinstance(owner, type) and is_dataclass(owner)):
        return None
    for field in fields(owner):
        if field.name == name and field.default is not MISSING and field.default not in (None, "", "???"):
            return str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
    return None


def _other(error: Exception, overrides: Sequence[str]) -> ConfigError:
    """Messages of Hydra that carry no structure."""
    text = str(error).strip()
    sweep = re.match(r"Ambiguous value for argument '([^=]+)=(.*)'", text)
    if sweep:
        written = f"proposers=[{sweep[2]}]" if sweep[1] == "proposer" else f"[{sweep[2]}]"
        return ConfigError(
            f"{sweep[1]}: several values, got {sweep[2]}; write {written} for a list, quote a text that has commas, "
            "or add --multirun"
        )
    deleted = re.match(r"Could not delete from config\. '([^']+)' does not exist", text)
    if deleted:
        return ConfigError(
            f"~{deleted[1]}: there is nothing to leave out, got ~{deleted[1]}; check the name with --cfg job"
        )
    if text.startswith("Config group override must be"):
        for override in overrides:
            key, _, value = override.partition("=")
            if options_of(key) and value not in options_of(key):
                return no_such_option(key, value, options_of(key))
    line = " ".join(text.partition("Config search path")[0].split())
    return ConfigError(f"configuration: cannot be composed, got {line}; compare with --help")
