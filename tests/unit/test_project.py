"""The project's frame: one version, a light import, no network in tests, and the house rules on sizes."""

from __future__ import annotations

import ast
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import specdraft

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "specdraft"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TEXTS = [
    path
    for folder in ("specdraft", "configs", "tests", "scripts", "recipes", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".py", ".yaml", ".md", ".sh", ".json"} and "__pycache__" not in path.parts
] + [path for path in sorted(ROOT.iterdir()) if path.is_file() and path.name not in {"LICENSE", ".git"}]

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
MACHINE_PATH = re.compile(r"(?<![\w.:/-])/(?:root|home|Users|work|mnt)/\w")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    assert len(SOURCES) > 10, f"the house rules looked at {len(SOURCES)} files only"
    return {relative(path): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


def test_version_agrees_with_pyproject() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'^version = "(.+)"$', text, re.MULTILINE) == [specdraft.__version__]


def test_torch_is_pinned_exactly_once() -> None:
    pins = re.findall(r"^torch==([\d.]+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(pins) == 1


def test_settings_and_packages_import_without_torch() -> None:
    light = [path.parent if path.name == "__init__.py" else path.with_suffix("") for path in SOURCES]
    names = [relative(path).replace("/", ".") for path in light if path.is_dir() or path.name == "_config"]
    assert {"specdraft", "specdraft.heads", "specdraft.heads._config"} <= set(names)
    heavy = {"torch", "transformers", "numpy", "accelerate", "datasets", "peft", "wandb"}
    code = f"import sys, {', '.join(names)}; print(*{heavy} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def test_files_are_short() -> None:
    counts = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {name: count for name, count in counts.items() if count > MAX_FILE_LINES} == {}


def test_functions_are_short(trees: dict[str, ast.Module]) -> None:
    long = [
        f"{name}:{node.lineno} {node.name}"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (node.end_lineno or node.lineno) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_files_say_what_belongs_there(trees: dict[str, ast.Module]) -> None:
    assert [name for name, tree in trees.items() if not ast.get_docstring(tree)] == []


def test_no_file_names_a_path_of_one_machine() -> None:
    assert len(TEXTS) > 20
    found = [
        f"{relative(path)}:{number}"
        for path in TEXTS
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []


def test_machine_path_pattern_finds_one() -> None:
    assert MACHINE_PATH.search('open("/' + 'home/someone/data.jsonl")')
    assert not MACHINE_PATH.search("https://example.org/home/page")


def test_the_network_is_blocked() -> None:
    # 192.0.2.0/24 is reserved for documentation: nothing answers there even if the guard were gone.
    with socket.socket() as sock, pytest.raises(RuntimeError, match="mark the test `network`"):
        sock.connect(("192.0.2.1", 80))
    with pytest.raises(RuntimeError, match=r"look-up of example\.org"):
        socket.create_connection(("example.org", 80))


def test_loopback_stays_open() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        client.sendall(b"x")
        accepted, _ = server.accept()
        with accepted:
            assert accepted.recv(1) == b"x"
