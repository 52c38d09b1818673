"""The wheel and the sdist carry all that an installed specdraft reads; the wheel works in an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import specdraft

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


def needed() -> set[str]:
    """Files of the checkout that must be in both archives, relative to the root."""
    paths = [path for path in (ROOT / "specdraft").rglob("*") if path.suffix in {".py", ".jsonl", ".typed", ".j2"}]
    paths += (ROOT / "configs").rglob("*.yaml")
    return {path.relative_to(ROOT).as_posix() for path in paths} | {"specdraft/py.typed"}


def test_wheel_is_complete(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected = {f"specdraft/{name}" if name.startswith("configs/") else name for name in needed()}
    assert any(name.startswith("specdraft/configs/") for name in expected)
    assert {name for name in names if ".dist-info/" not in name} == expected


def test_sdist_is_complete(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert needed() | {"pyproject.toml", "README.md", "LICENSE", "train.py"} <= names


def test_wheel_runs_in_an_empty_folder(dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
    ]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def run(*command: str) -> str:
        command = (sys.executable, *command)
        result = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout

    where, version = run("-c", "import specdraft; print(specdraft.__file__, specdraft.__version__)").split()
    assert Path(where).is_relative_to(site)
    assert version == specdraft.__version__
    command = "from specdraft.cli.main import main; raise SystemExit(main())"
    assert f"file://{site / 'specdraft' / 'configs'}" in run("-c", command, "train", "--info", "searchpath")
    assert "medusa" in run("-c", command, "train", "--cfg", "job", "name=x", "head=medusa")
    assert list(empty.iterdir()) == []
