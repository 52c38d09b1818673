"""Heads of other projects: recognised, converted to the last bit, held against their own conventions, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specdraft.cli.main import main
from specdraft.core.errors import CheckpointError
from specdraft.export._config import ExportConfig
from specdraft.export.exporting import Source, export_head
from specdraft.export.importing import Brought, import_head
from specdraft.export.sidecar import SIDECAR
from specdraft.heads.storage import load_head, save_head
from tests.exports import edit_config, edit_tensors, save_target, saved_head, written

REDUCED = {"draft_vocab_size": 40}
IDS = "eagle_aux_hidden_state_layer_ids"
ROUND_TRIPS: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "eagle3": ("eagle3", torch.float32, {"aux_layers": [8, 1, 5], "fc_norm": True, **REDUCED}),
    "eagle3_half": ("eagle3", torch.bfloat16, {"norm_before_residual": True, "layer_init": "random"}),
    "eagle3_1": ("eagle3", torch.float32, {"fc_norm": True, "norm_output": True, "aux_layers": [2, 5, 7]}),
    "eagle3_gguf": ("eagle3", torch.bfloat16, {**REDUCED, "norm_before_residual": True}),
    "peagle": ("peagle", torch.float32, {"num_layers": 3, "aux_layers": [1, 4, 6], **REDUCED}),
    "peagle_half": ("peagle", torch.bfloat16, {"num_layers": 1}),
    "eagle": ("eagle", torch.float32, {"unroll_steps": 2, "input_noise": 0.0}),
    "eagle_half": ("eagle", torch.bfloat16, REDUCED),
    "eagle_bias": ("eagle", torch.float32, {"fusion_bias": True}),
    "medusa": ("medusa", torch.float32, REDUCED),
    "medusa_own": ("medusa", torch.float16, {"shared_lm_head": False, "num_layers": 2}),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


def assert_same(first: Path, second: Path) -> None:
    """Asserts that two heads are one to the last bit."""
    mine, theirs = load_head(first), load_head(second)
    assert mine.config == theirs.config
    assert mine.spec == theirs.spec
    tensors, found = mine.state_dict(), theirs.state_dict()
    assert list(tensors) == list(found)
    for name, tensor in tensors.items():
        assert tensor.dtype == found[name].dtype
        assert torch.equal(tensor, found[name])


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_what_was_exported_comes_back_to_the_last_bit(name: str, target: Path, tmp_path: Path) -> None:
    kind, dtype, settings = ROUND_TRIPS[name]
    head = saved_head(tmp_path / "head", target, kind, dtype, **settings)
    exports = export_head(Source(head), ExportConfig(format=["all"], output=str(tmp_path / "out")))
    assert len(exports) > 1
    for export in exports:
        brought = import_head(str(export.folder), tmp_path / "in" / export.format, target=str(target))
        assert_same(head, brought.folder)
        again = export_head(
            Source(brought.folder), ExportConfig(format=[export.format], output=str(tmp_path / "again" / export.format))
        )
        assert again[0].folder is not None and export.folder is not None
        for path in export.folder.glob("*.safetensors"):
            assert (again[0].folder / path.name).read_bytes() == path.read_bytes()


def foreign(folder: Path, head: Path, name: str) -> Path:
    """An export without our own record, as another project would have written it."""
    written(folder, head, name)
    assert not (folder / SIDECAR).exists()
    return folder


def brought_in(folder: Path, target: Path | None, **settings: Any) -> Brought:
    return import_head(str(folder), folder.parent / "in", target=None if target is None else str(target), **settings)


def rename(change: Callable[[str], str]) -> Callable[[dict[str, Tensor]], None]:
    def apply(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[change(name)] = tensors.pop(name)

    return apply


def as_pickle(folder: Path, name: str) -> None:
    """The weights as a pickle of tensors."""
    (path,) = folder.glob("*.safetensors")
    torch.save(load_file(path), folder / name)
    path.unlink()


def test_the_layout_of_the_eagle_code(target: Path, tmp_path: Path) -> None:
    """A pickle with the target's embedding, no ids, no depth."""
    head = saved_head(tmp_path / "head", target, "eagle3", aux_layers=[2, 5, 7], num_draft_tokens=4, **REDUCED)
    folder = foreign(tmp_path / "out", head, "eagle3")
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(
        folder,
        lambda t: t.update({"embed_tokens.weight": embedding, "midlayer.self_attn.q_proj.bias": torch.zeros(32)}),
    )
    as_pickle(folder, "pytorch_model.bin")
    brought = brought_in(folder, target)
    assert brought.layout == "EAGLE-3"
    assert brought.assumed == [
        "biases that are zero were left out: midlayer.self_attn.q_proj.bias",
        "it fuses layers [2, 5, 7] (2, n/2 and n-3), as it names none",
        "the depth of drafts is 4, the checkpoint does not say it",
    ]
    assert brought.warnings == []
    assert_same(head, brought.folder)
    assert brought_in(folder, target, num_draft_tokens=2).head.config.num_draft_tokens == 2


