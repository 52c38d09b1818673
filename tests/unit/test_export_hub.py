"""Exports: the folder, its verification, and the upload to a loopback Hub."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from specdraft.core.errors import CheckpointError, ConfigError, ExportError
from specdraft.export._config import ExportConfig
from specdraft.export.exporting import Export, Source
from specdraft.export.exporting import export_head as export_heads
from specdraft.export.formats.hf import FILES, probe, verify
from specdraft.heads.storage import CONFIG_NAME, WEIGHTS_NAME, load_head, save_head
from tests.exports import save_target, saved_head
from tests.hub_server import FakeHub, fake_hub
from tests.support import SPEC, make_head

# huggingface_hub sends large files through an argument that its HTTP library has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO = "me/my-head"
PUSH = ExportConfig(push_to=REPO)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A head in the folder of a run, beside files that must never be exported."""
    head = make_head("eagle3", SPEC, num_draft_tokens=3, draft_vocab_size=40)
    folder = save_head(head, tmp_path / "run" / "best")
    (folder / "optimizer.safetensors").write_bytes(b"never exported")
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """The library pointed at a loopback server, with a token and without its own storage protocol."""
    with fake_hub() as hub:
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", "hf_loopback")
        yield hub


def export_head(source: Path | str, config: ExportConfig, console: Console | None = None) -> Export:
    """The one export of ``source`` in our own format."""
    (export,) = export_heads(Source(source), config, console=console)
    return export


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_export_reads_back_as_the_same_head(folder: Path) -> None:
    export = export_head(folder, ExportConfig())
    assert export.folder == folder.parent / "export-hf"
    assert set(contents(export.folder)) == {"README.md", CONFIG_NAME, WEIGHTS_NAME}
    mine, theirs = load_head(folder), load_head(export.folder)
    for name, value in mine.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name])
    assert torch.equal(probe(mine), probe(theirs))
    assert export.sizes == {name: len(data) for name, data in contents(export.folder).items()}
    assert {path.name for path in folder.parent.iterdir()} == {"best", "export-hf"}


def test_only_the_heads_own_weights_are_in_it(folder: Path) -> None:
    export = export_head(folder, ExportConfig())
    assert export.folder is not None
    assert set(load_file(export.folder / WEIGHTS_NAME)) == set(load_head(folder).state_dict())


def test_config_holds_no_path_of_this_machine(tmp_path: Path) -> None:
    training = {
        "step": 1,
        "tokens": 2,
        "settings": {"output_dir": str(tmp_path), "data": {"sources": [str(tmp_path / "a.jsonl")]}},
    }
    folder = save_head(make_head("medusa", SPEC), tmp_path / "best", {"training": training})
    export = export_head(folder, ExportConfig())
    assert export.folder is not None
    config = json.loads((export.folder / CONFIG_NAME).read_text())
    assert config["training"]["settings"]["data"]["sources"] == ["a.jsonl"]
    assert str(tmp_path) not in (export.folder / CONFIG_NAME).read_text() + export.card


def test_an_earlier_export_is_replaced_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    first = export_head(folder, ExportConfig())
    second = export_head(folder, ExportConfig(license="mit"))
    assert second.folder == first.folder
    assert second.folder is not None
    assert "license: mit" in (second.folder / "README.md").read_text()
    before = contents(folder)
    for occupied in (folder, tmp_path / "run"):
        with pytest.raises(ExportError, match=r"^export\.output: is occupied"):
            export_head(folder, ExportConfig(output=str(occupied)))
    shutil.copytree(folder, tmp_path / "other", ignore=shutil.ignore_patterns("optimizer*"))
    with pytest.raises(ExportError, match="is occupied"):
        export_head(folder, ExportConfig(output=str(tmp_path / "other")))
    assert contents(folder) == before


