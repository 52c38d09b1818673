"""Greedy text equals transformers' own, for every family, plain, on a chain and on a tree, past the sliding windows."""

from __future__ import annotations

import pytest
import torch

from specdraft.core.errors import ConfigError
from specdraft.core.tree import DraftTree
from specdraft.core.types import FeatureRequest
from specdraft.decode.cache import KVCache
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.plan import TreePlan
from specdraft.targets.fast_path import replace_layers
from specdraft.targets.hf import HFTarget
from tests.decode.oracle import Oracle, greedy, prompt_ids
from tests.tiny import SLIDING_WINDOW, tiny_models

LENGTH = 40
CHAIN = DraftTree.chain(3)
TREE = DraftTree.from_paths([[0], [1], [0, 0], [1, 0], [1, 1], [0, 0, 0], [1, 1, 0], [1, 1, 1]])
FUSED = {"llama", "mistral", "qwen2", "qwen2_sliding", "qwen3"}
"""Families whose layers are replaced by faster ones on a CPU."""
UNTIED = {"gemma2", "gemma3", "cohere"}
"""Random tied embeddings make these repeat one token, which would hide errors."""


def target(kind: str) -> HFTarget:
    overrides = {"tie_word_embeddings": False} if kind in UNTIED else {}
    return HFTarget.from_model(tiny_models[kind](**overrides))


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("kind", list(tiny_models))
def test_text_is_the_targets_greedy_text(kind: str, packed: bool) -> None:
    subject = target(kind)
    prompt = prompt_ids(9)
    answer = greedy(subject, prompt, LENGTH + 4)
    assert LENGTH > 2 * SLIDING_WINDOW
    if kind != "gemma3_composite":
        assert len(set(answer)) > 3, "a text of one token proves little"
    if packed:
        subject.pack()
        assert subject.fast_layers is not None
        assert bool(len(subject.fast_layers)) == (kind in FUSED)
    assert SpeculativeDecoder(subject).generate(prompt, LENGTH, ignore_eos=True).tokens == answer[:LENGTH]
    for tree, rank, right in ((CHAIN, 0, 2), (TREE, 1, 3), (TREE, 0, 1)):
        decoder = SpeculativeDecoder(subject, Oracle(answer, tree, right, rank))
        result = decoder.generate(prompt, LENGTH, ignore_eos=True)
        assert result.tokens == answer[:LENGTH]
        assert result.num_steps == -(-(LENGTH - 1) // (right + 1))


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3", "gpt2"])
def test_prompt_of_one_token(kind: str) -> None:
    subject = target(kind)
    answer = greedy(subject, [5], 24)
    decoder = SpeculativeDecoder(subject, Oracle(answer, TREE, 3, 1))
    assert decoder.generate([5], 20, ignore_eos=True).tokens == answer[:20]


def test_prompt_longer_than_the_window() -> None:
    subject = target("mistral")
    prompt = prompt_ids(5 * SLIDING_WINDOW)
    answer = greedy(subject, prompt, 24)
    for packed in (False, True):
        if packed:
            subject.pack()
        decoder = SpeculativeDecoder(subject, Oracle(answer, TREE, 3, 1))
        assert decoder.generate(prompt, 20, ignore_eos=True).tokens == answer[:20]


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
def test_features_of_the_fast_loop_are_the_models(kind: str) -> None:
    request = FeatureRequest((4, 0, 2))
    found = []
    for packed in (False, True):
        subject = target(kind)
        if packed:
            subject.pack()
            assert subject.fast_layers is not None
            assert subject.fast_layers.decoder is not None
        plan = TreePlan(TREE, 16, subject.sliding_window, kind != "mistral", subject.device)
        cache = KVCache(4, 32)
        prompt = torch.tensor([prompt_ids(11)])
        with torch.inference_mode():
            subject.forward_cached(prompt, torch.arange(11)[None], None, None, cache, request)
            cache.commit(range(11))
            nodes = torch.tensor([prompt_ids(plan.size, seed=1)])
            features = subject.forward_cached(nodes, plan.positions(11), *plan.masks(11), cache, request)
            with pytest.raises(ConfigError, match=r"head.aux_layers: the target has hidden states 0 to 4, got 5"):
                subject.forward_cached(nodes, plan.positions(11), *plan.masks(11), cache, FeatureRequest((5,)))
        found.append(features)
    torch.testing.assert_close(found[1].last_hidden, found[0].last_hidden, rtol=1e-4, atol=1e-4)
    assert found[0].aux_hidden is not None
    torch.testing.assert_close(found[1].aux_hidden, found[0].aux_hidden, rtol=1e-4, atol=1e-4)


def test_replaced_layers_can_be_put_back() -> None:
    subject = target("qwen3")
    before = {name: value.clone() for name, value in subject.model.state_dict().items()}
    layers = replace_layers(subject.layout)
    assert len(layers) == 4
    assert all("forward" in vars(layer) for layer in subject.layout.layers)
    linear = subject.layout.layers[0].self_attn.k_proj
    assert linear.weight.data_ptr() != before["model.layers.0.self_attn.k_proj.weight"].data_ptr()
    assert linear.weight.untyped_storage().nbytes() > linear.weight.numel() * 4, "a view of the fused weight"
    after = subject.model.state_dict()
    assert all((after[name] == value).all() for name, value in before.items())
    layers.remove()
    assert len(layers) == 0
    assert layers.decoder is None
    assert not any("forward" in vars(layer) for layer in subject.layout.layers)
    assert linear.weight.untyped_storage().nbytes() == linear.weight.numel() * 4


def test_a_layer_that_computes_something_else_is_not_replaced() -> None:
    """Granite's layers have all the parts of Llama's and scale what they add; one trainable layer is left alone too."""
    assert len(replace_layers(target("granite").layout)) == 0
    subject = target("llama")
    subject.layout.layers[1].mlp.up_proj.weight.requires_grad_(True)
    layers = replace_layers(subject.layout)
    assert len(layers) == 3
    assert layers.decoder is None
    assert "forward" not in vars(subject.layout.layers[1])
