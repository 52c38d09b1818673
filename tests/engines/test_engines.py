"""Exports in the engines themselves: what they propose or accept is what our decoder does."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from specdraft.core.errors import ExportError
from specdraft.export._config import ENGINES_OF, ExportConfig
from specdraft.export.engines.checking import check_in_engine
from specdraft.export.exporting import Source, export_head
from specdraft.export.formats import gguf
from specdraft.heads.storage import load_head
from tests.engines.conftest import needs
from tests.exports import edit_config, written

CASES = [
    ("gguf", "eagle3"),
    ("gguf", "eagle3_own_layers"),
    ("openvino", "eagle3"),
    ("openvino", "eagle3_own_layers"),
    ("eagle3", "eagle3"),
    ("eagle3", "eagle3_own_layers"),
    ("speculators", "eagle3"),
    ("vllm_eagle", "eagle"),
    ("medusa", "medusa"),
]
"""Format and head."""
COUNTS = re.compile(r"run in .* (\d+) texts of (\d+) tokens, (\d+) .* tokens.*, (\d+) accepted: equal to ours")


def run(head: Path, format: str, output: Path) -> str:
    """Exports with the engine's own check; returns what the terminal was told."""
    console = Console(file=StringIO(), width=400)
    config = ExportConfig(format=[format], verify="engine", output=str(output))
    export_head(Source(str(head)), config, console=console)
    assert (output / "SERVE.md").is_file()
    told = console.file.getvalue()  # type: ignore[attr-defined]
    sys.stdout.write(told)  # for pytest -rP
    return told


@pytest.mark.parametrize(("format", "head"), CASES)
def test_tiny_target(format: str, head: str, fitted: Callable[[str], Path], tmp_path: Path) -> None:
    for engine in ENGINES_OF[format]:
        needs(engine)
    found = COUNTS.search(run(fitted(head), format, tmp_path / "out"))
    assert found is not None
    texts, tokens, drafted, accepted = map(int, found.groups())
    assert texts >= 2
    # Steps that accept nothing, some and all: a count that is only right for one of them would show.
    assert 0.2 * tokens < accepted < drafted


@pytest.mark.parametrize("format", ["gguf", "openvino", "eagle3", "speculators", "vllm_eagle", "medusa"])
def test_smollm2(format: str, smollm2: dict[str, Path], tmp_path: Path) -> None:
    for engine in ENGINES_OF[format]:
        needs(engine)
    kind = {"vllm_eagle": "eagle", "medusa": "medusa"}.get(format, "eagle3")
    if kind not in smollm2:
        pytest.skip(f"no recipe_smollm2_{kind} in outputs or SPECDRAFT_ENGINE_HEADS; specdraft run trains it")
    found = COUNTS.search(run(smollm2[kind], format, tmp_path / "out"))
    assert found is not None
    assert int(found.group(4)) > 0


def test_a_layer_that_is_off_by_one_shows(
    fitted: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("llamacpp")
    monkeypatch.setattr(gguf, "ordered_layers", lambda _: [3, 7, 10])
    material, _ = written(tmp_path / "out", fitted("eagle3"), "gguf")
    head = load_head(fitted("eagle3")).requires_grad_(False)
    with pytest.raises(
        ExportError, match=r"llama\.cpp .* does not draft what we do, got text 1: \d+ (drafted|accepted), ours"
    ):
        check_in_engine(material, "gguf", tmp_path / "out", head, {})


def test_biases_that_an_engine_leaves_out_show(fitted: Callable[[str], Path], tmp_path: Path) -> None:
    needs("vllm")
    material, _ = written(tmp_path / "out", fitted("medusa"), "medusa")
    edit_config(tmp_path / "out", lambda config: config.pop("medusa_fc_bias"))
    head = load_head(fitted("medusa")).requires_grad_(False)
    with pytest.raises(ExportError, match=r"behind token \d+ it proposes .*, ours"):
        check_in_engine(material, "medusa", tmp_path / "out", head, {})
