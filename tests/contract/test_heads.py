"""Every registered head keeps the contract: offsets, gradients, overfitting, padding, replay, round trip, proposals."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch

from specdraft.core.errors import CheckpointError, ConfigError
from specdraft.core.tree import DraftTree
from specdraft.core.types import DraftContext, Features, TokenBatch
from specdraft.data.feature_layout import kept_positions
from specdraft.heads.base import DraftHead, head_config, head_kinds
from specdraft.heads.storage import load_head, save_head
from specdraft.losses._config import LossConfig
from specdraft.losses.objectives import Objective, Teacher
from tests.support import World, draft_batch, make_head, token_batch, world

VARIANTS: dict[str, dict[str, dict[str, object]]] = {
    "medusa": {"shared": {}, "unshared": {"shared_lm_head": False, "num_layers": 2}},
    "eagle": {
        "one": {"input_noise": 0.0},
        "unrolled": {"input_noise": 0.0, "unroll_steps": 3},
        "hass": {"input_noise": 0.0, "unroll_steps": 3, "detach_steps": True},
    },
    "eagle3": {
        "plain": {},
        "normed": {"norm_before_residual": True, "aux_layers": [1, 3]},
        "v31": {"fc_norm": True, "norm_output": True, "aux_layers": [0, 1, 3, 4], "unroll_steps": 2},
        "one_layer": {"aux_layers": [2]},
    },
    "hydra_chain": {
        "plusplus": {},
        "plain": {"num_layers": 1, "prefix_attention": False, "norm_embeddings": False, "shared_lm_head": False},
    },
    "dflash": {
        "plain": {"num_layers": 2},
        "causal": {"num_layers": 1, "causal": True, "anchor_predicts": True, "mask_token_id": 1},
        "spark": {"num_layers": 2, "anchor_predicts": True, "markov_rank": 8, "confidence_head": True},
    },
    "peagle": {
        "plain": {"num_layers": 2, "keep_ratio": 1.0},
        "one_layer": {"num_layers": 1, "keep_ratio": 1.0, "aux_layers": [2]},
    },
    "mlp": {
        "lean": {},
        "untied": {"tie_weights": False, "inner_size": 24, "scale_input": False},
        "published": {"own_embeddings": True, "own_lm_head": True, "inner_size": 40},
    },
}
CASES = [
    pytest.param(kind, {**settings, "num_draft_tokens": 3, "draft_vocab_size": size}, id=f"{kind}-{name}-{size}")
    for kind in head_kinds()
    for name, settings in VARIANTS.get(kind, {"default": {}}).items()
    for size in (None, 40)
]
TREE = DraftTree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 1], [1, 0, 2]])


def teacher_of(world: World, head: DraftHead) -> Teacher:
    return Teacher(world.unembed, head.draft_unembedding(world.unembed), head.label_map())


def objective_of(head: DraftHead, term: str = "soft_ce") -> Objective:
    """One term, and the one that a confidence head needs."""
    terms = {term: 1.0}
    if asdict(head.config).get("confidence_head"):
        terms["confidence"] = 1.0
    return Objective(LossConfig(terms=terms))


def loss_of(world: World, head: DraftHead, tokens: TokenBatch, term: str = "soft_ce") -> torch.Tensor:
    objective = objective_of(head, term)
    batch = draft_batch(world, head, tokens)
    result = objective(head(batch, world.embed, world.unembed), batch, teacher_of(world, head))
    return result.loss_sum / objective.denominator(batch)


def propose(world: World, head: DraftHead, ids: torch.Tensor, position: int, tree: DraftTree) -> torch.Tensor:
    """Tokens drafted at ``position`` of the row ``ids``, its features up to there taken in over three uneven calls."""
    length = ids.numel()
    columns = torch.arange(length)[None]
    tokens = TokenBatch(ids[None], columns >= 0, columns >= 0, columns, columns * 0, torch.zeros(1, dtype=torch.int64))
    features = world.features(tokens, len(head.features().aux_layers))
    head.eval()
    with torch.no_grad():
        state = head.init_state(64, tree, world.unembed)
        for start, stop in ((0, 2), (2, 3), (3, position + 1)):
            index = torch.arange(start, stop)
            context = DraftContext(ids[None, start + 1 : stop + 1], features.select(index), start)
            proposal = head.propose(state, context, world.embed, tree)
    return proposal.tokens[0]


@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_offsets_and_shapes(kind: str, settings: dict[str, object]) -> None:
    w = world()
    head = make_head(kind, w.spec, **settings)
    batch = draft_batch(w, head, token_batch([12, 9], [(5, 12), (4, 8)]))
    steps = head(batch, w.embed, w.unembed)
    assert [step.offset for step in steps] == list(range(2, 2 + head.config.trained_depths))
    assert all(step.hidden.shape[0] == batch.anchors.numel() for step in steps)
    size = settings["draft_vocab_size"] or w.spec.vocab_size
    assert {step.unembed(step.hidden).shape for step in steps} == {(batch.anchors.numel(), size)}


@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_gradient_reaches_every_parameter_and_nothing_else(kind: str, settings: dict[str, object]) -> None:
    w = world()
    head = make_head(kind, w.spec, **settings)
    before = (w.table.clone(), w.unembed.weight.clone())
    loss_of(w, head, token_batch([12, 9], [(5, 12), (4, 8)])).backward()
    missing = [name for name, p in head.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert missing == []
    assert torch.equal(w.table, before[0]) and torch.equal(w.unembed.weight, before[1])


@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_a_batch_without_anchors_gives_a_zero_with_a_graph(kind: str, settings: dict[str, object]) -> None:
    w = world()
    head = make_head(kind, w.spec, **settings)
    batch = draft_batch(w, head, token_batch([6, 4], [(0, 0), (0, 0)]))
    result = objective_of(head)(head(batch, w.embed, w.unembed), batch, teacher_of(w, head))
    result.loss_sum.backward()
    assert result.loss_sum.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in head.parameters())


@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_one_batch_overfits(kind: str, settings: dict[str, object]) -> None:
    w = world()
    head = make_head(kind, w.spec, **{**settings, "draft_vocab_size": None})
    tokens = token_batch([12, 10], [(4, 12), (3, 10)])
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    first = loss_of(w, head, tokens, "hard_ce").item()
    for _ in range(60):
        optimizer.zero_grad()
        loss = loss_of(w, head, tokens, "hard_ce")
        loss.backward()
        optimizer.step()
    assert loss.item() < first * 0.3


@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_states_that_a_store_leaves_out_are_never_read(kind: str, settings: dict[str, object]) -> None:
    """Noise in their place changes neither the loss nor a gradient, not by a bit."""
    w = world()
    head = make_head(kind, w.spec, **settings)
    tokens = token_batch([14, 9, 7], [(4, 12), (3, 9), (0, 0)])
    tokens.loss_mask[0, 6:9] = False  # two answers, and text behind the last
    terms = ["smooth_l1"] * (kind == "eagle") + ["confidence"] * bool(asdict(head.config).get("confidence_head"))
    objective = Objective(LossConfig(terms={"soft_ce": 1.0, **dict.fromkeys(terms, 1.0)}, outside_vocab="argmax"))
    batch = draft_batch(w, head, tokens)
    noise = torch.randn_like(batch.features.last_hidden)
    kept = torch.zeros(2, *tokens.input_ids.shape, dtype=torch.bool)
    for b in range(3):
        for own, positions in zip(kept, kept_positions(tokens.loss_mask[b], head.features()), strict=True):
            own[b, positions] = True
    last, aux = batch.features.last_hidden, batch.features.aux_hidden
    last = torch.where(kept[0, ..., None], last, noise)
    aux = None if aux is None else torch.where(kept[1, ..., None], aux, noise.repeat(1, 1, aux.shape[-1] // 32))
    found = []
    for features in (batch.features, Features(last, aux)):
        head.zero_grad()
        own = replace(batch, features=features)
        loss = objective(head(own, w.embed, w.unembed), own, teacher_of(w, head)).loss_sum
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in head.parameters() if p.grad is not None)])
    assert not kept.all() and len(found[0]) > 1
    assert all(torch.equal(plain, left_out) for plain, left_out in zip(*found, strict=True))


@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_padding_changes_nothing(kind: str, settings: dict[str, object]) -> None:
    w = world()
    head = make_head(kind, w.spec, **settings).eval()
    plain = loss_of(w, head, token_batch([12], [(5, 12)]))
    ids = token_batch([12], [(5, 12)]).input_ids
    padded = token_batch([12, 20], [(5, 12), (0, 0)], pad_to=23)
    padded.input_ids[0, :12] = ids
    torch.testing.assert_close(loss_of(w, head, padded), plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_what_is_trained_is_what_is_decoded(kind: str, settings: dict[str, object]) -> None:
    """Rows that continue with the head's own drafts: the training forward at that anchor must predict just these."""
    w = world()
    head = make_head(kind, w.spec, **settings).eval()
    seen: set[int] = set()
    for seed in range(4):
        prefix = token_batch([9], [(0, 0)], seed=seed).input_ids[0]
        position = 7  # the root is the token at 8
        drafted = propose(w, head, prefix, position, DraftTree.chain(3))
        row = torch.cat([prefix, drafted])
        tokens = token_batch([row.numel()], [(4, row.numel())], seed=seed)
        tokens.input_ids[0] = row
        batch = draft_batch(w, head, tokens)
        steps = head(batch, w.embed, w.unembed)
        place = (batch.anchors == position).nonzero().item()
        trained = [head.to_target_ids(s.unembed(s.hidden[place]).argmax(-1)).item() for s in steps]
        assert trained == drafted[: len(steps)].tolist()
        seen |= set(trained)
    assert len(seen) > 2  # not one constant token


