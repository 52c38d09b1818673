"""Draft layers that start from the target's last layer: which targets lend it, and that the copy computes the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdraft.core.errors import ConfigError
from specdraft.heads.base import head_config
from specdraft.losses.alignment import build_draft_batch
from specdraft.targets.hf import HFTarget
from tests.support import token_batch
from tests.tiny import NUM_LAYERS, tiny_target

PLAIN = ["llama", "mistral"]
OTHERS = ["qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt_neox", "olmo2", "granite", "cohere"]


def started(target: HFTarget, kind: str = "eagle3", **settings: Any) -> Any:
    torch.manual_seed(0)
    head = head_config(kind, {"num_draft_tokens": 2, **settings}).build(target.spec)
    head.init_from_target(target.embed, target.unembedding)
    return head, head.init_layer(target.last_layer())


@pytest.mark.parametrize("family", PLAIN)
@pytest.mark.parametrize("packed", [False, True])
def test_a_plain_layer_is_lent(family: str, packed: bool) -> None:
    target = tiny_target(family)
    if packed:
        target.pack()
    layer = target.last_layer()
    assert layer is not None
    wanted = dict(target.layout.layers[-1].named_parameters())
    torch.testing.assert_close(layer.down, wanted["mlp.down_proj.weight"])
    torch.testing.assert_close(layer.k, wanted["self_attn.k_proj.weight"])


@pytest.mark.parametrize("family", OTHERS)
def test_a_layer_that_computes_something_else_is_not(family: str) -> None:
    assert tiny_target(family).last_layer() is None


@pytest.mark.parametrize("kv_heads", [None, 4])
def test_eagle3_starts_as_the_end_of_the_target(kv_heads: int | None) -> None:
    """Over the input of the last layer, the first step gives the target's own last hidden state."""
    target = tiny_target("llama")
    head, line = started(target, aux_layers=[1, NUM_LAYERS - 1], num_key_value_heads=kv_heads)
    assert line is not None and "starts from the target's last layer" in line
    tokens = token_batch([12, 9], [(4, 12), (3, 9)])
    batch = build_draft_batch(tokens, target.capture(tokens, head.features()))
    head.eval()
    with torch.no_grad():
        steps = head(batch, target.embed, target.unembedding)
    wanted = batch.features.last_hidden.flatten(0, 1)[batch.anchors]
    torch.testing.assert_close(steps[0].hidden, wanted, atol=1e-4, rtol=1e-4)


def test_random_leaves_the_layer_alone() -> None:
    target = tiny_target("llama")
    head, line = started(target, layer_init="random")
    torch.manual_seed(0)
    built = head_config("eagle3", {"num_draft_tokens": 2}).build(target.spec)
    assert line == "draft layer: starts at random"
    torch.testing.assert_close(head.layer.down_proj.weight, built.layer.down_proj.weight)
    fitted, _ = started(target)
    torch.testing.assert_close(fitted.layer.down_proj.weight, target.layout.layers[-1].mlp.down_proj.weight)


@pytest.mark.parametrize(("family", "settings"), [("qwen3", {}), ("llama", {"intermediate_size": 40})])
def test_what_does_not_fit_is_said_or_refused(family: str, settings: dict[str, Any]) -> None:
    _, line = started(tiny_target(family), **settings)
    assert line is not None and "starts at random, the target's last layer does not fit" in line
    with pytest.raises(ConfigError, match=r"^head\.layer_init: the target's last layer does not fit"):
        started(tiny_target(family), layer_init="target", **settings)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^head\.num_key_value_heads: must divide the target's 4 query heads"):
        started(tiny_target("llama"), num_key_value_heads=3)
    with pytest.raises(ConfigError, match=r"^head\.num_key_value_heads: must be positive"):
        head_config("eagle", {"num_key_value_heads": 0})
    with pytest.raises(ConfigError, match=r"^head\.layer_init: unknown, got 'best'"):
        head_config("eagle3", {"layer_init": "best"})


@pytest.mark.parametrize("factor", [1.0, 30.0])
def test_eagle_sees_embeddings_and_features_at_one_scale(factor: float) -> None:
    target = tiny_target("llama")
    head, line = started(target, "eagle")
    assert line is None
    head.init_from_target(lambda ids: target.embed(ids) / factor, target.unembedding)
    every = target.embed(torch.arange(target.spec.vocab_size)) / factor
    assert float((every * head.embedding_scale).square().mean()) == pytest.approx(1.0, rel=1e-4)
