"""Heads that draft in one pass: their block attention, that training and decoding see the same, samples, and confidence."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from specdraft.core.errors import ConfigError
from specdraft.core.tree import DraftTree, Proposal, TreeGrowth
from specdraft.core.types import DraftBatch, DraftContext, TokenBatch
from specdraft.heads._parallel import BlockAttention, ParallelHead, choose_anchors, layout_of
from specdraft.heads.base import head_config
from specdraft.heads.dflash import DFlashHead
from specdraft.heads.peagle import PEagleHead
from specdraft.losses._config import LossConfig
from specdraft.losses.objectives import Objective, Teacher
from tests.support import SPEC, World, draft_batch, make_head, token_batch, world

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash": ("dflash", {"num_layers": 2}),
    "jetspec": ("dflash", {"num_layers": 2, "causal": True}),
    "dspark": ("dflash", {"num_layers": 1, "anchor_predicts": True, "markov_rank": 6, "confidence_head": True}),
    "mask_token": ("dflash", {"num_layers": 1, "mask_token_id": 1}),
    "peagle": ("peagle", {"num_layers": 3}),
    "peagle_one": ("peagle", {"num_layers": 1}),
}


def packed_batch(w: World, head: ParallelHead) -> DraftBatch:
    """Two rows of unequal length; a second document begins inside the first."""
    tokens = token_batch([16, 9], [(4, 16), (3, 9)], pad_to=17)
    tokens.document_ids[0, 8:16] = 1
    tokens.position_ids[0, 8:16] = torch.arange(8)
    return draft_batch(w, head, tokens)


def document(batch: DraftBatch, w: World, head: ParallelHead, anchor: int) -> tuple[torch.Tensor, Any, int]:
    """Ids of the anchor's document to its end, its features, and the anchor's place in it."""
    row, column = divmod(anchor, batch.input_ids.shape[1])
    inside = (batch.document_ids[row] == batch.document_ids[row, column]).nonzero().flatten()
    ids = batch.input_ids[row, inside][None]
    columns = torch.arange(ids.shape[1])[None]
    tokens = TokenBatch(ids, columns >= 0, columns >= 0, columns, columns * 0, torch.zeros(1, dtype=torch.int64))
    return ids, w.features(tokens, len(head.features().aux_layers)), column - int(inside[0])


@pytest.mark.parametrize("case", CASES)
def test_the_block_of_training_is_that_of_decoding(case: str) -> None:
    """Every anchor's hidden states, in packed and padded rows, equal those of its own document decoded up to there."""
    w = world()
    kind, settings = CASES[case]
    head = make_head(kind, w.spec, num_draft_tokens=3, **settings).eval()
    assert isinstance(head, ParallelHead)
    batch = packed_batch(w, head)
    steps = head(batch, w.embed, w.unembed)
    for n, anchor in enumerate(batch.anchors.tolist()):
        ids, features, place = document(batch, w, head, anchor)
        state = head.init_state(32, DraftTree.chain(3), w.unembed)
        split = max(place - 1, 0)
        for start, stop in ((0, split), (split, place + 1)):
            if stop > start:
                index = torch.arange(start, stop)
                context = DraftContext(ids[:, start + 1 : stop + 1], features.select(index), start)
                (drafted,) = head.draft_blocks([state], [context], w.embed)
        for k, step in enumerate(steps):
            torch.testing.assert_close(step.hidden[n, : SPEC.hidden_size], drafted[k], rtol=1e-4, atol=1e-5)
    assert batch.anchors.numel() > 12


