"""The worked example in CONTRIBUTING.md is the code that runs, and the script that keeps it so works."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "slice_docs.py"
DOCUMENT = ROOT / "CONTRIBUTING.md"


@pytest.fixture(scope="module")
def slice_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("slice_docs", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_worked_example_is_the_code(slice_docs: ModuleType) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    paths = slice_docs.sliced_paths(text)
    assert paths == ["specdraft/heads/medusa.py", "configs/head/medusa.yaml"]
    missing = [path for path in paths if not (ROOT / path).exists()]
    if missing:
        pytest.skip(f"not written yet: {', '.join(missing)}")
    assert slice_docs.render(text) == text, "run: python scripts/slice_docs.py --write CONTRIBUTING.md"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "head.py").write_text("import os\n\n# docs: start-head\nx = r'\\1'\n\ny = 2\n# docs: end-head\nz = 3\n")
    (tmp_path / "head.yaml").write_text("kind: medusa\n")
    return tmp_path


def document(path: str, block: str = "stale") -> str:
    return f"before\n<!-- slice: {path} -->\n{block}\n<!-- end slice -->\nafter\n"


def test_render_replaces_a_stale_block(slice_docs: ModuleType, project: Path) -> None:
    fresh = document("head.py", "```python\nx = r'\\1'\n\ny = 2\n```")
    assert slice_docs.render(document("head.py"), project) == fresh
    assert slice_docs.render(fresh, project) == fresh


def test_render_takes_a_whole_yaml(slice_docs: ModuleType, project: Path) -> None:
    assert slice_docs.render(document("head.yaml"), project) == document("head.yaml", "```yaml\nkind: medusa\n```")


@pytest.mark.parametrize("marker", ["# docs: start-head", "# docs: end-head"])
def test_a_lost_marker_is_an_error(slice_docs: ModuleType, project: Path, marker: str) -> None:
    path = project / "head.py"
    path.write_text(path.read_text().replace(marker, "# gone"))
    with pytest.raises(ValueError, match="needs one line"):
        slice_docs.render(document("head.py"), project)


def test_command_reports_then_writes(tmp_path: Path) -> None:
    path = tmp_path / "doc.md"
    path.write_text(document("specdraft/heads/medusa.py"))
    if not (ROOT / "specdraft/heads/medusa.py").exists():
        pytest.skip("not written yet: specdraft/heads/medusa.py")

    def run(*arguments: str) -> int:
        return subprocess.run([sys.executable, str(SCRIPT), *arguments, str(path)], capture_output=True).returncode

    assert run() == 1
    assert path.read_text() == document("specdraft/heads/medusa.py")
    assert run("--write") == 0
    assert run() == 0
    assert "class MedusaHead" in path.read_text()
