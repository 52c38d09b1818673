"""The vectorised unroll equals a naive loop that runs one token at a time over plain lists of keys; trees and vocabularies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specdraft.core.errors import ConfigError
from specdraft.core.tree import DraftTree
from specdraft.core.types import TokenBatch
from specdraft.heads._unroll import UnrolledHead
from specdraft.heads._vocab import DraftVocab, choose_draft_vocab, coverage
from specdraft.heads.eagle3 import Eagle3Config
from specdraft.heads.storage import load_head, save_head
from specdraft.losses._config import LossConfig
from specdraft.losses.objectives import Objective, Teacher
from tests.support import SPEC, World, draft_batch, make_head, token_batch, world


def naive_attend(query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """One query ``[heads, d]`` over lists of ``[kv, d]``, head by head."""
    group = query.shape[0] // keys[0].shape[0]
    out = []
    for head in range(query.shape[0]):
        scores = torch.stack([query[head] @ k[head // group] for k in keys]) / query.shape[-1] ** 0.5
        weights = scores.softmax(0)
        out.append(sum(w * v[head // group] for w, v in zip(weights, values, strict=True)))
    return torch.stack(out).flatten()  # type: ignore[arg-type]


def naive_unroll(head: UnrolledHead, w: World, tokens: TokenBatch, row: int, anchor: int) -> list[torch.Tensor]:
    """Readouts of every step for one anchor, by the definition."""
    first = int((tokens.document_ids[row] == tokens.document_ids[row, anchor]).nonzero()[0])
    features = w.features(tokens, len(head.features().aux_layers))
    ids, positions = tokens.input_ids[row], tokens.position_ids[row]
    head.layer.rotary.reserve(64)
    seeds = head.seed(features).view(*tokens.input_ids.shape, -1)[row]
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for t in range(first, anchor + 1):
        x, residual = head.mix(seeds[t : t + 1], w.embed(ids[t + 1 : t + 2]))
        query, key, value = head.layer.project(x, positions[t : t + 1])
        keys.append(key[0])
        values.append(value[0])
    output = torch.empty(0)
    readouts = []
    for s in range(head.unroll_steps):
        if s:
            token = ids[anchor + 1 + s] if anchor + 1 + s < ids.numel() else ids[0]
            x, residual = head.mix(head.feedback(output), w.embed(token[None]))
            query, key, value = head.layer.project(x, positions[anchor : anchor + 1] + s)
            keys.append(key[0])
            values.append(value[0])
        output = head.layer.finish(naive_attend(query[0], keys, values)[None], residual)
        readouts.append(head.readout(output)[0])
    return readouts


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("eagle", {"unroll_steps": 4, "input_noise": 0.0}),
        ("eagle3", {}),
        ("eagle3", {"norm_before_residual": True}),
        ("eagle3", {"fc_norm": True, "norm_output": True}),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_unroll_equals_naive_loop(kind: str, settings: dict[str, object], packed: bool) -> None:
    w = world()
    head = make_head(kind, w.spec, num_draft_tokens=4, **settings).eval()
    assert isinstance(head, UnrolledHead)
    tokens = token_batch([13, 9], [(5, 13), (4, 9)], pad_to=14)
    if packed:  # a second document begins inside the first row
        tokens.document_ids[0, 7:13] = 1
        tokens.position_ids[0, 7:13] = torch.arange(6)
    batch = draft_batch(w, head, tokens)
    steps = head(batch, w.embed, w.unembed)
    length, compared = tokens.input_ids.shape[1], 0
    for n, flat in enumerate(batch.anchors.tolist()):
        row, anchor = divmod(flat, length)
        for s, readout in enumerate(naive_unroll(head, w, tokens, row, anchor)):
            label = anchor + 2 + s
            same = label < length and tokens.document_ids[row, label] == tokens.document_ids[row, anchor]
            if same:  # past the end of a document the token fed in is arbitrary and the loss leaves it out
                torch.testing.assert_close(steps[s].hidden[n], readout, rtol=1e-3, atol=1e-4)
                compared += 1
    assert compared > 20


def test_deeper_steps_go_on_from_fewer_anchors_as_from_all() -> None:
    """What an anchor drafts does not depend on which others do; the loss is, on the mean, that of all of them."""
    torch.manual_seed(0)
    w = world()
    head = make_head("eagle3", w.spec, num_draft_tokens=4, keep_ratio=0.5).train()
    assert isinstance(head, UnrolledHead)
    tokens = token_batch([24, 9], [(4, 24), (3, 9)])
    tokens.document_ids[0, 15:] = 1
    batch = draft_batch(w, head, tokens)
    count = batch.anchors.numel()
    steps, whole = head(batch, w.embed, w.unembed), head.eval()(batch, w.embed, w.unembed)
    assert [step.hidden.shape[0] for step in steps] == [round(count * share) for share in (1, 0.5, 0.25, 0.125)]
    assert all(step.chosen is None for step in [steps[0], *whole, *head.train().draft_steps(batch, w.embed, w.unembed)])
    for step, every in zip(steps, whole, strict=True):
        torch.testing.assert_close(step.hidden, every.hidden if step.chosen is None else every.hidden[step.chosen])
    objective, teacher = Objective(LossConfig()), Teacher(w.unembed, w.unembed, None)
    wanted = objective(whole, batch, teacher).loss_sum.item()
    with torch.no_grad():
        losses = torch.tensor(
            [objective(head(batch, w.embed, w.unembed), batch, teacher).loss_sum.item() for _ in range(150)]
        )
    assert losses.std() > 0 and abs(losses.mean().item() - wanted) < 4 * losses.std().item() / 150**0.5


def test_later_tokens_do_not_reach_earlier_anchors() -> None:
    w = world()
    head = make_head("eagle3", w.spec, num_draft_tokens=2).eval()
    tokens = token_batch([12], [(5, 12)])
    changed = token_batch([12], [(5, 12)])
    changed.input_ids[0, 10] = (changed.input_ids[0, 10] + 1) % SPEC.vocab_size
    a, b = (head(draft_batch(w, head, t), w.embed, w.unembed) for t in (tokens, changed))
    batch = draft_batch(w, head, tokens)
    before = batch.anchors < 8  # these read tokens up to t + 2 at most
    assert torch.equal(a[1].hidden[before], b[1].hidden[before])
    assert not torch.allclose(a[1].hidden[~before], b[1].hidden[~before])


def test_input_noise_is_of_training_only() -> None:
    w = world()
    head = make_head("eagle", w.spec, num_draft_tokens=2, input_noise=0.5)
    batch = draft_batch(w, head, token_batch([9], [(4, 9)]))
    noisy = [head.train()(batch, w.embed, w.unembed)[0].hidden for _ in range(2)]
    quiet = [head.eval()(batch, w.embed, w.unembed)[0].hidden for _ in range(2)]
    assert not torch.equal(*noisy) and torch.equal(*quiet)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(2, (1,)), (3, (1, 2)), (4, (1, 2, 3)), (6, (3, 4, 5)), (30, (16, 24, 29)), (32, (17, 26, 31))],
)
def test_default_layers_are_distinct_and_exist(layers: int, expected: tuple[int, ...]) -> None:
    assert Eagle3Config(kind="eagle3").layers_of(world(num_hidden_layers=layers).spec) == expected


def test_a_file_from_before_layers_were_written_reads_those_of_its_time(tmp_path: Path) -> None:
    head = make_head("eagle3", world(num_hidden_layers=30).spec, num_draft_tokens=2)
    folder = save_head(head, tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    assert config["head"]["aux_layers"] == [16, 24, 29]
    config["head"]["aux_layers"] = None
    (folder / "config.json").write_text(json.dumps(config))
    assert load_head(folder).features().aux_layers == (3, 16, 28)


def test_layers_beyond_the_target_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"head.aux_layers: .*got \[1, 9\]"):
        Eagle3Config(kind="eagle3", aux_layers=[1, 9]).build(world().spec)


@pytest.mark.parametrize("rope_type", ["default", "linear", "llama3", "yarn"])
def test_rotary_table_follows_the_targets_scaling(rope_type: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    from specdraft.heads._blocks import RotaryTable

    rope: dict[str, object] = {"rope_type": rope_type, "rope_theta": 5000.0}
    if rope_type != "default":
        rope |= {"factor": 4.0, "original_max_position_embeddings": 32}
    if rope_type == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    table = RotaryTable(world(rope_parameters=rope).spec)
    table.reserve(50)
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=128, rope_parameters=dict(rope))
    x, positions = torch.randn(1, 2, 50, 8), torch.arange(50)
    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    torch.testing.assert_close(table.rotate(x[0].transpose(0, 1), positions).transpose(0, 1)[None], expected)


def test_draft_vocabulary_maps_both_ways() -> None:
    counts = torch.zeros(20, dtype=torch.int64)
    counts[[3, 9, 11]] = torch.tensor([5, 7, 1])
    chosen = choose_draft_vocab(counts, 5, always=[2])
    assert chosen == [0, 2, 3, 9, 11]  # fewer seen than asked for: filled up with the lowest ids
    vocab = DraftVocab(20, 5)
    vocab.set_tokens(chosen)
    vocab.check()
    ids = torch.arange(5)
    assert vocab.to_target(ids).tolist() == chosen
    assert (ids + vocab.d2t).tolist() == vocab.t2d.nonzero().flatten().tolist()
    assert vocab.to_draft(torch.tensor([9, 4, 2])).tolist() == [3, -1, 1]
    assert coverage(counts, [9]) == pytest.approx(7 / 13) and coverage(torch.zeros(4), [1]) == 0.0


def test_draft_vocabulary_limits() -> None:
    with pytest.raises(ConfigError, match="draft_vocab_size"):
        choose_draft_vocab(torch.zeros(10), 2, always=[1, 2, 3])
    with pytest.raises(ConfigError, match="exceeds"):
        DraftVocab(10, 11)
    with pytest.raises(ConfigError, match="distinct tokens"):
        DraftVocab(10, 3).set_tokens([1, 2, 2])


def test_trees() -> None:
    tree = DraftTree.from_paths([[1], [0, 0], [0], [0, 1]])
    assert tree.parents == (-1, -1, 0, 0) and tree.ranks == (0, 1, 0, 1) and tree.depths == (1, 1, 2, 2)
    assert tree.paths() == [[0], [1], [0, 0], [0, 1]] and tree.levels == ((0, 1), (2, 3))
    assert tree.ancestor_mask().int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 0, 1],
    ]
    assert tree.path_table().tolist() == [[0, 0, 0], [0, 1, 1], [0, 2, 2], [0, 1, 3], [0, 1, 4]]
    assert tree.truncate(1) == DraftTree((-1, -1), (0, 1)) and not tree.is_chain
    assert DraftTree.chain(3) == DraftTree.from_paths([[0, 0, 0], [0], [0, 0]]) and DraftTree.chain(3).is_chain
    assert DraftTree.chain(0).max_depth == 0


@pytest.mark.parametrize("paths", [[[0, 0]], [[]], [[-1]]])
def test_impossible_trees_are_refused(paths: list[list[int]]) -> None:
    with pytest.raises(ConfigError, match=r"decode\.tree"):
        DraftTree.from_paths(paths)
