from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from specdraft.core.errors import UnsupportedTargetError
from specdraft.targets._config import TargetConfig
from specdraft.targets.check import check_target
from specdraft.targets.hf import HFTarget, load_target
from tests.tiny import tiny_models, tiny_target, tiny_tokenizer

ROLLED_BACK = "cannot be rolled back"
REFUSED = [
    ("Qwen3NextConfig", {}, ROLLED_BACK),
    ("MambaConfig", {}, ROLLED_BACK),
    ("RecurrentGemmaConfig", {}, ROLLED_BACK),
    ("JambaConfig", {}, ROLLED_BACK),
    ("RwkvConfig", {}, ROLLED_BACK),
    ("FalconH1Config", {}, ROLLED_BACK),
    ("T5Config", {}, "encoder-decoder"),
    ("Llama4TextConfig", {}, "chunked_attention"),
    ("ViTConfig", {}, "no causal LM"),
    ("Gemma3nTextConfig", {}, "share the keys and values"),
    ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}, ROLLED_BACK),
]


@pytest.mark.parametrize(("name", "settings", "reason"), REFUSED, ids=[row[0] for row in REFUSED])
def test_refused_by_name_before_weights_are_read(
    name: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, name)(**{**sizes, **settings})
    config.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    with pytest.raises(UnsupportedTargetError, match=reason) as error:
        load_target(TargetConfig(name=str(tmp_path), device="cpu"))
    assert repr(config.model_type) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_stateful_model_in_hand_is_refused() -> None:
    config = transformers.Qwen3NextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_experts=2
    )
    model = transformers.Qwen3NextForCausalLM(config)
    with pytest.raises(UnsupportedTargetError, match=r"cannot be rolled back.*'qwen3_next'"):
        HFTarget.from_model(model)


def test_a_model_without_lm_head_is_refused() -> None:
    with pytest.raises(UnsupportedTargetError, match="no lm_head"):
        HFTarget.from_model(tiny_models["llama"]().model)


def test_attention_biases_that_need_a_plain_mask_are_refused() -> None:
    config = transformers.MptConfig(vocab_size=97, d_model=32, n_heads=4, n_layers=2, initializer_range=0.3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.MptForCausalLM(config).eval()
    with pytest.raises(UnsupportedTargetError, match=r"tree mask.*'mpt'"):
        HFTarget.from_model(model)


def with_layout(change: dict[str, Any]) -> Callable[[HFTarget], HFTarget]:
    def make(target: HFTarget) -> HFTarget:
        return HFTarget(target.model, dataclasses.replace(target.layout, **change), target.spec)

    return make


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("granite", {"logit_scale": 1.0}, "logits do not follow"),
        ("cohere", {"logit_scale": 4.0}, "logits do not follow"),
        ("gemma2", {"softcap": None}, "logits do not follow"),
        ("granite", {"embedding_scale": 1.0}, "token embedding"),
        ("gemma3", {"layer_types": ("full_attention",) * 4, "sliding_window": None}, "forward"),
        ("mistral", {"sliding_window": 12}, "forward"),
        ("gemma2", {"sliding_window": 7}, "forward"),
    ],
)
def test_the_check_finds_a_wrong_reading_of_the_model(kind: str, change: dict[str, Any], reason: str) -> None:
    target = tiny_target(kind)
    check_target(target)
    with pytest.raises(UnsupportedTargetError, match=reason):
        check_target(with_layout(change)(target))


def test_the_check_finds_a_mask_that_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("qwen2")
    monkeypatch.setattr(target, "_kernel_mask", lambda mask: None)
    with pytest.raises(UnsupportedTargetError, match="tree mask"):
        check_target(target)


def test_a_forward_that_fails_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")

    def fails(*args: object, **kwargs: object) -> None:
        raise TypeError("got an unexpected keyword argument 'position_ids'\nand more")

    monkeypatch.setattr(target.layout.decoder, "forward", fails)
    with pytest.raises(UnsupportedTargetError, match=r"TypeError: got an unexpected.*'llama'") as error:
        check_target(target)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "mixtral", "cohere"])
def test_the_check_separates_rounding_from_mistakes(kind: str, dtype: torch.dtype) -> None:
    target = HFTarget.from_model(tiny_models[kind]().to(dtype))
    assert target.dtype == dtype
    wrong = with_layout({"logit_scale": target.layout.logit_scale * 1.5})(target)
    with pytest.raises(UnsupportedTargetError, match="logits do not follow"):
        check_target(wrong)