@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_a_tree_holds_the_chain_and_distinct_siblings(kind: str, settings: dict[str, object]) -> None:
    w = world()
    head = make_head(kind, w.spec, **settings).eval()
    ids = token_batch([9], [(0, 0)]).input_ids[0]
    chain = propose(w, head, ids, 7, DraftTree.chain(3)).tolist()
    tree = propose(w, head, ids, 7, TREE).tolist()
    paths = TREE.paths()
    assert [tree[paths.index([0] * depth)] for depth in (1, 2, 3)] == chain
    siblings: dict[int, list[int]] = {}
    for parent, token in zip(TREE.parents, tree, strict=True):
        siblings.setdefault(parent, []).append(token)
    assert all(len(set(group)) == len(group) for group in siblings.values())
    if head.vocab is not None:
        assert all(head.vocab.t2d[token] for token in tree)


@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_a_branch_drafts_what_it_drafts_alone(kind: str, settings: dict[str, object]) -> None:
    """Node [1, 0] must not see node [0]: forcing its path as a tree of its own gives the same tokens."""
    w = world()
    head = make_head(kind, w.spec, **settings).eval()
    ids = token_batch([9], [(0, 0)]).input_ids[0]
    tree = propose(w, head, ids, 7, TREE).tolist()
    alone = DraftTree.from_paths([[1], [1, 0], [1, 0, 2]])
    expected = propose(w, head, ids, 7, alone).tolist()
    paths = TREE.paths()
    assert [tree[paths.index(path)] for path in ([1], [1, 0], [1, 0, 2])] == expected