def test_the_layout_of_specforge_and_sglang(target: Path, tmp_path: Path) -> None:
    """Ids as outputs of layers, a prefix, an embedding that is not the target's, and no t2d."""
    head = saved_head(tmp_path / "head", target, "eagle3", num_draft_tokens=4, **REDUCED)
    folder = foreign(tmp_path / "out", head, "eagle3")
    edit_config(folder, lambda c: c.pop(IDS))
    edit_tensors(folder, lambda t: [t.pop("t2d"), t.update({"embed_tokens.weight": torch.randn(97, 32)})])
    edit_tensors(folder, rename(lambda name: f"model.{name}" if "layer" in name else name))
    brought = brought_in(folder, target)
    assert brought.warnings == [
        "its embed_tokens.weight is not the target's embedding and is left out: drafts use the target's, as SGLang's do",
        "its layer ids are explicit: [5, 7, 8], read as outputs of layers (SGLang, SpecForge)",
    ]
    assert brought.head.features().aux_layers == (6, 8, 9)


def test_the_layout_of_speculators(target: Path, tmp_path: Path) -> None:
    """It names its target and its depth, and calls a missing flag true."""
    head = saved_head(tmp_path / "head", target, "eagle3", norm_before_residual=True, **REDUCED)
    folder = foreign(tmp_path / "out", head, "speculators")
    edit_config(folder, lambda c: c.pop("norm_before_residual"))
    edit_config(folder, lambda c: c["speculators_config"]["verifier"].update(name_or_path=str(target)))
    brought = brought_in(folder, None)
    assert any("norm_before_residual is true" in line for line in brought.warnings)
    assert brought.head.config.num_draft_tokens == 3
    assert brought.head.spec.name == str(target)


@pytest.mark.parametrize("format", ["eagle3", "speculators"])
def test_the_switches_of_eagle_3_1(format: str, target: Path, tmp_path: Path) -> None:
    """As another project writes them: from the flags of the config and the norms of every fused layer."""
    head = saved_head(
        tmp_path / "head", target, "eagle3", fc_norm=True, norm_output=True, aux_layers=[2, 5, 7], num_draft_tokens=4
    )
    folder = foreign(tmp_path / "out", head, format)
    brought = brought_in(folder, target)
    assert brought.head.config.fc_norm and brought.head.config.norm_output
    assert_same(head, brought.folder)
    edit_config(folder, lambda c: c.pop("norm_output"))
    assert not brought_in(folder, target).head.config.norm_output
    edit_tensors(folder, lambda t: t.pop("fc_norm.1.weight"))
    with pytest.raises(CheckpointError, match=r"^source: lacks fc_norm\.1\.weight"):
        brought_in(folder, target)


def test_maps_and_lm_heads_that_are_not_as_they_should(target: Path, tmp_path: Path) -> None:
    head = saved_head(tmp_path / "head", target, "eagle3", aux_layers=[2, 5, 7], num_draft_tokens=4, **REDUCED)
    lm_head, ids = load_head(head).lm_head.weight, load_head(head).vocab.draft_token_ids()

    def changed(name: str, change: Callable[[dict[str, Tensor]], object]) -> Brought:
        folder = foreign(tmp_path / name / "out", head, "eagle3")
        edit_tensors(folder, change)
        return brought_in(folder, target)

    found = changed("no map", lambda t: [t.pop("d2t"), t.pop("t2d")])
    assert "it has no d2t: its 40 draft tokens are taken for the first 40 of the target" in found.warnings[0]
    assert torch.equal(found.head.vocab.draft_token_ids(), torch.arange(40))
    found = changed(
        "truncated", lambda t: [t.pop("d2t"), t.pop("t2d"), t.update({"lm_head.weight": t["lm_head.weight"][:30]})]
    )
    assert "its lm_head is truncated to 30 rows, draft_vocab_size says 40" in found.warnings
    found = changed("no lm_head", lambda t: [t.pop("d2t"), t.pop("t2d"), t.pop("lm_head.weight")])
    assert "its lm_head is the target's, as it has none" in found.assumed
    assert found.head.config.draft_vocab_size is None
    order = torch.randperm(40)
    found = changed(
        "unordered",
        lambda t: t.update({"lm_head.weight": t["lm_head.weight"][order], "d2t": ids[order] - torch.arange(40)}),
    )
    assert torch.equal(found.head.lm_head.weight, lm_head)
    assert torch.equal(found.head.vocab.draft_token_ids(), ids)
    found = changed("contradicting", lambda t: t.update({"t2d": t["t2d"].roll(1)}))
    assert found.warnings == ["its t2d contradicts d2t and is left out: engines read d2t alone"]


