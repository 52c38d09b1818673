"""A target without its layers says of embeddings, logits and itself what the whole one says, and cannot run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdraft.targets._config import TargetConfig
from specdraft.targets.ends import LayersNeededError, load_ends
from specdraft.targets.hf import load_target
from tests.tiny import VOCAB_SIZE, tiny_models, tiny_tokenizer


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3_composite", "cohere", "granite", "qwen3", "gpt2"])
def test_the_ends_are_those_of_the_whole_target(tmp_path: Path, kind: str) -> None:
    model = tiny_models[kind](tie_word_embeddings=kind in ("cohere", "gpt2"))
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    config = TargetConfig(name=str(tmp_path), device="cpu", pack_weights=False)
    whole, ends = load_target(config), load_ends(config)
    assert ends is not None and ends.spec == whole.spec and ends.dtype == whole.dtype
    ids = torch.arange(VOCAB_SIZE)
    assert torch.equal(ends.embed(ids), whole.embed(ids))
    hidden = torch.randn(5, whole.spec.hidden_size)
    assert torch.equal(ends.unembedding(hidden), whole.unembedding(hidden))
    assert torch.equal(ends.layout.final_norm(hidden), whole.layout.final_norm(hidden))
    found, wanted = ends.last_layer(), whole.last_layer()
    assert (found is None) == (wanted is None) and (kind != "llama" or found is not None)
    if found is not None and wanted is not None:
        assert all(torch.equal(getattr(found, name), getattr(wanted, name)) for name in wanted.__dataclass_fields__)
    assert sum(p.numel() for p in ends.model.parameters() if p.device.type != "meta") < sum(
        p.numel() for p in whole.model.parameters()
    )
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(LayersNeededError, match=r"^features\.mode: the layers of .* are not in memory"):
        ends.forward_cached(tokens, tokens, None, None, None)


def test_a_target_that_is_spread_or_quantised_is_loaded_whole(tmp_path: Path) -> None:
    config = TargetConfig(name=str(tmp_path))
    assert load_ends(replace(config, device_map="auto")) is None
    assert load_ends(replace(config, quantization="int8")) is None