def naive(query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """One query ``[heads, d]`` over lists of ``[kv, d]``."""
    group = query.shape[0] // keys[0].shape[0]
    out = []
    for head in range(query.shape[0]):
        scores = torch.stack([query[head] @ key[head // group] for key in keys]) / query.shape[-1] ** 0.5
        out.append(sum(w * v[head // group] for w, v in zip(scores.softmax(0), values, strict=True)))
    return torch.stack(out).flatten()  # type: ignore[arg-type]


@pytest.mark.parametrize("ragged", [False, True])
def test_block_attention_equals_a_loop(ragged: bool) -> None:
    torch.manual_seed(0)
    w = world()
    head = make_head("dflash", w.spec, num_draft_tokens=2, num_layers=1)
    assert isinstance(head, ParallelHead)
    batch = packed_batch(w, head)
    count, slots, length = batch.anchors.numel(), 3, batch.input_ids.shape[1]
    inner = torch.ones(slots, slots, dtype=torch.bool).tril()
    place = torch.arange(count * slots)
    if ragged:  # the last slot of some anchors is not there
        place = place[(place % slots < 2) | (place // slots % 3 == 0)]
    text = torch.randn(batch.input_ids.numel(), 2, 8), torch.randn(batch.input_ids.numel(), 2, 8)
    query, own = torch.randn(place.numel(), 4, 8), (torch.randn(place.numel(), 2, 8), torch.randn(place.numel(), 2, 8))
    attention = BlockAttention(layout_of(batch, None), count, inner, place if ragged else None)
    got = attention(query, own, text)
    documents = batch.document_ids.flatten()
    for i, flat in enumerate(place.tolist()):
        n, slot = divmod(flat, slots)
        anchor = int(batch.anchors[n])
        seen = [p for p in range(anchor // length * length, anchor + 1) if documents[p] == documents[anchor]]
        inside = [j for j, other in enumerate(place.tolist()) if other // slots == n and other % slots <= slot]
        keys, values = ([*(t[p] for p in seen), *(o[j] for j in inside)] for t, o in zip(text, own, strict=True))
        torch.testing.assert_close(got[i], naive(query[i], keys, values), rtol=1e-4, atol=1e-5)


def test_at_most_some_anchors_of_a_row() -> None:
    w = world()
    head = make_head("dflash", w.spec, num_draft_tokens=2, num_layers=1, max_anchors=5)
    batch = draft_batch(w, head, token_batch([16, 9, 4], [(4, 16), (5, 9), (0, 0)]))
    sample = choose_anchors(batch, 5)
    assert sample is not None
    chosen, share = sample
    rows = batch.anchors[chosen] // 16
    assert rows.tolist() == [0] * 5 + [1] * 4 and chosen.tolist() == sorted(set(chosen.tolist()))
    torch.testing.assert_close(share, torch.tensor([12 / 5] * 5 + [1.0] * 4))
    assert choose_anchors(batch, 12) is None
    hidden = {tuple(head.train()(batch, w.embed, w.unembed)[0].chosen.tolist()) for _ in range(4)}  # type: ignore[union-attr]
    assert len(hidden) > 1
    assert head.eval()(batch, w.embed, w.unembed)[0].chosen is None


def test_the_loss_of_a_sample_is_that_of_all_anchors_on_average() -> None:
    torch.manual_seed(0)
    w = world()
    head = make_head("dflash", w.spec, num_draft_tokens=2, num_layers=1, max_anchors=3)
    batch = draft_batch(w, head, token_batch([10, 8], [(4, 10), (5, 8)]))
    objective, teacher = Objective(LossConfig()), Teacher(w.unembed, w.unembed, None)
    whole = objective(head.eval()(batch, w.embed, w.unembed), batch, teacher).loss_sum.item()
    with torch.no_grad():
        losses = [
            objective(head.train()(batch, w.embed, w.unembed), batch, teacher).loss_sum.item() for _ in range(150)
        ]
    mean, spread = torch.tensor(losses).mean().item(), torch.tensor(losses).std().item()
    assert spread > 0 and abs(mean - whole) < 4 * spread / 150**0.5


def test_deeper_slots_train_from_fewer_anchors_each_among_those_before() -> None:
    torch.manual_seed(0)
    w = world()
    head = make_head("peagle", w.spec, num_draft_tokens=4, num_layers=2, keep_ratio=0.5, keep_floor=0.2).train()
    assert isinstance(head, PEagleHead)
    batch = draft_batch(w, head, token_batch([24, 9], [(4, 24), (3, 9)]))
    steps = head(batch, w.embed, w.unembed)
    count = batch.anchors.numel()
    assert [step.hidden.shape[0] for step in steps] == [round(count * share) for share in (1, 0.5, 0.25, 0.2)]
    sets = [set(range(count)) if step.chosen is None else set(step.chosen.tolist()) for step in steps]
    assert all(deeper < wider for wider, deeper in pairwise(sets))
    assert all(step.share is None or step.share.sum().item() == pytest.approx(count) for step in steps)
    whole = head.eval()(batch, w.embed, w.unembed)
    for step, every in zip(steps, whole, strict=True):  # what is drafted does not depend on what else is
        torch.testing.assert_close(step.hidden, every.hidden if step.chosen is None else every.hidden[step.chosen])


def context_of(w: World, head: ParallelHead) -> tuple[Any, DraftContext]:
    """A state and what was committed: five tokens and the root."""
    ids = token_batch([6], [(0, 0)]).input_ids
    columns = torch.arange(6)[None]
    tokens = TokenBatch(ids, columns >= 0, columns >= 0, columns, columns * 0, torch.zeros(1, dtype=torch.int64))
    features = w.features(tokens, len(head.features().aux_layers)).select(torch.arange(5))
    return head.init_state(32, DraftTree.chain(3), w.unembed), DraftContext(ids[:, 1:], features, 0)


@pytest.mark.parametrize("rank", [0, 5])
def test_best_first_trees_are_the_likeliest_paths(rank: int) -> None:
    """All candidates by hand; depths that depend on each other continue the five best paths of a level (the beam)."""
    w = world()
    head = make_head(
        "dflash", w.spec, num_draft_tokens=3, num_layers=1, markov_rank=rank, draft_vocab_size=5, anchor_predicts=True
    ).eval()
    assert isinstance(head, DFlashHead) and head.vocab is not None
    state, context = context_of(w, head)
    with torch.no_grad():
        (hidden,) = head.draft_blocks([state], [context], w.embed)
        raw = hidden @ w.unembed.weight[head.vocab.draft_token_ids()].T
        grown = head.grow(state, context, w.embed, TreeGrowth(depth=3, top_k=5, total_tokens=12))
    ids = head.vocab.draft_token_ids().tolist()
    beam: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    pool: list[tuple[float, tuple[int, ...]]] = []
    for k in range(3):
        level = []
        for score, path in beam:
            logits = raw[k]
            if head.markov is not None:
                last = path[-1] if path else int(context.next_tokens[0, -1])
                logits = logits + (head.markov.bias.weight @ head.markov.previous.weight[last]).detach()
            level += [(score + value, (*path, ids[i])) for i, value in enumerate(logits.log_softmax(-1).tolist())]
        pool += level
        beam = sorted(level, reverse=True)[:5] if rank else level
    expected = {path for _, path in sorted(pool, reverse=True)[:12]}
    rows, found = grown.tree.parent_rows().tolist(), [()]
    for token, parent in zip(grown.tokens[0].tolist(), rows[1:], strict=True):
        found.append((*found[parent], token))  # type: ignore[arg-type]
    assert set(found[1:]) == expected


def test_confidence_is_of_the_drafted_chain() -> None:
    w = world()
    head = make_head("dflash", w.spec, num_draft_tokens=3, **CASES["dspark"][1]).eval()
    assert isinstance(head, DFlashHead) and head.markov is not None and head.confidence is not None
    state, context = context_of(w, head)
    with torch.no_grad():
        (hidden,) = head.draft_blocks([state], [context], w.embed)
        proposal = head.propose(state, context, w.embed, DraftTree.chain(3))
        before = torch.cat([context.next_tokens[0, -1:], proposal.tokens[0, :2]])
        expected = head.confidence(torch.cat([hidden, head.markov.previous(before)], -1))[:, 0].sigmoid()
    assert proposal.confidence is not None
    torch.testing.assert_close(proposal.confidence, expected)
    tree = head.propose(state, context, w.embed, DraftTree.from_paths([[0], [1]]))
    assert tree.confidence is None


def test_a_chain_is_cut_where_confidence_in_it_ends() -> None:
    tokens, probs = torch.tensor([[7, 8, 9]]), torch.rand(3, 11)
    proposal = Proposal(tokens, DraftTree.chain(3), probs, None, torch.tensor([0.9, 0.5, 0.99]))
    assert proposal.cut(0.4) is proposal  # 0.9, 0.45, 0.4455
    two = proposal.cut(0.446)
    assert two is not None and two.tokens.tolist() == [[7, 8]] and two.tree == DraftTree.chain(2)
    assert two.probs is not None and torch.equal(two.probs, probs[:2])
    one = proposal.cut(0.5)
    assert one is not None and len(one.tree) == 1
    assert proposal.cut(0.95) is None
    late = Proposal(tokens, DraftTree.chain(3), None, None, torch.tensor([0.1, 1.0, 1.0]))
    assert late.cut(0.2) is None
    plain = Proposal(tokens, DraftTree.chain(3))
    assert plain.cut(0.9) is plain


@pytest.mark.parametrize(
    ("kind", "settings", "key"),
    [
        ("dflash", {"num_layers": 0}, "head.num_layers"),
        ("dflash", {"markov_rank": -1}, "head.markov_rank"),
        ("dflash", {"max_anchors": 0}, "head.max_anchors"),
        ("dflash", {"aux_layers": [1, 1]}, "head.aux_layers"),
        ("dflash", {"aux_layers": [9]}, "head.aux_layers"),
        ("dflash", {"mask_token_id": 97}, "head.mask_token_id"),
        ("peagle", {"num_draft_tokens": 1}, "head.num_draft_tokens"),
        ("peagle", {"keep_ratio": 0.0}, "head.keep_ratio"),
        ("peagle", {"layer_init": "x"}, "head.layer_init"),
        ("eagle3", {"keep_ratio": 1.5}, "head.keep_ratio"),
        ("eagle3", {"keep_ratio": 0.5, "unroll_steps": 1}, "head.keep_ratio"),
    ],
)
def test_bad_settings_name_their_key(kind: str, settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        head_config(kind, settings).build(SPEC)
    assert str(error.value).startswith(f"{key}: ") and "got" in str(error.value)


def test_the_term_confidence_and_its_head_need_each_other() -> None:
    with pytest.raises(ConfigError, match=r"^head\.confidence_head: .* use loss=dspark$"):
        head_config("dflash", {"confidence_head": True}).check_terms({"soft_ce": 1.0})
    with pytest.raises(ConfigError, match=r"^loss\.terms\.confidence: .*got head\.kind eagle3"):
        head_config("eagle3", {}).check_terms({"soft_ce": 1.0, "confidence": 1.0})
    head_config("dflash", {"confidence_head": True}).check_terms({"soft_ce": 1.0, "confidence": 1.0})