def test_a_draft_layer_of_its_own_geometry(target: Path, tmp_path: Path) -> None:
    """Another rope, epsilon and number of heads than the target's stay the head's own."""
    other = save_target(
        tmp_path / "other",
        num_attention_heads=2,
        rms_norm_eps=1e-4,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    folder = foreign(tmp_path / "out", saved_head(tmp_path / "head", other, "eagle3"), "eagle3")
    brought = brought_in(folder, target)
    spec = brought.head.spec
    assert (spec.num_attention_heads, spec.head_dim, spec.rms_norm_eps) == (2, 16, 1e-4)
    assert spec.rope_parameters == {"rope_type": "default", "rope_theta": 500.0}
    assert sum("the draft layer has its own" in line for line in brought.assumed) == 4
    assert spec.fingerprint != load_head(tmp_path / "head").spec.fingerprint


def test_published_eagle_heads(target: Path, tmp_path: Path) -> None:
    """A pickle with a fusion bias and the target's embedding."""
    head = saved_head(tmp_path / "head", target, "eagle", fusion_bias=True, num_draft_tokens=4)
    folder = foreign(tmp_path / "out", head, "sglang_eagle")
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(folder, lambda t: t.update({"embed_tokens.weight": embedding}))
    as_pickle(folder, "pytorch_model.bin")
    brought = brought_in(folder, target)
    assert brought.layout == "EAGLE-1"
    assert brought.warnings == [
        "its fusion has a bias that is not zero: vLLM ignores it and accepts less, SGLang adds it"
    ]
    assert brought.head.config.fusion_bias
    assert float(brought.head.embedding_scale) == 1.0
    with pytest.raises(Exception, match=r"vLLM ignores the bias of the fusion \(fc.bias\); use format=sglang_eagle"):
        export_head(Source(brought.folder), ExportConfig(format=["vllm_eagle"]))
    export_head(Source(brought.folder), ExportConfig(format=["sglang_eagle"]))


def test_the_three_layouts_of_medusa(target: Path, tmp_path: Path) -> None:
    head = saved_head(tmp_path / "head", target, "medusa", shared_lm_head=False)

    def to_vllm(name: str) -> str:
        first, second, *rest = name.split(".")
        return f"blocks.{first}.layers.{second}.{rest[-1]}" if "linear" in name else f"lm_heads.{first}.weight"

    for change in (lambda name: name, lambda name: f"medusa_heads.{name}", to_vllm):
        folder = foreign(tmp_path / str(id(change)) / "out", head, "medusa")
        edit_tensors(folder, rename(change))
        assert_same(head, brought_in(folder, target).folder)
        as_pickle(folder, "medusa_lm_head.pt")
        edit_config(folder, lambda c: c.update(base_model_name_or_path=str(target)))
        assert_same(head, brought_in(folder, None).folder)
    shared = foreign(tmp_path / "shared" / "out", saved_head(tmp_path / "other", target, "medusa"), "medusa")
    edit_tensors(shared, lambda t: [t.pop(f"{i}.1.weight") for i in range(3)])
    assert brought_in(shared, target).head.config.shared_lm_head


def test_the_command_says_what_it_assumed(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    foreign(tmp_path / "out", saved_head(tmp_path / "head", target, "eagle3"), "eagle3")
    assert main(["import", "source=out", f"target={target}"]) == 0
    printed = capsys.readouterr().out
    assert "layout: EAGLE-3, kind eagle3" in printed
    assert "assumed: the depth of drafts is 4" in printed
    assert "warning: its layer ids are explicit: [6, 8, 9], read as inputs of layers" in printed
    assert "written: import-out" in printed
    assert json.loads((tmp_path / "import-out" / "config.json").read_text())["import"]["layout"] == "EAGLE-3"
    assert main(["import", "source=out"]) == 2
    assert "specdraft: error: target: the checkpoint does not name its target" in capsys.readouterr().err


def test_an_imported_head_is_saved_and_loaded_as_any_other(target: Path, tmp_path: Path) -> None:
    folder = foreign(tmp_path / "out", saved_head(tmp_path / "head", target, "eagle3"), "eagle3")
    brought = brought_in(folder, target)
    save_head(load_head(brought.folder), tmp_path / "copy")
    assert_same(brought.folder, tmp_path / "copy")
