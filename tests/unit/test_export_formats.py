"""The formats of the serving engines: what is written, what verification finds, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdraft.core.errors import ExportError
from specdraft.export import exporting
from specdraft.export._config import ExportConfig
from specdraft.export.exporting import Source, export_head, verify
from specdraft.export.formats import gguf
from specdraft.export.formats.openvino import SCRIPT
from specdraft.export.formats.sglang_eagle import HOT_TOKENS
from specdraft.export.material import Material
from specdraft.export.registry import find_format
from specdraft.export.tensors import write_safetensors
from tests.exports import HEADS, REDUCED, edit_config, edit_tensors, save_target, saved_head, written

CARRIED = {
    "eagle3": {"eagle3", "gguf", "hf", "openvino", "speculators", "trtllm"},
    "eagle3_trio": {"eagle3", "gguf", "hf", "openvino", "speculators", "trtllm"},
    "eagle3_one_layer": {"eagle3", "hf", "speculators"},
    "eagle3_two_layers": {"eagle3", "hf", "speculators", "trtllm"},
    "eagle3_unordered": {"eagle3", "hf", "speculators", "trtllm"},
    "eagle3_published": {"eagle3", "gguf", "hf", "speculators"},
    "eagle3_wide": {"eagle3", "gguf", "hf", "openvino", "speculators", "trtllm"},
    "eagle": {"hf", "sglang_eagle", "vllm_eagle"},
    "eagle_reduced": {"hf", "sglang_eagle", "vllm_eagle"},
    "peagle": {"hf", "speculators"},
    "peagle_one_layer": {"hf", "speculators"},
    "medusa": {"hf", "medusa"},
    "medusa_reduced": {"hf", "medusa"},
    "medusa_deep": {"hf", "medusa"},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory, target: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    return {name: saved_head(folder / name, target, kind, **settings) for name, (kind, settings) in HEADS.items()}


@pytest.mark.parametrize("name", HEADS)
def test_all_that_fit_are_written_and_verified(name: str, heads: dict[str, Path], tmp_path: Path) -> None:
    exports = export_head(Source(heads[name]), ExportConfig(format=["all"], output=str(tmp_path / "out")))
    assert {export.format for export in exports} == CARRIED[name]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(e.format for e in exports)
    for export in exports:
        assert export.folder == tmp_path / "out" / export.format
        assert export.sizes == {path.name: path.stat().st_size for path in export.folder.iterdir()}
        assert not [path for path in export.folder.iterdir() if path.stat().st_mode & 0o777 != 0o644]
        text = "".join(p.read_text() for p in export.folder.iterdir() if p.suffix in (".md", ".json", ".py", ".yaml"))
        assert str(heads[name].parents[1]) not in text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["eagle3", "eagle", "medusa"])
def test_heads_of_half_precision(kind: str, dtype: torch.dtype, target: Path, tmp_path: Path) -> None:
    head = saved_head(tmp_path / "head", target, kind, dtype, **REDUCED)
    exports = export_head(Source(head), ExportConfig(format=["all"], output=str(tmp_path / "out")))
    assert len(exports) > 1
    for export in exports:
        assert export.folder is not None
        (path,) = [*export.folder.glob("*.safetensors"), *export.folder.glob("*.gguf")]
        if path.suffix == ".gguf":
            continue
        # Matrices of the head itself: attention and MLP, or the residual blocks of Medusa.
        own = {t.dtype for name, t in load_file(path).items() if re.search(r"proj|linear|blocks|\.0\.", name)}
        assert own == {dtype}, path


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("rope", ROPES)
def test_the_whole_rotary_block_is_written_both_ways(rope: str, tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", rope_parameters=ROPES[rope])
    head = saved_head(tmp_path / "head", target, "eagle3")
    (export,) = export_head(Source(head), ExportConfig(format=["eagle3"]))
    assert export.folder is not None
    config = json.loads((export.folder / "config.json").read_text())
    assert config["rope_scaling"]["type"] == config["rope_scaling"]["rope_type"] == rope
    assert config["rope_theta"] == ROPES[rope]["rope_theta"]
    assert config["max_position_embeddings"] == 256
    wanted = Material(head).head.get_submodule("layer.rotary").get_buffer("inv_freq")
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
    new = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_theta", "torch_dtype")}
    for keys in (old, new, config):
        assert torch.equal(LlamaRotaryEmbedding(config=LlamaConfig(**keys)).inv_freq, wanted)


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("qwen3", {}),
        ("gemma2", {}),
        ("gemma3_composite", {}),
        ("granite", {}),
        ("llama", {"tie_word_embeddings": True}),
    ],
)
def test_targets_with_scales_caps_and_ties(kind: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", kind, **overrides)
    for head_kind in ("eagle3", "eagle", "medusa"):
        head = saved_head(tmp_path / head_kind / "head", target, head_kind)
        exports = export_head(Source(head), ExportConfig(format=["all"]))
        assert len(exports) > 1


# What verification must find: format, head, and the change to the written files.
Fault = tuple[str, str, Callable[[Path], None]]


def config_fault(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, change)


def tensor_fault(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, change)


def set_item(*path: Any, value: Any) -> Callable[[Any], None]:
    """A change of one entry, given by its keys."""

    def change(where: Any) -> None:
        for key in path[:-1]:
            where = where[key]
        where[path[-1]] = value(where[path[-1]]) if callable(value) else value

    return change


def replace_text(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return change


def shuffle_hot_tokens(folder: Path) -> None:
    ids = torch.load(folder / HOT_TOKENS, weights_only=True)
    torch.save((ids + 1) % 97, folder / HOT_TOKENS)


def random_like(tensor: Tensor) -> Tensor:
    return torch.randn_like(tensor)


IDS = "eagle_aux_hidden_state_layer_ids"
FAULTS: dict[str, Fault] = {
    "layer ids off by one": ("eagle3", "eagle3", config_fault(set_item(IDS, value=[5, 7, 8]))),
    "nested ids off by one": ("eagle3", "eagle3", config_fault(set_item("eagle_config", IDS, value=[6, 8, 9]))),
    "layer ids lost": ("eagle3", "eagle3", config_fault(lambda c: [c.pop(IDS), c.pop("eagle_config")])),
    "d2t shuffled": ("eagle3", "eagle3_trio", tensor_fault(set_item("d2t", value=lambda t: t.flip(0)))),
    "d2t of other tokens": ("eagle3", "eagle3_trio", tensor_fault(set_item("d2t", value=torch.zeros_like))),
    "t2d of other tokens": ("eagle3", "eagle3_trio", tensor_fault(set_item("t2d", value=lambda t: t.roll(1)))),
    "d2t lost": ("eagle3", "eagle3_trio", tensor_fault(lambda t: t.pop("d2t"))),
    "lm_head lost": ("eagle3", "eagle3", tensor_fault(lambda t: t.pop("lm_head.weight"))),
    "random norm": ("eagle3", "eagle3", tensor_fault(set_item("norm.weight", value=random_like))),
    "queries for keys": (
        "eagle3",
        "eagle3_wide",
        tensor_fault(lambda t: t.update({"midlayer.self_attn.q_proj.weight": t["midlayer.self_attn.k_proj.weight"]})),
    ),
    "a tensor too many": (
        "eagle3",
        "eagle3",
        tensor_fault(lambda t: t.update({"embed_tokens.weight": t["norm.weight"]})),
    ),
    "a NaN": ("eagle3", "eagle3", tensor_fault(lambda t: t["fc.weight"][3, 4:5].fill_(float("nan")))),
    "wrong rope theta": (
        "eagle3",
        "eagle3",
        config_fault(lambda c: [c.update(rope_theta=5e5), c["rope_parameters"].update(rope_theta=5e5)]),
    ),
    "two rope thetas": ("eagle3", "eagle3", config_fault(set_item("rope_theta", value=5e5))),
    "another epsilon": ("eagle3", "eagle3", config_fault(set_item("rms_norm_eps", value=1e-2))),
    "lost norm_before_residual": ("eagle3", "eagle3_published", config_fault(lambda c: c.pop("norm_before_residual"))),
    "lost norm_output": ("eagle3", "eagle3_unordered", config_fault(lambda c: c.pop("norm_output"))),
    "lost fc_norm": ("eagle3", "eagle3_unordered", config_fault(lambda c: c.pop("fc_norm"))),
    "fewer heads": ("eagle3", "eagle3", config_fault(set_item("num_key_value_heads", value=4))),
    "not JSON": ("eagle3", "eagle3", lambda folder: (folder / "config.json").write_text("{") and None),
    "torn weights": (
        "eagle3",
        "eagle3",
        lambda folder: (
            (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9]) and None
        ),
    ),
    "trtllm layers off by one": ("trtllm", "eagle3", replace_text("trtllm.yaml", "- 7", "- 8")),
    "trtllm depth": ("trtllm", "eagle3", replace_text("trtllm.yaml", "max_draft_len: 3", "max_draft_len: 2")),
    "openvino layers off by one": ("openvino", "eagle3", replace_text(SCRIPT, "[5, 7, 8]", "[6, 8, 9]")),
    "random embedding": ("speculators", "eagle3", tensor_fault(set_item("embed_tokens.weight", value=random_like))),
    "embedding lost": ("speculators", "eagle3", tensor_fault(lambda t: t.pop("embed_tokens.weight"))),
    "speculators flag lost": ("speculators", "eagle3", config_fault(lambda c: c.pop("norm_before_residual"))),
    "speculators norm_output lost": ("speculators", "eagle3_unordered", config_fault(lambda c: c.pop("norm_output"))),
    "speculators fc_norm swapped": (
        "speculators",
        "eagle3_unordered",
        tensor_fault(lambda t: t.update({"fc_norm.0.weight": t["fc_norm.2.weight"]})),
    ),
    "speculators ids off by one": ("speculators", "eagle3", config_fault(set_item(IDS, value=[5, 7, 8]))),
    "random mask": ("speculators", "peagle", tensor_fault(set_item("mask_hidden", value=random_like))),
    "mask token off by one": ("speculators", "peagle", config_fault(set_item("mask_token_id", value=lambda i: i - 1))),
    "another row of the table": (
        "speculators",
        "peagle",
        tensor_fault(lambda t: t["embed_tokens.weight"][5].add_(1)),
    ),
    "the mask's row of the target": (
        "speculators",
        "peagle",
        tensor_fault(lambda t: t["embed_tokens.weight"][96].zero_()),
    ),
    "a layer lost": (
        "speculators",
        "peagle",
        config_fault(set_item("transformer_layer_config", "num_hidden_layers", value=1)),
    ),
    "a layer's norm lost": (
        "speculators",
        "peagle",
        tensor_fault(lambda t: t.pop("layers.1.input_layernorm.weight")),
    ),
    "medusa biases dropped": ("medusa", "medusa", config_fault(lambda c: c.pop("medusa_fc_bias"))),
    "random medusa lm_head": ("medusa", "medusa", tensor_fault(set_item("1.1.weight", value=random_like))),
    "medusa heads swapped": (
        "medusa",
        "medusa",
        tensor_fault(lambda t: t.update({"0.0.linear.weight": t["1.0.linear.weight"]})),
    ),
    "a medusa head lost": ("medusa", "medusa", config_fault(set_item("medusa_num_heads", value=2))),
    "embedding factor lost": (
        "vllm_eagle",
        "eagle",
        tensor_fault(lambda t: t["fc.weight"][:, :32].div_(1.7)),
    ),
    "fusion bias random": ("sglang_eagle", "eagle", tensor_fault(set_item("fc.bias", value=random_like))),
    "fusion bias lost": ("sglang_eagle", "eagle", tensor_fault(lambda t: t.pop("fc.bias"))),
    "hot tokens shifted": ("sglang_eagle", "eagle_reduced", shuffle_hot_tokens),
    "an input norm": (
        "vllm_eagle",
        "eagle",
        tensor_fault(lambda t: t.update({"layers.0.input_layernorm.weight": torch.ones(32)})),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, heads: dict[str, Path], tmp_path: Path) -> None:
    name, head, plant = FAULTS[fault]
    material, format = written(tmp_path / "out", heads[head], name)
    verify(material, format, tmp_path / "out")
    plant(tmp_path / "out")
    with pytest.raises(ExportError, match=r"^export\.format: .*(report this|nothing was written)$") as caught:
        verify(material, format, tmp_path / "out")
    assert "\n" not in str(caught.value)


GGUF_FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "halves apart": ("interleaved", lambda weight, heads: weight),
    "layers off by one": ("ordered_layers", lambda material: [layer - 1 for layer in sorted(material.aux_layers)]),
    "a flag lost": ("flag", lambda material, name: False),
    "a tensor under another name": (
        "NAMES",
        lambda: {name: gguf.NAMES[name].replace("attn_norm_2", "attn_norm_3") for name in gguf.NAMES},
    ),
}


@pytest.mark.parametrize("fault", GGUF_FAULTS)
def test_planted_faults_of_gguf_are_found(
    fault: str, heads: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, wrong = GGUF_FAULTS[fault]
    with monkeypatch.context() as planted:
        planted.setattr(gguf, name, wrong() if name == "NAMES" else wrong)
        material, format = written(tmp_path / "out", heads["eagle3_published"], "gguf")
    with pytest.raises(ExportError, match=r"^export\.format: "):
        verify(material, format, tmp_path / "out")


def test_the_map_of_gguf_holds_target_ids(heads: dict[str, Path], tmp_path: Path) -> None:
    material, _ = written(tmp_path / "out", heads["eagle3_trio"], "gguf")
    reader = GGUFReader(tmp_path / "out" / "draft.gguf")
    (found,) = [tensor for tensor in reader.tensors if tensor.name == "d2t"]
    assert material.draft_ids is not None
    assert found.data.tolist() == material.draft_ids.tolist()
    assert reader.get_field("eagle3.target_layers").contents() == [2, 5, 7]
    assert reader.get_field("tokenizer.ggml.tokens").contents()[1] == "<|im_start|>"


def test_a_failed_verification_leaves_the_earlier_export(
    heads: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ExportConfig(format=["eagle3"], output=str(tmp_path / "out"))
    export_head(Source(heads["eagle3"]), config)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    monkeypatch.setattr(
        exporting, "verify", lambda *_: (_ for _ in ()).throw(ExportError("export.format: differs; report this"))
    )
    with pytest.raises(ExportError, match="differs"):
        export_head(Source(heads["eagle3_wide"]), config)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_only_an_earlier_export_is_replaced(heads: dict[str, Path], tmp_path: Path) -> None:
    config = ExportConfig(format=["medusa"], output=str(tmp_path / "out"))
    for _ in range(2):
        export_head(Source(heads["medusa"]), config)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ExportError, match=r"^export\.output: is occupied"):
        export_head(Source(heads["medusa"]), config)


def test_serve_names_every_reader(heads: dict[str, Path], tmp_path: Path) -> None:
    (export,) = export_head(Source(heads["eagle3"]), ExportConfig(format=["eagle3"], output=str(tmp_path / "out")))
    assert export.folder is not None
    text = (export.folder / "SERVE.md").read_text()
    for engine in ("vLLM", "SGLang", "TensorRT-LLM", "llama.cpp", "OpenVINO GenAI"):
        assert f"## {engine}\n" in text
    assert "- the EAGLE code: it always taps layers 2, n/2 and n-3" in text
    assert '"num_speculative_tokens": 3' in text
    config = json.loads((export.folder / "config.json").read_text())
    assert config[IDS] == [6, 8, 9]
    assert config["eagle_config"][IDS] == [5, 7, 8]
    trio = find_format("eagle3").engines(Material(heads["eagle3_trio"]), "./x")
    assert not [engine for engine in trio if engine.reason]


def test_the_engines_own_layers_are_written_as_no_ids(heads: dict[str, Path], tmp_path: Path) -> None:
    written(tmp_path / "out", heads["eagle3_trio"], "eagle3")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert IDS not in config
    assert "eagle_config" not in config
    assert config["num_aux_hidden_states"] == 3


def test_streamed_files_are_read_by_the_library(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(5, dtype=torch.int64),
        "b": torch.randn(3, 4).bfloat16(),
        "c": torch.tensor([True, False, True]),
        "d": torch.tensor(1.5),
        "e": torch.randn(6, 4)[1:3].T,
        "f": torch.zeros(0, 3),
    }
    write_safetensors(tmp_path / "x.safetensors", tensors)
    found = load_file(tmp_path / "x.safetensors")
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
