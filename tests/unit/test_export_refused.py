"""What a format cannot say, another target, and broken tensors are refused before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdraft.core.errors import CheckpointError, ExportError
from specdraft.export._config import ExportConfig
from specdraft.export.exporting import Source, export_head
from specdraft.export.material import Material
from specdraft.export.registry import choose
from specdraft.heads.base import head_kinds
from tests.exports import HEADS, REDUCED, edit_tensors, save_target, saved_head


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory, target: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    return {name: saved_head(folder / name, target, kind, **settings) for name, (kind, settings) in HEADS.items()}


def test_no_engine_but_ours_gets_an_unknown_kind(target: Path, tmp_path: Path) -> None:
    for kind in set(head_kinds()) - {"eagle3", "eagle", "medusa", "peagle"}:
        material = Material(saved_head(tmp_path / kind, target, kind))
        chosen, left_out = choose(["all"], material)
        assert [format.name for format in chosen] == ["hf"]
        assert set(left_out) == ({"speculators"} if kind == "dflash" else set())
        with pytest.raises(
            ExportError, match=rf"^export\.format: cannot carry this head, got eagle3 for {kind}: .*hf$"
        ):
            choose(["eagle3"], material)


REFUSED = [
    (
        "eagle3",
        "eagle3",
        {"aux_layers": [2, 5, 10]},
        "before the final norm, the head was trained behind it; use format=hf",
    ),
    ("trtllm", "eagle3", {"norm_before_residual": True}, "no norm_before_residual; use format=eagle3"),
    ("openvino", "eagle3", {"aux_layers": [2, 5]}, "fuses 3 layers, the head 2; use format=eagle3"),
    ("trtllm", "eagle3", {"aux_layers": [0, 5, 7]}, "cannot tap the embeddings"),
    ("gguf", "eagle3", {"fc_norm": True}, "llama.cpp: it has no fc_norm; use format=eagle3 with vLLM"),
    ("openvino", "eagle3", {"norm_output": True}, "it has no norm_output; use format=eagle3 with vLLM"),
    ("speculators", "dflash", {}, "its dflash norms queries and keys in every layer, as Qwen3 does.*; use format=hf"),
    ("speculators", "peagle", {"aux_layers": [8, 1, 5]}, "engines fuse layers in ascending order.*; use format=hf"),
    ("eagle3", "peagle", {}, "eagle3 carries eagle3 heads; use format=speculators or hf"),
    ("medusa", "medusa", {"shared_lm_head": False, **REDUCED}, "cover a part of the vocabulary .*; use format=hf"),
    ("vllm_eagle", "medusa", {}, "vllm_eagle carries eagle heads; use format=medusa or hf"),
]


@pytest.mark.parametrize(("name", "kind", "settings", "reason"), REFUSED)
def test_what_a_format_cannot_say_is_refused(
    name: str, kind: str, settings: dict[str, Any], reason: str, target: Path, tmp_path: Path
) -> None:
    head = saved_head(tmp_path / "head", target, kind, **settings)
    with pytest.raises(
        ExportError, match=rf"^export\.format: cannot carry this head, got {name} for {kind}: .*{reason}"
    ):
        export_head(Source(head), ExportConfig(format=[name]))
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_another_target_is_refused(heads: dict[str, Path], tmp_path: Path) -> None:
    other = save_target(tmp_path / "other", seed=1)
    with pytest.raises(ExportError, match=r"^target: is not the one the head was trained for \(.*, got .*other"):
        export_head(
            Source(heads["eagle3"], target=str(other)), ExportConfig(format=["eagle3"], output=str(tmp_path / "x"))
        )
    assert not (tmp_path / "x").exists()


def test_a_nan_in_the_head_is_refused(target: Path, tmp_path: Path) -> None:
    head = saved_head(tmp_path / "head", target, "eagle3")
    edit_tensors(head, lambda t: t["fc.weight"][0, :1].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=r"^head: tensor fc\.weight holds NaN or infinity"):
        export_head(Source(head), ExportConfig(format=["eagle3"]))