def test_dry_run_prints_and_leaves_no_trace(folder: Path, hub: FakeHub) -> None:
    console = Console(file=io.StringIO(), width=80)
    export = export_head(folder, ExportConfig(push_to=REPO, private=True, dry_run=True), console=console)
    assert export.folder is None
    assert export.url is None
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for name, size in export.sizes.items():
        assert name in text
        assert f"{size:,} bytes" in text
    assert "optimizer" not in text
    assert f"would upload these files to {REPO} (private" in text
    assert export.card in text
    assert [path.name for path in folder.parent.iterdir()] == ["best"]
    assert hub.calls == []


def test_dry_run_needs_no_place_to_write(folder: Path) -> None:
    output = folder.parent / "deep" / "export"
    export_head(folder, ExportConfig(output=str(output), dry_run=True), console=Console(file=io.StringIO()))
    assert not output.parent.exists()


def test_results_of_other_weights_are_refused(folder: Path) -> None:
    (folder / "results.json").write_text(json.dumps({"schema": 1, "head": {"sha256": "0" * 64}}))
    with pytest.raises(ExportError, match="measured with other weights"):
        export_head(folder, ExportConfig())
    (folder / "results.json").write_text('{"schema": 2}')
    with pytest.raises(ExportError, match="not of schema 1"):
        export_head(folder, ExportConfig())
    (folder / "results.json").write_text('{"schema"')
    with pytest.raises(ExportError, match="cannot be read"):
        export_head(folder, ExportConfig())
    assert [path.name for path in folder.parent.iterdir()] == ["best"]


def test_torn_weights_are_refused(folder: Path) -> None:
    path = folder / WEIGHTS_NAME
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="missing or torn"):
        export_head(folder, ExportConfig())
    assert [path.name for path in folder.parent.iterdir()] == ["best"]


def test_verification_finds_a_changed_a_missing_and_a_foreign_tensor(folder: Path) -> None:
    head = load_head(folder)
    export = export_head(folder, ExportConfig())
    assert export.folder is not None
    verify(export.folder, head)
    path = export.folder / WEIGHTS_NAME
    tensors = load_file(path)
    name = next(name for name, tensor in tensors.items() if tensor.is_floating_point())
    for changed in (
        {**tensors, name: tensors[name] + 1e-3},
        {key: tensor for key, tensor in tensors.items() if key != name},
        {**tensors, "lm_head.weight": torch.zeros(2, 2)},
    ):
        save_file(changed, path)
        with pytest.raises(ExportError, match=r"^export\.format"):
            verify(export.folder, head)


def test_disk_full_leaves_nothing_and_the_earlier_export(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export = export_head(folder, ExportConfig())
    assert export.folder is not None
    before = contents(export.folder)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ExportError, match=r"cannot be written.*No space left"):
        export_head(folder, ExportConfig(license="mit"))
    assert contents(export.folder) == before
    assert {path.name for path in folder.parent.iterdir()} == {"best", "export-hf"}


def test_push_and_download_give_the_same_head(folder: Path, hub: FakeHub) -> None:
    export = export_head(folder, ExportConfig(push_to=REPO, private=True))
    assert export.folder is not None
    assert hub.repos[REPO] == contents(export.folder)
    assert hub.private[REPO]
    assert len(hub.commits) == 1
    assert export.url == f"{hub.endpoint}/{REPO}/commit/{hub.sha(REPO)}"
    assert "Bearer hf_loopback" in hub.tokens
    assert not [call for call in hub.calls if call.startswith("unknown")]
    local, remote = load_head(folder), load_head(REPO)
    assert remote.config == local.config
    assert remote.spec.fingerprint == local.spec.fingerprint
    for name, value in local.state_dict().items():
        assert torch.equal(value, remote.state_dict()[name])
    assert torch.equal(probe(local), probe(remote))


def test_several_formats_share_a_repository(hub: FakeHub, tmp_path: Path) -> None:
    head = saved_head(tmp_path / "head", save_target(tmp_path / "target"), "eagle3", draft_vocab_size=40)
    config = ExportConfig(format=["hf", "eagle3", "trtllm"], push_to=REPO, output=str(tmp_path / "out"))
    exports = export_heads(Source(head), config)
    wanted = {
        (name if export.format == "hf" else f"{export.format}/{name}"): data
        for export in exports
        if export.folder is not None
        for name, data in contents(export.folder).items()
    }
    assert hub.repos[REPO] == wanted
    serve = wanted["eagle3/SERVE.md"].decode()
    assert f"in the folder that holds `eagle3`. It comes there with `hf download {REPO} --include 'eagle3/*'" in serve
    assert f'"{REPO}"' not in serve
    assert REPO.encode() not in wanted["trtllm/trtllm.yaml"]


