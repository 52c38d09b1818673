"""What is checked and expanded in the words after a sub-command before Hydra reads them. No Hydra here."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass
from functools import cache
from typing import Any, get_type_hints

from specdraft.config.head_schemas import head_schemas
from specdraft.config.paths import config_dir
from specdraft.config.schema import RUNS, SHORTHANDS
from specdraft.core.errors import ConfigError
from specdraft.decode._proposer_config import PROPOSERS, ProposerConfig
from specdraft.heads._config import HeadConfig

FREE_TEXT = ("prompt",)
"""Keys whose value is taken as typed: commas, quotes, braces and all."""
OPEN_DICTIONARIES = ("export.engines",)
"""Dictionaries that are empty by default: what is given for one is all of it. Hydra would take known names only."""


@cache
def known_keys(config_class: type[Any]) -> tuple[str, ...]:
    """Every dotted key of a dataclass, groups included; of ``head`` and ``proposer`` those of all kinds."""
    keys: list[str] = []
    for name, hint in get_type_hints(config_class).items():
        keys.append(name)
        if isinstance(hint, type) and is_dataclass(hint):
            kinds = [hint, *_kinds_of(hint)]
            keys += dict.fromkeys(f"{name}.{key}" for kind in kinds for key in known_keys(kind))
    return tuple(keys)


def _kinds_of(hint: type) -> Iterable[type]:
    """The classes that may stand for ``hint``, of which the setting ``kind`` chooses one."""
    return head_schemas().values() if hint is HeadConfig else PROPOSERS.values() if hint is ProposerConfig else []


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """What to do instead of ``word``: near matches, else keys that end in it, else all options."""
    options = list(dict.fromkeys(options))
    near = difflib.get_close_matches(word, options, n=3)
    near = near or [option for option in options if option.rpartition(".")[2] == word.rpartition(".")[2]]
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"use one of {', '.join(options)}" if options else "remove it"


def options_of(group: str) -> list[str]:
    """The options that specdraft's own YAML has for a group; none = no such group."""
    return sorted(path.stem for path in (config_dir() / group).glob("*.yaml"))


def no_such_option(key: str, value: object, options: Iterable[str]) -> ConfigError:
    """The error for a choice that does not exist."""
    return ConfigError(f"{key}: no such option, got {value}; {did_you_mean(str(value), options)}")


def unknown_key(key: str, value: object, config_class: type, siblings: Sequence[str] = ()) -> ConfigError:
    """The error for a key that does not exist; ``siblings`` are the keys that do at its place, if that is known."""
    parent, _, leaf = key.rpartition(".")
    if not siblings:
        hint = did_you_mean(key, known_keys(config_class))
        if not hint.startswith("did"):
            hint = f"use one of {', '.join(name for name in known_keys(config_class) if '.' not in name)}"
    else:
        at_place = f"{parent}." if parent else ""
        near = [f"{at_place}{name}" for name in difflib.get_close_matches(leaf, siblings, n=2)]
        near = near or [name for name in known_keys(config_class) if name.rpartition(".")[2] == leaf]
        hint = f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(siblings)}"
    return ConfigError(f"{key}: no such setting, got {value}; {hint}")


def prepare_overrides(command: str, words: Sequence[str]) -> list[str]:
    """Overrides as Hydra takes them: shorthands spelled out, free text quoted.

    Raises:
        ConfigError: a word that is no override, or that could only have an effect the user did not mean.
    """
    if command == "compare":
        words = _set_aside(words)
    return [_prepare(command, word) for word in words]


def _set_aside(words: Sequence[str]) -> list[str]:
    """The words of a comparison, with those of the heads' runs as the list ``shared`` of checked words."""
    own: list[str] = []
    shared: list[str] = []
    groups = {name.partition(".")[0] for name in known_keys(RUNS["compare"])} | set(SHORTHANDS["compare"])
    settings = {name.partition(".")[0] for name in known_keys(RUNS["run"])} | {"experiment"}
    for word in words:
        key = word.lstrip("+~").partition("=")[0]
        if key == "hydra.searchpath":
            own.append(word)
            shared.append(word)
        elif key.partition(".")[0] in settings - groups:
            _prepare("run", word)
            if key in _MISPLACED:
                raise ConfigError(_MISPLACED[key].format(word=word))
            shared.append(word)
        else:
            own.append(word)
    return [*own, f"shared=[{','.join(_quoted(word) for word in shared)}]"] if shared else own


