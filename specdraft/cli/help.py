"""`specdraft COMMAND --help`: every setting with its present value and its meaning, read from the dataclasses."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from specdraft.config.overrides import options_of
from specdraft.config.schema import RUNS, SHORTHANDS, ExperimentRun

WIDTH = 110
INDENT = 40


def print_help(command: str, summary: str, config: DictConfig) -> None:
    """Writes the help of a sub-command, with the values of ``config``, to stdout."""
    lines = [f"specdraft {command}: {summary}", "", f"usage: specdraft {command} [KEY=VALUE ...]", ""]
    shorthands = SHORTHANDS.get(command, {})
    # A missing value is not `in` a config, but it is among its keys.
    keys = [str(key) for key in config.keys()]  # noqa: SIM118
    groups = [key for key in keys if options_of(key) and key not in shorthands]
    groups += ["experiment"] * issubclass(RUNS[command], ExperimentRun)
    lines += ["== Configuration groups ==", "Choose one option of each with GROUP=OPTION", ""]
    lines += [f"{group}: {', '.join(options_of(group))}" for group in groups]
    if shorthands:
        lines += ["", "== Shorthands ==", ""]
        lines += [f"{short}=... for {long}=..." for short, long in shorthands.items()]
    lines += ["", "== Config ==", "Override anything with KEY=VALUE (e.g. target.dtype=bfloat16)", ""]
    lines += _describe(config, RUNS[command], 0)
    lines += [
        "",
        "Flags: --cfg job, --info searchpath, --config-dir DIR, --multirun, --hydra-help (see specdraft --help)",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def _describe(node: DictConfig, owner: Any, depth: int) -> Iterator[str]:
    """Lines ``key: value    meaning`` of a typed node and of those below it."""
    meanings = field_docs(owner)
    values = OmegaConf.to_container(node, resolve=False)
    assert isinstance(values, dict)
    for field in fields(owner):
        kind = OmegaConf.get_type(node, field.name)
        meaning = meanings.get(field.name, "")
        if kind is not None and is_dataclass(kind):
            yield from _entry("  " * depth + f"{field.name}:", meaning)
            yield from _describe(node[field.name], kind, depth + 1)
        else:
            yield from _entry("  " * depth + f"{field.name}: {_shown(values[field.name])}", meaning)


def _shown(value: Any) -> str:
    """A value as YAML in one line."""
    if isinstance(value, str) and value:
        return value
    return str(yaml.safe_dump(value, default_flow_style=True, width=10_000)).partition("\n")[0]


def _entry(head: str, meaning: str) -> Iterator[str]:
    """One setting, its meaning in a column of its own."""
    wrapped = textwrap.wrap(meaning, WIDTH - INDENT) or [""]
    if len(head) >= INDENT - 1:
        yield head
        head = ""
    yield f"{head:<{INDENT}}{wrapped[0]}".rstrip()
    yield from (" " * INDENT + line for line in wrapped[1:])


@cache
def field_docs(owner: type) -> dict[str, str]:
    """Field -> the text under it in the source of the dataclass ``owner`` and of the dataclasses it extends."""
    docs: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        if not is_dataclass(base):
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for item, after in zip(node.body, node.body[1:]):  # noqa: B905 (each statement and the next)
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and isinstance(after, ast.Expr):
                docs[item.target.id] = " ".join(str(ast.literal_eval(after.value)).replace("``", "").split())
    return docs
