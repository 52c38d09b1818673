"""Hydra heads equal their equations, with prefix attention by a naive loop; where they start; their settings."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from specdraft.core.errors import ConfigError
from specdraft.heads.base import head_config
from specdraft.heads.hydra_chain import HydraConfig, HydraHead
from tests.support import SPEC, World, draft_batch, make_head, token_batch, world

DEPTHS = 3


def prefix(head: HydraHead, hidden: torch.Tensor) -> torch.Tensor:
    """What the prefix attention makes of the last of the states ``[t, H]`` of one document, query head by query head."""
    layer, norm = head.layer, head.input_layernorm
    assert layer is not None and norm is not None
    layer.rotary.reserve(32)
    query, keys, values = layer.project(norm(hidden), torch.arange(hidden.shape[0]))
    group = layer.num_heads // layer.num_kv_heads
    attended = []
    for i in range(layer.num_heads):
        scores = keys[:, i // group] @ query[-1, i] / layer.head_dim**0.5
        attended.append(scores.softmax(0) @ values[:, i // group])
    middle = hidden[-1] + layer.o_proj(torch.cat(attended))
    gate, up = layer.gate_up_proj(layer.post_attention_layernorm(middle)).chunk(2)
    return middle + layer.down_proj(F.silu(gate) * up)


def by_the_equations(head: HydraHead, w: World, state: torch.Tensor, tokens: list[int]) -> list[torch.Tensor]:
    """Hidden states of every depth for one anchor."""
    outputs = []
    for depth in range(DEPTHS):
        embedded = [w.table[token] for token in tokens[: depth + 1]]
        if head.norm_embeddings:
            embedded = [e / e.square().mean().sqrt() for e in embedded]
        x = torch.cat([state, *embedded])
        for i, block in enumerate(head.blocks[depth]):
            residual = x if i else block.residual.weight @ x + block.residual.bias
            x = residual + F.silu(block.linear.weight @ x + block.linear.bias)
        outputs.append(x)
    return outputs


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_equals_the_equations(normed: bool, attention: bool, packed: bool) -> None:
    w = world()
    settings = {"num_layers": 2, "prefix_attention": attention, "norm_embeddings": normed}
    head = make_head("hydra_chain", w.spec, num_draft_tokens=DEPTHS, **settings).eval()
    assert isinstance(head, HydraHead)
    tokens = token_batch([13, 9], [(5, 13), (4, 9)], pad_to=14)
    if packed:  # a second document begins inside the first row
        tokens.document_ids[0, 7:13] = 1
        tokens.position_ids[0, 7:13] = torch.arange(6)
    batch = draft_batch(w, head, tokens)
    steps, compared = head(batch, w.embed, w.unembed), 0
    for n, flat in enumerate(batch.anchors.tolist()):
        row, anchor = divmod(flat, tokens.input_ids.shape[1])
        documents = tokens.document_ids[row]
        first = int((documents == documents[anchor]).nonzero()[0])
        states = batch.features.last_hidden[row, first : anchor + 1]
        state = prefix(head, states) if attention else states[-1]
        following = tokens.input_ids[row, anchor + 1 : anchor + 1 + DEPTHS].tolist()
        for depth, expected in enumerate(by_the_equations(head, w, state, following)):
            if depth < len(following):
                torch.testing.assert_close(steps[depth].hidden[n], expected, rtol=1e-3, atol=1e-4)
                compared += 1
    assert compared > 20


def test_starts_as_the_target() -> None:
    """Without prefix attention every head first says what the target says at the anchor, whatever the tokens."""
    w = world()
    head = head_config("hydra_chain", {"prefix_attention": False}).build(w.spec)
    batch = draft_batch(w, head, token_batch([12], [(5, 12)]))
    for step in head(batch, w.embed, w.unembed):
        assert torch.equal(step.hidden, batch.features.last_hidden[0, batch.anchors])


def test_heads_of_their_own_start_as_the_targets_rows() -> None:
    w = world()
    head = head_config("hydra_chain", {"shared_lm_head": False, "draft_vocab_size": 40}).build(w.spec)
    assert head.vocab is not None
    head.vocab.set_tokens(range(10, 50))
    head.init_from_target(w.embed, w.unembed)
    batch = draft_batch(w, head, token_batch([12], [(5, 12)]))
    unembeds = [step.unembed for step in head(batch, w.embed, w.unembed)]
    assert all(torch.equal(unembed.weight, w.unembed.weight[10:50]) for unembed in unembeds)
    assert len({unembed.weight.data_ptr() for unembed in unembeds}) == len(unembeds) == 4


def test_dropout_is_of_training_only() -> None:
    w = world()
    head = make_head("hydra_chain", w.spec, dropout=0.5)
    batch = draft_batch(w, head, token_batch([9], [(4, 9)]))
    noisy = [head.train()(batch, w.embed, w.unembed)[0].hidden for _ in range(2)]
    quiet = [head.eval()(batch, w.embed, w.unembed)[0].hidden for _ in range(2)]
    assert not torch.equal(*noisy) and torch.equal(*quiet)


def test_width_of_the_layer_can_be_set() -> None:
    head = HydraConfig(kind="hydra_chain", intermediate_size=20).build(SPEC)
    assert head.layer is not None and head.layer.down_proj.in_features == 20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_layers": 0}, "head.num_layers: must be at least 1, got 0; use 1 or 4"),
        ({"dropout": 1.0}, "head.dropout: must lie in [0, 1), got 1.0; use 0"),
        ({"intermediate_size": 0}, "head.intermediate_size: must be positive or null, got 0; use null"),
        (
            {"prefix_attention": False, "intermediate_size": 64},
            "head.intermediate_size: has no effect without prefix attention, got 64; use null",
        ),
    ],
)
def test_bad_settings_name_their_key(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        head_config("hydra_chain", settings)
    assert str(caught.value) == message