_MISPLACED = {
    "resume": "resume: has no effect, since a comparison always continues, got {word}; remove it",
    "head": "head: differs from head to head, got {word}; use heads=[...]",
}


def _prepare(command: str, word: str) -> str:
    sign = word[: len(word) - len(word.lstrip("+~"))]
    key, equals, value = word[len(sign) :].partition("=")
    if not key or (not equals and sign != "~"):
        hint = f"write experiment={word}" if word in options_of("experiment") else "write key=value"
        raise ConfigError(f"{word or repr(word)}: is no setting, got a word without key=value; {hint}")
    if not sign and key in SHORTHANDS.get(command, {}):
        return _spell_out(SHORTHANDS[command][key], value)
    if key in FREE_TEXT and not sign:
        return f"{key}={_quoted(value)}"
    known = known_keys(RUNS[command])
    if sign == "~" and (key in known or key == "experiment"):
        raise ConfigError(f"~{key}: cannot be left out, got {word}; set it to another value instead")
    is_group = key in [name for name in (*known, "experiment") if "." not in name] and bool(options_of(key))
    if sign == "+" and (key in known or is_group):
        raise ConfigError(f"+{key}: exists already, got {word}; write {word[1:]}")
    if sign == "++" and is_group:
        raise ConfigError(f"++{key}: is a choice, got {word}; write {word[2:]}")
    _check_key(command, key, value or "''")
    if key == "proposer" and value.startswith("["):
        advice = f"compare several with proposers={value}" if "proposers" in known else "choose one"
        raise ConfigError(f"proposer: takes one option, got {value}; {advice}")
    if is_group and equals and value in ("", "null"):
        if key == "experiment":
            return word
        raise no_such_option(key, value or "''", options_of(key))
    return _opened(key, word) if not sign else word


def _check_key(command: str, key: str, value: str) -> None:
    """Refuses an unknown key at once where that needs no composing; which settings a head has depends on its kind."""
    known = known_keys(RUNS[command])
    parent = key.rpartition(".")[0]
    is_inside_value = parent in known and not any(name.startswith(f"{parent}.") for name in known)
    is_hydras = re.search(r"[/@\[]|^hydra\b", key) is not None
    if key in known or key == "experiment" or parent in ("head", "proposer") or is_inside_value or is_hydras:
        return
    siblings = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == parent]
    raise unknown_key(key, value, RUNS[command], siblings)


def _spell_out(key: str, value: str) -> str:
    """A shorthand's long form; the one that takes a list accepts a single name, too."""
    if key in ("eval.prompts", "tune.prompts", "export.format") and not value.startswith("["):
        value = f"[{value}]"
    return _opened(key, f"{key}={value}")


def _opened(key: str, word: str) -> str:
    """The word so that Hydra adds the names of an open dictionary."""
    return f"++{word}" if key in OPEN_DICTIONARIES else word


def escape_interpolation(text: str) -> str:
    """``text`` as OmegaConf has to be given it so that ``${`` stays as it is."""
    return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text)


def _quoted(text: str) -> str:
    """``text`` as a quoted string of Hydra's grammar, with nothing left to interpret; text in quotes is left alone."""
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        return text
    # A backslash of Hydra's grammar counts as an escape only in a run that ends at a quote.
    text = re.sub(r"(\\*)'", lambda found: found[1] * 2 + r"\'", escape_interpolation(text))
    trailing = len(text) - len(text.rstrip("\\"))
    return f"'{text}{chr(92) * trailing}'"


def check_hydra_overrides(overrides: Sequence[str]) -> list[str]:
    """The overrides; of Hydra's own settings only the search path means something outside --multirun.

    Raises:
        ConfigError: another setting of Hydra's own.
    """
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if re.match(r"hydra[./@]|hydra$", key) and key != "hydra.searchpath":
            advice = "use output_dir and name, or remove it"
            raise ConfigError(f"{key}: has no effect without --multirun, got {value}; {advice}")
    return list(overrides)
