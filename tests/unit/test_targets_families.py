from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from specdraft.core.errors import ConfigError
from specdraft.core.tree import DraftTree
from specdraft.core.types import FeatureRequest, TokenBatch
from specdraft.targets import layout
from specdraft.targets.check import token_batch, tree_masks
from specdraft.targets.hf import HFTarget
from tests.tiny import HIDDEN_SIZE, NUM_LAYERS, SLIDING_WINDOW, VOCAB_SIZE, tiny_models, tiny_target

FAMILIES = sorted(tiny_models)
LENGTH = 3 * SLIDING_WINDOW
TREE = DraftTree((-1, -1, 0, 0, 1, 2), (0, 1, 0, 1, 0, 0))
LEARNED_POSITIONS = {"gpt2"}


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest) -> HFTarget:
    return tiny_target(request.param)


def random_ids(rows: int, length: int) -> Tensor:
    return torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(length))


def full_output(target: HFTarget, ids: Tensor) -> Any:
    with torch.no_grad():
        return target.model(input_ids=ids, output_hidden_states=True, use_cache=False)


def test_features_and_logits_are_the_models_own(target: HFTarget) -> None:
    ids = random_ids(2, LENGTH)
    wanted = full_output(target, ids)
    every_layer = FeatureRequest(tuple(range(NUM_LAYERS + 1)))
    features = target.capture(token_batch(ids), every_layer)
    assert features.aux_hidden is not None
    assert features.aux_hidden.shape == (2, LENGTH, HIDDEN_SIZE * (NUM_LAYERS + 1))
    for state, reference in zip(features.aux_hidden.split(HIDDEN_SIZE, dim=-1), wanted.hidden_states, strict=True):
        torch.testing.assert_close(state, reference, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(target.unembedding(features.last_hidden), wanted.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(target.logits(features.last_hidden), wanted.logits, rtol=1e-4, atol=1e-4)
    assert not features.last_hidden.requires_grad
    assert not features.last_hidden.is_inference()


def test_embedding_is_the_first_hidden_state(target: HFTarget) -> None:
    ids = random_ids(1, LENGTH)
    first = full_output(target, ids).hidden_states[0]
    embedded = target.embed(ids)
    if target.spec.model_type in LEARNED_POSITIONS:
        first = first - target.layout.decoder.get_submodule("wpe").weight[:LENGTH]
    torch.testing.assert_close(embedded, first, rtol=1e-5, atol=1e-5)


def test_layers_come_in_the_order_asked_for(target: HFTarget) -> None:
    ids = random_ids(1, 5)
    states = full_output(target, ids).hidden_states
    hooks = [len(layer._forward_pre_hooks) + len(layer._forward_hooks) for layer in target.layout.layers]
    aux = target.capture(token_batch(ids), FeatureRequest((3, 1))).aux_hidden
    torch.testing.assert_close(aux, torch.cat([states[3], states[1]], dim=-1), rtol=1e-5, atol=1e-5)
    assert target.capture(token_batch(ids)).aux_hidden is None
    with pytest.raises(ConfigError, match="hidden states 0 to 4, got 5"):
        target.capture(token_batch(ids), FeatureRequest((1, NUM_LAYERS + 1)))
    after = [len(layer._forward_pre_hooks) + len(layer._forward_hooks) for layer in target.layout.layers]
    assert after == hooks


def padded(short: Tensor, long: Tensor) -> TokenBatch:
    """Rows ``[1, S]`` and ``[1, L]`` as one batch with padding on the right of the first."""
    batch = token_batch(torch.cat([torch.nn.functional.pad(short, (0, long.shape[1] - short.shape[1])), long]))
    mask = batch.attention_mask.clone()
    mask[0, short.shape[1] :] = False
    return dataclasses.replace(batch, attention_mask=mask, document_ids=torch.where(mask, 0, -1))


def test_padding_and_neighbours_change_nothing(target: HFTarget) -> None:
    short, long = random_ids(1, LENGTH - 7), random_ids(1, LENGTH)
    together = target.capture(padded(short, long), FeatureRequest((0, 2)))
    assert together.aux_hidden is not None
    for row, ids in enumerate((short, long)):
        alone = target.capture(token_batch(ids), FeatureRequest((0, 2)))
        length = ids.shape[1]
        torch.testing.assert_close(together.last_hidden[row, :length], alone.last_hidden[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(together.aux_hidden[row, :length], alone.aux_hidden[0], rtol=1e-4, atol=1e-4)


def test_documents_of_a_row_do_not_see_each_other(target: HFTarget) -> None:
    first, second = random_ids(1, LENGTH - 4), random_ids(1, LENGTH - 2)
    batch = token_batch(torch.cat([first, second], dim=1))
    split = first.shape[1]
    positions = torch.cat([torch.arange(split), torch.arange(second.shape[1])])[None]
    documents = torch.cat([torch.zeros_like(first), torch.ones_like(second)], dim=1)
    packed = dataclasses.replace(batch, position_ids=positions, document_ids=documents)
    states = target.capture(packed).last_hidden
    for part, ids in ((states[:, :split], first), (states[:, split:], second)):
        torch.testing.assert_close(part, target.capture(token_batch(ids)).last_hidden, rtol=1e-4, atol=1e-4)


def run_cached(target: HFTarget, prefix: Tensor, tail: Tensor, tree: DraftTree, request: FeatureRequest) -> Any:
    """Prefix without masks, then the root and nodes of ``tree`` in one forward."""
    cache = DynamicCache(config=target.model.config)
    length = prefix.shape[1]
    target.forward_cached(prefix, torch.arange(length)[None], None, None, cache, request)
    full, sliding = tree_masks(tree, length, target.sliding_window, target.device)
    return target.forward_cached(tail, length + tree.depth_tensor()[None], full, sliding, cache, request)


@pytest.mark.parametrize("length", [3, LENGTH], ids=["inside_window", "beyond_window"])
@pytest.mark.parametrize("tree", [DraftTree.chain(5), TREE], ids=["chain", "tree"])
def test_cached_forward_equals_full_forward(target: HFTarget, tree: DraftTree, length: int) -> None:
    prefix, tail = random_ids(1, length), random_ids(1, len(tree) + 1)
    request = FeatureRequest((1, NUM_LAYERS))
    features = run_cached(target, prefix, tail, tree, request)
    assert features.aux_hidden is not None
    for node, path in enumerate(tree.path_table().tolist()):
        text = torch.cat([prefix, tail[:, sorted(set(path))]], dim=1)
        wanted = full_output(target, text)
        torch.testing.assert_close(
            target.logits(features.last_hidden[0, node]), wanted.logits[0, -1], rtol=1e-3, atol=1e-3
        )
        states = torch.cat([wanted.hidden_states[1][0, -1], wanted.hidden_states[NUM_LAYERS][0, -1]])
        torch.testing.assert_close(features.aux_hidden[0, node], states, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
def test_eager_attention_takes_the_same_masks(kind: str) -> None:
    target = tiny_target(kind, attn_implementation="eager")
    assert target.layout.decoder.config._attn_implementation == "eager"
    prefix, tail = random_ids(1, LENGTH), random_ids(1, len(TREE) + 1)
    eager = run_cached(target, prefix, tail, TREE, FeatureRequest()).last_hidden
    sdpa = run_cached(tiny_target(kind), prefix, tail, TREE, FeatureRequest()).last_hidden
    torch.testing.assert_close(eager, sdpa, rtol=1e-4, atol=1e-4)


def test_the_check_at_load_leaves_no_hooks() -> None:
    target = tiny_target("llama")
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in target.model.modules())


def test_target_is_frozen(target: HFTarget) -> None:
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert not any(module.training for module in target.model.modules())


def test_spec_of_every_family(target: HFTarget) -> None:
    spec = target.spec
    assert (spec.hidden_size, spec.vocab_size, spec.num_hidden_layers) == (HIDDEN_SIZE, VOCAB_SIZE, NUM_LAYERS)
    assert spec.num_attention_heads == 4
    assert spec.rope_parameters["rope_type"] == "default"
    assert isinstance(spec.rope_parameters["rope_theta"], float)
    assert spec.eos_token_ids == (2,)
    assert len(target.layer_types) == NUM_LAYERS
    assert (target.sliding_window is None) == (set(target.layer_types) == {"full_attention"})


def test_geometry_that_differs_between_families() -> None:
    assert tiny_target("qwen3").spec.head_dim == 16
    assert tiny_target("llama").spec.head_dim == 8
    assert tiny_target("llama").spec.num_key_value_heads == 2
    assert tiny_target("gpt_neox").spec.num_key_value_heads == 4
    assert tiny_target("gpt_neox").spec.rope_parameters["partial_rotary_factor"] == 0.25
    assert tiny_target("gemma3").spec.rope_parameters["rope_theta"] == 1_000_000.0
    assert tiny_target("gemma3_composite").layer_types == ("sliding_attention", "full_attention") * 2
    assert tiny_target("mistral").layer_types == ("sliding_attention",) * NUM_LAYERS
    assert tiny_target("mistral", sliding_window=None).layer_types == ("full_attention",) * NUM_LAYERS
    assert tiny_target("qwen2_sliding").layer_types == ("full_attention",) * 2 + ("sliding_attention",) * 2
    assert tiny_target("granite").layout.embedding_scale == 3.0
    assert tiny_target("granite").unembedding.scale == 0.25
    assert tiny_target("cohere").unembedding.scale == 0.25
    assert tiny_target("gemma2").unembedding.softcap == 5.0
    yarn = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    rope = tiny_target("llama", rope_parameters=yarn).spec.rope_parameters
    assert {key: rope[key] for key in yarn} == yarn


@pytest.mark.parametrize("kind", ["gemma2", "llama"])
def test_a_decoder_that_scales_embeddings_itself(kind: str) -> None:
    """Gemma in the first releases of transformers 5: a plain embedding module, scaled by the decoder."""
    config = tiny_target(kind).model.config
    scale = layout._embedding_scale(config, torch.nn.Embedding(3, config.hidden_size))
    assert scale == (config.hidden_size**0.5 if kind == "gemma2" else 1.0)
    assert layout._embedding_scale(config, tiny_target(kind).layout.embedding) == 1.0
