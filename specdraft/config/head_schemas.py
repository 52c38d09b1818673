"""The settings of every kind of head, read from specdraft/heads without importing torch.

A kind keeps its config class and its module, which needs torch, in one file. Here only the config class is compiled,
so that the command line can check settings, defaults and rules in a fraction of a second.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from specdraft.heads import _config as heads_config
from specdraft.heads._config import HeadConfig

if TYPE_CHECKING:
    from specdraft.core.types import TargetSpec
    from specdraft.heads.base import DraftHead

LIGHT_MODULES = {"__future__", "dataclasses", "typing", "math", "specdraft.core.errors", "specdraft.heads._config"}
"""What a config class may import; other imports of its file are left out."""


@cache
def head_schemas() -> dict[str, type[HeadConfig]]:
    """Kind -> config class, sorted by kind. ``build`` of such a class makes the real head and imports torch then.

    Raises:
        NameError: a config class needs more at its definition than LIGHT_MODULES and constants of its file.
    """
    folder = Path(heads_config.__file__).parent
    kinds: dict[str, type[HeadConfig]] = {}
    for path in sorted(folder.glob("[!_]*.py")):
        kinds.update(_schemas_of(path))
    return dict(sorted(kinds.items()))


def _schemas_of(path: Path) -> dict[str, type[HeadConfig]]:
    """The config classes that one file registers."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    if not any(_registers(node) for node in tree.body):
        return {}
    kinds: dict[str, type[HeadConfig]] = {}
    module = ModuleType(f"{__name__}.{path.stem}")
    module.__file__ = str(path)
    # dataclasses and OmegaConf resolve annotations in the module that a class names.
    sys.modules[module.__name__] = module
    module.__dict__["register_head"] = _recorder(kinds)
    light = ast.Module(body=list(_light_statements(tree)), type_ignores=[])
    exec(compile(light, str(path), "exec"), module.__dict__)
    return kinds


def _light_statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Imports of light modules, literal constants and dataclasses, in the file's order."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            keep = node.module in LIGHT_MODULES
        elif isinstance(node, ast.Import):
            keep = all(alias.name in LIGHT_MODULES for alias in node.names)
        elif isinstance(node, ast.ClassDef):
            keep = any(_name_of(decorator) == "dataclass" for decorator in node.decorator_list)
        else:
            keep = isinstance(node, (ast.Assign, ast.AnnAssign)) and _is_literal(node.value)
        if keep:
            yield node


def _recorder(kinds: dict[str, type[HeadConfig]]):  # type: ignore[no-untyped-def]
    """A stand-in for ``heads.base.register_head`` that enters classes in ``kinds``."""

    def register_head(kind: str):  # type: ignore[no-untyped-def]
        def enter(config_class: type[HeadConfig]) -> type[HeadConfig]:
            config_class.build = _build  # type: ignore[method-assign]
            kinds[kind] = config_class
            return config_class

        return enter

    return register_head


def _build(self: HeadConfig, spec: TargetSpec) -> DraftHead:
    """``HeadConfig.build`` of the class in specdraft.heads that has the same settings."""
    from specdraft.heads.base import head_config

    return head_config(self.kind, asdict(self)).build(spec)


def _registers(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef) and any(_name_of(d) == "register_head" for d in node.decorator_list)


def _name_of(decorator: ast.expr) -> str | None:
    """``name`` of ``@name`` and ``@name(...)``."""
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return target.id if isinstance(target, ast.Name) else None


def _is_literal(value: ast.expr | None) -> bool:
    try:
        ast.literal_eval(value if value is not None else "")
    except (ValueError, SyntaxError):
        return False
    return value is not None


# At import, so that a process that unpickles a job of Hydra's launchers finds the classes under the names of their modules.
head_schemas()
