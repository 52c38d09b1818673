"""The settings read from the sources of the heads are those of the classes that training uses."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from specdraft.config import head_schemas as module
from specdraft.config.head_schemas import head_schemas
from specdraft.core.errors import ConfigError
from specdraft.heads.base import head_kinds
from tests.tiny import tiny_target

ROOT = Path(__file__).parents[2]


def described(config_class: Any) -> list[tuple[Any, ...]]:
    hints = get_type_hints(config_class)
    return [
        (item.name, hints[item.name], item.default, None if item.default_factory is MISSING else item.default_factory())
        for item in fields(config_class)
    ]


def test_same_kinds() -> None:
    assert list(head_schemas()) == list(head_kinds())
    assert len(head_schemas()) >= 3


@pytest.mark.parametrize("kind", head_schemas())
def test_same_settings_and_rules(kind: str) -> None:
    static, real = head_schemas()[kind], head_kinds()[kind]
    assert static is not real
    assert described(static) == described(real)
    assert static.__post_init__.__code__.co_code == real.__post_init__.__code__.co_code
    for settings in ({"num_draft_tokens": 0}, {"draft_vocab_size": 1}):
        messages = []
        for config_class in (static, real):
            with pytest.raises(ConfigError) as caught:
                config_class(kind=kind, **settings)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]


@pytest.mark.parametrize("kind", head_schemas())
def test_builds_the_real_head(kind: str) -> None:
    head = head_schemas()[kind](kind=kind, num_draft_tokens=2).build(tiny_target("llama").spec)
    assert type(head.config) is head_kinds()[kind]
    assert head.config.num_draft_tokens == 2


def test_needs_no_torch() -> None:
    code = "import sys; from specdraft.config.head_schemas import *; print(*head_schemas(), 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == [*head_kinds(), "False"]


def test_a_new_kind_is_read_with_its_constants_and_base(tmp_path: Path) -> None:
    """A file with imports that cannot be had, a constant, a common base and two kinds."""
    path = tmp_path / "novel.py"
    path.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass, field\n"
        "import torch_of_another_world\n"
        "from specdraft.core.errors import ConfigError\n"
        "from specdraft.heads._config import HeadConfig\n"
        "MODES = ('a', 'b')\n"
        "LAYER = torch_of_another_world.Layer()\n"
        "@dataclass(slots=True, kw_only=True)\n"
        "class Common(HeadConfig):\n"
        "    mode: str = 'a'\n"
        "    widths: list[int] = field(default_factory=lambda: [1, 2])\n"
        "    def __post_init__(self) -> None:\n"
        "        HeadConfig.__post_init__(self)\n"
        "        if self.mode not in MODES:\n"
        "            raise ConfigError(f'head.mode: unknown, got {self.mode}; use a or b')\n"
        "@register_head('novel')\n"
        "@dataclass(slots=True, kw_only=True)\n"
        "class Novel(Common):\n"
        "    depth: int | None = None\n"
        "@register_head('second')\n"
        "@dataclass(slots=True, kw_only=True)\n"
        "class Second(Common):\n"
        "    pass\n"
        "class Module(torch_of_another_world.Module):\n"
        "    pass\n"
    )
    kinds = module._schemas_of(path)
    assert list(kinds) == ["novel", "second"]
    assert kinds["novel"]().widths == [1, 2]
    assert get_type_hints(kinds["novel"])["depth"] == int | None
    with pytest.raises(ConfigError, match=r"head\.mode: unknown, got c"):
        kinds["second"](mode="c")
    sys.modules.pop(f"{module.__name__}.novel")