@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_save_and_load_give_the_same_head(kind: str, settings: dict[str, object], tmp_path: object) -> None:
    w = world()
    head = make_head(kind, w.spec, **settings).eval()
    folder = save_head(head, f"{tmp_path}/head")
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        "config.json": 0o644,
        "model.safetensors": 0o644,
    }
    loaded = load_head(folder)
    assert loaded.config == head.config and loaded.spec == head.spec
    assert all(torch.equal(a, b) for a, b in zip(head.state_dict().values(), loaded.state_dict().values(), strict=True))
    ids = token_batch([9], [(0, 0)]).input_ids[0]
    assert torch.equal(propose(w, head, ids, 7, TREE), propose(w, loaded, ids, 7, TREE))
    saved = json.loads((folder / "config.json").read_text())["head"]
    assert saved.get("aux_layers", []) == list(head.features().aux_layers)  # not left to a default


def test_a_head_without_draft_tokens_is_refused(tmp_path: object) -> None:
    w = world()
    head = head_config("medusa", {"draft_vocab_size": 40}).build(w.spec)
    folder = save_head(head, f"{tmp_path}/head")
    with pytest.raises(CheckpointError, match="d2t and t2d"):
        load_head(folder)


def test_a_tree_deeper_than_the_head_is_refused() -> None:
    w = world()
    head = make_head("medusa", w.spec, num_draft_tokens=2)
    with pytest.raises(ConfigError, match="deeper than the head drafts"):
        head.init_state(16, DraftTree.chain(3), w.unembed)
