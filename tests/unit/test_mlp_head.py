"""The MLP speculator equals its equations, written out; what its weights are tied to; its settings."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from specdraft.core.errors import ConfigError
from specdraft.heads.base import DraftHead
from specdraft.heads.mlp import MLPConfig, MLPHead
from tests.support import World, draft_batch, make_head, token_batch, world

DEPTHS = 3


def by_the_equations(head: MLPHead, w: World, hidden: torch.Tensor, tokens: list[int]) -> list[torch.Tensor]:
    """Logits of every depth for one anchor, in plain tensor arithmetic over the head's weights."""
    weights = dict(head.named_parameters())
    config = head.config
    assert isinstance(config, MLPConfig)
    a = 0.5 ** (1 / (2 * DEPTHS))
    b = math.sqrt(1 - a * a)

    def weight(name: str, depth: int, field: str = "weight") -> torch.Tensor:
        found = [key for key in weights if key.startswith(name) and key.endswith(field)]
        return weights[f"{name}.{min(depth, len(found) - 1)}.{field}"]

    def half(x: torch.Tensor) -> torch.Tensor:
        return x / x.square().mean().sqrt() / 2**0.5

    state, logits = half(hidden) if config.scale_input else hidden, []
    for depth, token in enumerate(tokens):
        table = weight("embeddings", depth)
        own, width = config.own_embeddings, table.shape[1]
        embedded = table[token] * math.sqrt(width / 2) if own else table @ half(w.table[token])
        mixed = a * (weight("transitions", depth) @ state) + b * embedded
        normed = mixed / mixed.square().mean().sqrt()
        state = F.gelu(normed * weight("norms", depth) + weight("norms", depth, "bias"))
        projected = weight("outputs", depth) @ state
        logits.append(projected if config.own_lm_head else w.unembed(projected))
    return logits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_equals_the_equations(tied: bool, own: bool, scaled: bool) -> None:
    w = world()
    settings = {"tie_weights": tied, "own_embeddings": own, "own_lm_head": own, "scale_input": scaled}
    head = make_head("mlp", w.spec, num_draft_tokens=DEPTHS, inner_size=24, **settings)
    assert isinstance(head, MLPHead)
    tokens = token_batch([12], [(5, 12)])
    batch = draft_batch(w, head, tokens)
    steps = head(batch, w.embed, w.unembed)
    compared = 0
    for n, anchor in enumerate(batch.anchors.tolist()):
        following = tokens.input_ids[0, anchor + 1 : anchor + 1 + DEPTHS].tolist()
        for depth, expected in enumerate(by_the_equations(head, w, batch.features.last_hidden[0, anchor], following)):
            got = steps[depth].unembed(steps[depth].hidden[n])
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
            compared += 1
    assert compared > 10


def sizes(head: DraftHead) -> dict[str, int]:
    """Weights per list of modules."""
    total: dict[str, int] = {}
    for name, parameter in head.named_parameters():
        total[name.split(".")[0]] = total.get(name.split(".")[0], 0) + parameter.numel()
    return total


def test_what_is_tied() -> None:
    spec = world().spec
    published = {"inner_size": 24, "own_embeddings": True, "own_lm_head": True, "num_draft_tokens": 4}
    vocab, hidden = spec.vocab_size, spec.hidden_size
    once = {"embeddings": vocab * 24, "norms": 2 * 24, "outputs": vocab * 24}
    tied = MLPConfig(kind="mlp", **published).build(spec)
    assert sizes(tied) == {**once, "transitions": hidden * 24 + 24 * 24}
    untied = MLPConfig(kind="mlp", tie_weights=False, **published).build(spec)
    assert sizes(untied) == {
        **{name: 4 * count for name, count in once.items()},
        "transitions": hidden * 24 + 3 * 24 * 24,
    }
    lean = MLPConfig(kind="mlp", num_draft_tokens=4).build(spec)
    assert lean.num_parameters == 4 * hidden**2 + 2 * hidden  # nothing grows with the vocabulary


@pytest.mark.parametrize("own", [True, False])
def test_embeddings_start_at_the_scale_of_the_state(own: bool) -> None:
    """A root mean square of 1 / sqrt(2), whichever embeddings are used: the scale factors count on it."""
    torch.manual_seed(0)
    w = world(hidden_size=256)
    head = MLPConfig(kind="mlp", own_embeddings=own, num_draft_tokens=1).build(w.spec)
    mixed: list[torch.Tensor] = []
    head.norms[0].register_forward_hook(lambda module, inputs, output: mixed.append(inputs[0]))
    head.advance(0, torch.zeros(50, 256), torch.arange(50), w.embed)
    assert mixed[0].square().mean().sqrt().item() == pytest.approx(0.5**0.5 * 0.5**0.5, rel=0.1)


def test_bad_settings_name_their_key() -> None:
    with pytest.raises(ConfigError, match=r"^head\.inner_size: must be positive or null, got 0; use null$"):
        MLPConfig(kind="mlp", inner_size=0)
