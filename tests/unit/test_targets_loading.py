from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from specdraft.core.errors import CheckpointError, ConfigError, SpecDraftError, UnsupportedTargetError
from specdraft.targets._config import TargetConfig
from specdraft.targets.hf import HFTarget, eos_token_ids, load_target, load_tokenizer
from specdraft.targets.loading import resolve_device
from tests.tiny import tiny_models, tiny_target, tiny_tokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "tiny"
    tiny_models["llama"]().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of the saved target that a test may spoil."""
    return shutil.copytree(saved, tmp_path / "copy")


def settings(folder: Path | str, **changes: Any) -> TargetConfig:
    return TargetConfig(**{"name": str(folder), "device": "cpu", **changes})


def check_fails(config: TargetConfig, kind: type[SpecDraftError], match: str) -> str:
    with pytest.raises(kind, match=match) as error:
        load_target(config)
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith("target.")
    assert "; " in message
    return message


def test_a_folder_loads_as_the_same_target(saved: Path) -> None:
    target = load_target(settings(saved))
    original = tiny_target("llama")
    assert target.spec.fingerprint == original.spec.fingerprint
    assert target.spec.name == str(saved)
    assert target.tokenizer is not None
    assert target.tokenizer("hi").input_ids == tiny_tokenizer()("hi").input_ids
    hidden = torch.randn(3, 32)
    torch.testing.assert_close(target.logits(hidden), original.logits(hidden), rtol=1e-5, atol=1e-5)
    assert not any(parameter.requires_grad for parameter in target.model.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_and_packing_are_as_asked(saved: Path, dtype: str) -> None:
    plain = load_target(settings(saved, dtype=dtype, pack_weights=False))
    assert plain.packed is None
    assert plain.dtype == getattr(torch, dtype) == plain.embed(torch.tensor([5])).dtype
    assert load_target(settings(saved, dtype=dtype)).packed is not None
    assert plain.spec.fingerprint == tiny_target("llama").spec.fingerprint


def test_attention_kernel_is_as_asked(saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_target(settings(saved)).model.config._attn_implementation == "sdpa"
    assert load_target(settings(saved, attn_implementation="eager")).model.config._attn_implementation == "eager"
    tiny_models["gemma2"]().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    target = load_target(settings(tmp_path))
    assert target.layout.decoder.config._attn_implementation == "eager"
    assert "soft-caps its attention" in caplog.text


def test_missing_folder(tmp_path: Path) -> None:
    check_fails(settings(tmp_path / "no"), ConfigError, "no such folder")
    check_fails(settings("./no"), ConfigError, "no such folder")
    file = tmp_path / "file"
    file.write_text("")
    check_fails(settings(file), ConfigError, "a file, not a folder")


def test_unknown_hub_id_offline() -> None:
    message = check_fails(
        settings("nobody/no-such-model"), ConfigError, "neither a folder nor a model in the Hub's cache"
    )
    assert "'nobody/no-such-model'" in message
    check_fails(settings("not a valid id!"), ConfigError, "neither a folder nor a model")


def test_folder_without_config(tmp_path: Path) -> None:
    check_fails(settings(tmp_path), ConfigError, r"no config\.json")


def test_torn_config(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text[: len(text) // 2])
    check_fails(settings(folder), CheckpointError, r"config\.json cannot be read")


def test_unknown_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "never_heard_of"}))
    check_fails(settings(folder), UnsupportedTargetError, "does not know the architecture")


def test_code_of_others_is_not_run_unasked(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    remote = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own_code", "auto_map": remote}))
    check_fails(settings(folder), ConfigError, r"^target\.trust_remote_code: ")


def test_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    check_fails(settings(folder), CheckpointError, "weights in the folder cannot be used")


@pytest.mark.parametrize("keep", [0, 4, 100, -64])
def test_torn_weights(folder: Path, keep: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    check_fails(settings(folder), CheckpointError, "weights in the folder cannot be used")


def test_absent_weights_are_not_replaced_by_random_ones(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    check_fails(settings(folder), CheckpointError, r"1 weights missing .*layers\.1\.mlp\.up_proj\.weight")


def test_weights_of_another_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 40}))
    check_fails(settings(folder), CheckpointError, "weights in the folder cannot be used")


def test_missing_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink()
    check_fails(settings(folder), ConfigError, "tokenizer cannot be loaded")
    with pytest.raises(ConfigError, match="tokenizer cannot be loaded"):
        load_tokenizer(settings(folder))


def test_torn_tokenizer(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text[: len(text) // 2])
    check_fails(settings(folder), ConfigError, "tokenizer cannot be loaded")


def test_devices() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    wanted = "cuda" if torch.cuda.is_available() else "cpu"
    assert resolve_device("auto").type == wanted
    for name in ("cuda:99", "nonsense"):
        with pytest.raises(ConfigError, match=r"^target\.device: not usable here, got"):
            resolve_device(name)


def test_fingerprint_tells_targets_apart_but_not_dtypes() -> None:
    def of(model: PreTrainedModel) -> str:
        return HFTarget.from_model(model).spec.fingerprint

    make = tiny_models["qwen2"]
    first = of(make())
    assert first == of(make())
    assert first == of(make().to(torch.bfloat16)) == of(make().to(torch.float16))
    others = [
        of(make(seed=1)),
        of(tiny_models["llama"]()),
        of(make(rope_parameters={"rope_type": "default", "rope_theta": 5000.0})),
        of(tiny_models["qwen2_sliding"]()),
    ]
    tuned = make()
    with torch.no_grad():
        weight = tuned.model.layers[2].mlp.down_proj.weight
        weight += 0.2 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    others.append(of(tuned))
    assert len({first, *others}) == len(others) + 1


def test_eos_ids_are_the_union_of_all_sources() -> None:
    model = tiny_models["llama"](eos_token_id=[5, 2])
    model.generation_config.eos_token_id = 7
    assert eos_token_ids(model, tiny_tokenizer()) == (2, 5, 7)
    model.generation_config.eos_token_id = [9, 7]
    assert eos_token_ids(model, None) == (2, 5, 7, 9)
    model.config.eos_token_id = None
    model.generation_config.eos_token_id = None
    assert eos_token_ids(model, None) == ()
    composite = tiny_target("gemma3_composite", eos_token_id=[2, 11])
    assert composite.spec.eos_token_ids == (2, 11)


def test_vocabulary_is_counted_in_rows_of_the_lm_head() -> None:
    target = tiny_target("llama")
    assert target.tokenizer is not None
    assert len(target.tokenizer) == 90
    assert target.spec.vocab_size == 97 == target.unembedding.weight.shape[0]


def test_either_name_of_the_cache_is_used() -> None:
    model = tiny_models["llama"]()
    target = HFTarget.from_model(model)
    assert target._cache_key in ("cache", "past_key_values")
    seen: dict[str, Any] = {}

    def older_forward(*, past_key_values: Any = None, **kwargs: Any) -> Any:
        if past_key_values is not None:
            seen["cache"] = past_key_values
            kwargs[target._cache_key] = past_key_values
        return type(model.model).forward(model.model, **kwargs)

    model.model.__dict__["forward"] = older_forward
    older = HFTarget.from_model(model)
    assert older._cache_key == "past_key_values"
    assert seen["cache"].get_seq_length() > 0
