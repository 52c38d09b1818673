"""What is no head that can be brought in, or none of this target, is refused in one line and leaves nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specdraft.core.errors import CheckpointError, ConfigError
from specdraft.export._config import ExportConfig
from specdraft.export.exporting import Source, export_head
from specdraft.export.importing import import_head
from specdraft.export.sidecar import SIDECAR
from tests.exports import edit_config, edit_tensors, save_target, saved_head, written

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


def foreign(folder: Path, head: Path, name: str) -> Path:
    """An export without our own record, as another project would have written it."""
    written(folder, head, name)
    assert not (folder / SIDECAR).exists()
    return folder


REFUSED: dict[str, tuple[str, str, Callable[[Path], object], str]] = {
    "no config": ("eagle3", "eagle3", lambda f: (f / "config.json").unlink(), "holds no config.json"),
    "torn config": ("eagle3", "eagle3", lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
    "no weights": ("eagle3", "eagle3", lambda f: (f / "model.safetensors").unlink(), "holds no weights"),
    "torn": (
        "eagle3",
        "eagle3",
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-7]),
        "model.safetensors cannot be read",
    ),
    "a NaN": (
        "eagle3",
        "eagle3",
        lambda f: edit_tensors(f, lambda t: t["norm.weight"][:1].fill_(torch.nan)),
        "tensor norm.weight holds NaN",
    ),
    "no head": (
        "eagle3",
        "eagle3",
        lambda f: edit_tensors(f, lambda t: [t.pop(k) for k in list(t) if "hidden" in k or "fc" in k]),
        "is no head of a known layout",
    ),
    "a tensor gone": (
        "eagle3",
        "eagle3",
        lambda f: edit_tensors(f, lambda t: t.pop("norm.weight")),
        "lacks norm.weight",
    ),
    "a projection gone": (
        "eagle3",
        "eagle3",
        lambda f: edit_tensors(f, lambda t: t.pop("midlayer.mlp.up_proj.weight")),
        "lacks midlayer.mlp.up_proj.weight",
    ),
    "a bias": (
        "eagle3",
        "eagle3",
        lambda f: edit_tensors(f, lambda t: t.update({"midlayer.self_attn.q_proj.bias": torch.ones(32)})),
        "has a bias that is not zero",
    ),
    "a tensor too many": (
        "eagle3",
        "eagle3",
        lambda f: edit_tensors(f, lambda t: t.update({"extra.weight": torch.ones(3)})),
        "holds extra.weight, for which the head has no place",
    ),
    "two layers": (
        "eagle3",
        "eagle3",
        lambda f: edit_config(f, lambda c: c.update(num_hidden_layers=2)),
        "has 2 layers, the head has one",
    ),
    "norm_before_fc": (
        "eagle3",
        "eagle3",
        lambda f: edit_config(f, lambda c: c.update(norm_before_fc=True)),
        "has norm_before_fc",
    ),
    "an activation": (
        "eagle3",
        "eagle3",
        lambda f: edit_config(f, lambda c: c.update(hidden_act="gelu")),
        "has the activation gelu",
    ),
    "another width": (
        "eagle3",
        "eagle3",
        lambda f: edit_config(f, lambda c: c.update(hidden_size=48)),
        "is for a target with hidden_size 48",
    ),
    "other ids": (
        "eagle3",
        "eagle3",
        lambda f: edit_config(f, lambda c: c.update({IDS: [1, 2]})),
        r"names layers \[1, 2\], its fc.weight fuses 3",
    ),
    "an input norm": (
        "vllm_eagle",
        "eagle",
        lambda f: edit_tensors(f, lambda t: t.update({"layers.0.input_layernorm.weight": torch.ones(32)})),
        "has a norm before the attention",
    ),
    "another vocabulary": (
        "medusa",
        "medusa",
        lambda f: edit_config(f, lambda c: c.update(vocab_size=64)),
        "is for a target with vocab_size 64",
    ),
    "a token map": (
        "medusa",
        "medusa",
        lambda f: edit_tensors(f, lambda t: t.update({"token_map": torch.arange(7)})),
        "drafts from a part of the vocabulary",
    ),
    "a block gone": (
        "medusa",
        "medusa",
        lambda f: edit_tensors(f, lambda t: t.pop("1.0.linear.weight")),
        "lacks 1.0.linear.weight",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_head_of_ours_is_refused_in_one_line(
    name: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    format, kind, change, message = REFUSED[name]
    folder = foreign(tmp_path / "out", saved_head(tmp_path / "head", target, kind), format)
    change(folder)
    with pytest.raises(CheckpointError, match=rf"^source: {message}") as caught:
        import_head(str(folder), tmp_path / "in", target=str(target))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "in").exists()


def test_pickles_of_anything_but_tensors_are_never_run(target: Path, tmp_path: Path) -> None:
    folder = foreign(tmp_path / "out", saved_head(tmp_path / "head", target, "eagle3"), "eagle3")
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": Path("x")}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"holds more than tensors, which is never unpickled"):
        import_head(str(folder), tmp_path / "in", target=str(target))
    torch.save([torch.ones(2)], folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"is no set of tensors"):
        import_head(str(folder), tmp_path / "in", target=str(target))


def test_a_wrong_target_is_refused(target: Path, tmp_path: Path) -> None:
    head = saved_head(tmp_path / "head", target, "eagle3")
    other = save_target(tmp_path / "other", seed=1)
    for name in ("eagle3", "hf"):
        (export,) = export_head(Source(head), ExportConfig(format=[name]))
        with pytest.raises(CheckpointError, match=r"fingerprint .*, got "):
            import_head(str(export.folder), tmp_path / "in", target=str(other))
    foreigner = foreign(tmp_path / "out", head, "eagle3")
    with pytest.raises(ConfigError, match=r"^target: the checkpoint does not name its target"):
        import_head(str(foreigner), tmp_path / "in")
    medusa = foreign(tmp_path / "medusa", saved_head(tmp_path / "heads", target, "medusa"), "medusa")
    edit_config(medusa, lambda c: c.update(base_model_name_or_path="/not/there"))
    with pytest.raises(ConfigError, match=r"^target: the one that the checkpoint names cannot be had, got /not/there"):
        import_head(str(medusa), tmp_path / "in")
    with pytest.raises(ConfigError, match=r"^num_draft_tokens: is the number of heads \(3\), got 2"):
        import_head(str(medusa), tmp_path / "in", target=str(target), num_draft_tokens=2)


def test_only_an_earlier_import_is_replaced(target: Path, tmp_path: Path) -> None:
    head = saved_head(tmp_path / "head", target, "medusa")
    folder = foreign(tmp_path / "out", head, "medusa")
    for _ in range(2):
        import_head(str(folder), tmp_path / "in", target=str(target))
    with pytest.raises(ConfigError, match=r"^output: is occupied"):
        import_head(str(folder), head, target=str(target))


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^source: no such folder, got "):
        import_head(str(tmp_path / "none"), tmp_path / "in")
    with pytest.raises(CheckpointError, match=r"^source: neither a folder nor a reachable Hub id, got me/none \("):
        import_head("me/none", tmp_path / "in")
