"""Exports and imports that go wrong on the way: no room, torn or broken files. What was there before stays whole."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdraft.core.errors import CheckpointError, ExportError
from specdraft.export._config import ExportConfig
from specdraft.export.exporting import Source, export_head
from specdraft.export.importing import import_head
from tests.exports import save_target, saved_head
from tests.unit.test_export_gguf_target import BYTES, cut_as

FORMATS = ("hf", "eagle3", "gguf", "openvino", "speculators", "trtllm")
ROOM_BYTES = 10_000
"""Less than any weights have."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = save_target(tmp_path_factory.mktemp("target"))
    cut_as(target, BYTES)
    return target


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    folder = tmp_path_factory.mktemp("head") / "best"
    return saved_head(folder, target, "eagle3", draft_vocab_size=40, aux_layers=[2, 5, 7])


@contextmanager
def little_room() -> Iterator[None]:
    """The system itself refuses to let a file grow, in the middle of a write."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_BYTES, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_no_room_leaves_every_earlier_export_whole(
    target: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_head(Source(head), ExportConfig(format=list(FORMATS), output=str(tmp_path / "out"), target_gguf=True))
    before = contents(tmp_path)
    assert {name.split("/")[1] for name in before} == set(FORMATS)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in FORMATS:
        again = ExportConfig(
            format=[name], output=str(tmp_path / "out" / name), license="mit", target_gguf=name == "gguf"
        )
        with little_room(), pytest.raises(ExportError) as caught:
            export_head(Source(head), again)
        assert str(caught.value).startswith("export.output: cannot be written, got "), name
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(ExportError, match="No space left on device") as other:
            export_head(Source(head), again)
        monkeypatch.undo()
        assert "\n" not in str(caught.value) + str(other.value)
        assert contents(tmp_path) == before


def test_no_room_for_a_first_export_leaves_nothing(head: Path, tmp_path: Path) -> None:
    with little_room(), pytest.raises(ExportError, match=r"^export\.output: cannot be written"):
        export_head(Source(head), ExportConfig(format=["all"], output=str(tmp_path / "out" / "deep")))
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("size", [-40, 4000, 9])
def test_a_torn_gguf_is_not_imported(size: int, target: Path, head: Path, tmp_path: Path) -> None:
    (export,) = export_head(Source(head), ExportConfig(format=["gguf"], output=str(tmp_path / "out")))
    assert export.folder is not None
    path = export.folder / "draft.gguf"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"^source: draft\.gguf cannot be read, got ") as caught:
        import_head(str(export.folder), tmp_path / "in", target=str(target))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "in").exists()


def test_a_nan_in_a_gguf_is_not_imported(target: Path, head: Path, tmp_path: Path) -> None:
    (export,) = export_head(Source(head), ExportConfig(format=["gguf"], output=str(tmp_path / "out")))
    assert export.folder is not None
    path = export.folder / "draft.gguf"
    norm = load_file(head / "model.safetensors")["norm.weight"]
    data = path.read_bytes()
    row = norm.numpy().tobytes()
    assert data.count(row) == 1
    path.write_bytes(data.replace(row, torch.full_like(norm, torch.nan).numpy().tobytes()))
    with pytest.raises(CheckpointError, match=r"^source: tensor norm\.weight holds NaN"):
        import_head(str(export.folder), tmp_path / "in", target=str(target))


def test_a_failed_import_leaves_the_earlier_one(target: Path, head: Path, tmp_path: Path) -> None:
    (export,) = export_head(Source(head), ExportConfig(format=["eagle3"], output=str(tmp_path / "out")))
    assert export.folder is not None
    import_head(str(export.folder), tmp_path / "in", target=str(target))
    before = contents(tmp_path / "in")
    path = export.folder / "model.safetensors"
    tensors = load_file(path)
    tensors["norm.weight"][0] = torch.inf
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match="holds NaN or infinity"):
        import_head(str(export.folder), tmp_path / "in", target=str(target))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        import_head(str(export.folder), tmp_path / "in", target=str(target))
    assert contents(tmp_path / "in") == before
