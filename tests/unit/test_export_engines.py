"""``verify=engine`` without an engine: how proposals are placed, what counts as a difference, and what is refused."""

from __future__ import annotations

import copy
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from specdraft.core.errors import ConfigError, ExportError
from specdraft.export._config import ExportConfig
from specdraft.export.engines import environments
from specdraft.export.engines.compare import compare
from specdraft.export.engines.ours import Row, our_rows, places
from specdraft.export.exporting import Source, export_head
from specdraft.export.gguf_file import read_gguf
from specdraft.export.gguf_target import write_target
from specdraft.export.material import Material
from specdraft.heads.storage import load_head
from specdraft.targets._config import TargetConfig
from specdraft.targets.hf import load_target
from tests.exports import save_target, saved_head

ROW = Row(
    prompt=[1],
    tokens=[5, 6, 7, 8, 9, 10],
    proposals=[[6, 7, 0], [9, 0]],
    drafted=5,
    accepted=3,
    steps=2,
)
"""Two drafted tokens are accepted behind the first token, one of two behind the fourth."""
SAME: dict[str, Any] = {
    "version": "1.0",
    "plain": [{"tokens": ROW.tokens}],
    "speculative": [{"tokens": ROW.tokens, "proposals": [[6, 7, 0], [9, 0, 3], [4, 4, 4]]}],
}
COUNTED: dict[str, Any] = {
    "version": "1.0",
    "plain": [{"tokens": ROW.tokens}],
    "speculative": [{"tokens": ROW.tokens, "drafted": 5, "accepted": 3, "forwards": 3}],
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return saved_head(tmp_path_factory.mktemp("head") / "head", target, "eagle3")


def test_places_follow_from_what_was_accepted() -> None:
    assert places(ROW.tokens, SAME["speculative"][0]["proposals"]) == {1: [6, 7, 0], 4: [9, 0, 3]}
    assert places([5, 6], [[6], [7]]) == {1: [6]}


def test_equal_rows() -> None:
    found = compare("vLLM", SAME, [ROW])
    assert (found.difference, found.proposed, found.drafted, found.accepted) == (None, 5, 5, 3)
    assert found.line() == "vLLM 1.0: 1 texts of 6 tokens, 5 proposed tokens, 3 accepted: equal to ours"
    counted = compare("llama.cpp", COUNTED, [ROW])
    assert (counted.difference, counted.proposed) == (None, 0)
    assert "5 drafted tokens, counted, 3 accepted" in counted.line()


@pytest.mark.parametrize(
    ("base", "path", "value", "words"),
    [
        (SAME, ("plain", "tokens"), [5, 6, 7, 8, 9, 11], "the target's own text differs plain: another token at 5"),
        (SAME, ("speculative", "tokens"), [5, 6], "differs with the draft: 2 tokens in place of 6"),
        (
            SAME,
            ("speculative", "proposals"),
            [[6, 7, 0], [9, 1]],
            r"behind token 4 it proposes \[9, 1\], ours \[9, 0\]",
        ),
        (SAME, ("speculative", "proposals"), [[6, 7, 0]], "nothing is proposed behind token 4"),
        (COUNTED, ("speculative", "drafted"), 6, "6 drafted, ours 5"),
        (COUNTED, ("speculative", "accepted"), 2, "2 accepted, ours 3"),
        (COUNTED, ("speculative", "forwards"), 4, "4 forwards, ours 3"),
    ],
)
def test_differences(base: dict[str, Any], path: tuple[str, str], value: object, words: str) -> None:
    result = copy.deepcopy(base)
    result[path[0]][0][path[1]] = value
    difference = compare("an engine", result, [ROW]).difference
    assert difference is not None
    with pytest.raises(ExportError, match=words):
        raise ExportError(difference)


def test_our_rows_are_those_of_the_decoder(target: Path, head: Path) -> None:
    loaded = load_target(TargetConfig(name=str(target), device="cpu"))
    rows = our_rows(loaded, load_head(head).requires_grad_(False), 12)
    assert rows
    eos = set(loaded.spec.eos_token_ids)
    for row in rows:
        assert 2 <= len(row.tokens) <= 12 and not eos & set(row.tokens)
        placed = places(row.tokens, row.proposals)
        # Nothing is drafted for the last token of a text.
        assert len(placed) == len(row.proposals) and row.steps - len(placed) in (0, 1)
        assert sum(map(len, row.proposals)) == row.drafted
        # All tokens are the prompt's own, accepted, or the target's own of a step.
        assert len(row.tokens) == 1 + row.accepted + row.steps


def test_the_target_as_gguf(target: Path, head: Path, tmp_path: Path) -> None:
    material = Material(head)
    write_target(material, tmp_path / "target.gguf", torch.float32)
    values, tensors = read_gguf(tmp_path / "target.gguf")
    assert values["general.architecture"] == "llama" and values["llama.block_count"] == material.spec.num_hidden_layers
    assert (tensors["output_norm.weight"] == material.target.tensor("model.norm.weight")).all()
    assert len(tensors) == 3 + 9 * material.spec.num_hidden_layers


def test_engines_that_are_not_there(head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = ExportConfig(format=["gguf"], verify="engine", output=str(tmp_path / "out"))
    with pytest.raises(
        ExportError, match=r"llama\.cpp is not installed, got no .*run scripts/engines.sh llamacpp, or give"
    ):
        export_head(Source(head), config)
    assert not (tmp_path / "out").exists()
    console = Console(file=StringIO(), width=400)
    export_head(
        Source(head), ExportConfig(format=["all"], verify="engine", output=str(tmp_path / "out")), console=console
    )
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert "not run in an engine: trtllm: no engine reads it on a CPU" in told
    assert "not run in an engine: eagle3: vLLM is not installed" in told
    assert (tmp_path / "out" / "gguf" / gguf_file()).is_file()


def gguf_file() -> str:
    from specdraft.export.formats.gguf import FILE

    return FILE


def test_an_engine_that_fails_leaves_nothing(head: Path, tmp_path: Path) -> None:
    config = ExportConfig(
        format=["gguf"], verify="engine", engines={"llamacpp": sys.executable}, output=str(tmp_path / "out")
    )
    with pytest.raises(ExportError, match=r"llama\.cpp failed \(exit code 1\), got ModuleNotFoundError: .*xllamacpp"):
        export_head(Source(head), config)
    assert not (tmp_path / "out").exists()


def test_an_engine_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "LIMIT_S", 0.2)
    with pytest.raises(ExportError, match=r"vLLM could not be run, got .*timed out"):
        environments.run_process("vllm", [sys.executable, "-c", "import time; time.sleep(30)"], threads=1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"verify": "all"}, "export.verify: unknown, got 'all'; use files or engine"),
        ({"engines": {"vllm": "python"}}, "export.engines: has no effect without verify=engine"),
        ({"verify": "engine", "format": ["eagle3"], "engines": {"sglang": "x"}}, "export.engines: no such engine"),
        ({"verify": "engine"}, "export.verify: no engine reads hf on a CPU"),
        ({"verify": "engine", "format": ["trtllm", "eagle3"]}, "no engine reads trtllm on a CPU"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ExportConfig(**settings)