def test_a_head_from_the_hub_is_exported_here(folder: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    export_head(folder, PUSH)
    monkeypatch.chdir(folder.parent)
    shutil.rmtree(folder.parent / "export-hf")
    export = export_head(REPO, ExportConfig())
    assert export.folder == Path("export-hf")
    assert (folder.parent / "export-hf" / WEIGHTS_NAME).is_file()


def test_a_second_push_updates_the_repository(folder: Path, hub: FakeHub) -> None:
    export_head(folder, PUSH)
    export_head(folder, ExportConfig(push_to=REPO, license="mit"))
    assert b"license: mit" in hub.repos[REPO]["README.md"]
    assert set(hub.repos[REPO]) <= set(FILES)


@pytest.mark.parametrize(
    ("endpoint", "status"),
    [("create", 403), ("validate", 400), ("preupload", 401), ("put", 403), ("commit", 403), ("commit", 500)],
)
def test_a_failed_upload_leaves_the_folder_whole(folder: Path, hub: FakeHub, endpoint: str, status: int) -> None:
    hub.fail[endpoint] = status
    with pytest.raises(ExportError) as caught:
        export_head(folder, PUSH)
    message = str(caught.value)
    output = folder.parent / "export-hf"
    assert message.startswith(f"export.push_to: the upload failed, got {REPO} (")
    assert f"the export is whole in {output}" in message
    assert "\n" not in message
    assert hub.calls[-1] in (endpoint, "info")  # the client looks whether a refused repository exists
    assert ("Invalid metadata" if endpoint == "validate" else str(status)) in message
    verify(output, load_head(folder))
    assert hub.repos.get(REPO, {}) == {}
    hub.fail.clear()
    export_head(folder, PUSH)
    assert hub.repos[REPO] == contents(output)


def test_no_server_is_one_clear_line(folder: Path, hub: FakeHub) -> None:
    hub.server.server_close()
    with pytest.raises(
        ExportError, match=r"^export\.push_to: the upload failed, got me/my-head \(.*; the export is whole"
    ):
        export_head(folder, ExportConfig(push_to=REPO))
    with pytest.raises(CheckpointError, match="neither a folder nor a reachable Hub id"):
        load_head(REPO)


def test_offline_mode_is_one_clear_line(folder: Path) -> None:
    with pytest.raises(ExportError, match=r"the upload failed, got me/my-head \(.*offline"):
        export_head(folder, PUSH)


def test_other_bytes_on_the_hub_are_noticed(folder: Path, hub: FakeHub) -> None:
    hub.corrupt = True
    with pytest.raises(ExportError, match="the Hub holds other bytes than were sent"):
        export_head(folder, PUSH)


def test_a_repository_that_is_not_there(hub: FakeHub) -> None:
    with pytest.raises(CheckpointError, match="neither a folder nor a reachable Hub id, got me/none"):
        load_head("me/none")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": ["gguf2"]}, r"^export\.format: unknown, got 'gguf2'"),
        ({"format": ["hf", "all"]}, r"^export\.format: unknown, got 'all'"),
        ({"format": []}, r"^export\.format: is empty"),
        ({"format": ["hf", "hf"]}, r"^export\.format: is empty or has one twice"),
        ({"push_to": "name"}, r"^export\.push_to: is not of the form user/name"),
        ({"push_to": "a/b/c"}, r"^export\.push_to"),
        ({"push_to": "me/my head"}, r"^export\.push_to"),
        ({"private": True}, r"^export\.private: has no effect"),
        ({"license": "My Licence"}, r"^export\.license"),
        ({"output": ""}, r"^export\.output"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExportConfig(**settings)  # type: ignore[arg-type]
