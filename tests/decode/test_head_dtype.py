"""Heads of another dtype than the target's, and frozen heads with packed weights: the text stays the target's own."""

from __future__ import annotations

import pytest
import torch

from specdraft.core.tree import DraftTree
from specdraft.core.types import DraftContext
from specdraft.decode._config import DecodeConfig
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.proposers import HeadProposer, head_dtype
from specdraft.heads.base import DraftHead, head_config, head_kinds
from specdraft.targets.hf import HFTarget
from tests.decode.probes import one_row
from tests.tiny import tiny_target

PROMPT = [1, 5, 9, 13, 17, 21]
TREE = DraftTree.from_paths([[0], [1], [0, 0], [0, 1]])


def make_head(target: HFTarget, kind: str, draft_vocab_size: int | None) -> DraftHead:
    torch.manual_seed(0)
    settings = {"num_draft_tokens": 2, "draft_vocab_size": draft_vocab_size}
    head = head_config(kind, settings).build(target.spec)
    if head.vocab is not None:
        head.vocab.set_tokens(range(0, 2 * head.vocab.d2t.numel(), 2))
    head.init_from_target(target.embed, target.unembedding)
    head.init_layer(target.last_layer())
    return head.eval()


@pytest.mark.parametrize("draft_vocab_size", [None, 40])
@pytest.mark.parametrize("kind", head_kinds())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_head_drafts_what_a_plain_one_drafts(
    kind: str, dtype: torch.dtype, draft_vocab_size: int | None
) -> None:
    target = tiny_target("llama")
    plain = SpeculativeDecoder(target).generate(PROMPT, 40, ignore_eos=True)
    drafts = []
    for frozen in (False, True):
        head = make_head(target, kind, draft_vocab_size).to(dtype).requires_grad_(not frozen)
        proposer = HeadProposer(head, target, TREE)
        assert SpeculativeDecoder(target, proposer).generate(PROMPT, 40, ignore_eos=True).tokens == plain.tokens
        drafts.append(torch.cat([draft(proposer, target, plain.tokens[:n]) for n in range(0, 40, 4)]))
    # bfloat16 kernels differ in the order of their sums, so a near-tie may fall the other way.
    same = (drafts[0] == drafts[1]).float().mean()
    assert same == 1.0 if dtype is torch.float32 else same > 0.8


def draft(proposer: HeadProposer, target: HFTarget, answer: list[int]) -> torch.Tensor:
    """What is drafted behind the prompt and a part of its answer."""
    ids = torch.tensor([[*PROMPT, *answer]])
    features = target.capture(one_row(ids[0, :-1].tolist()), proposer.features())
    with torch.inference_mode():
        proposal = proposer.propose(proposer.begin(64), DraftContext(ids[:, 1:], features, 0), 2)
    assert proposal is not None
    return proposal.tokens[0].clone()


@pytest.mark.parametrize("kind", head_kinds())
def test_a_new_proposer_takes_the_rows_in_the_heads_dtype(kind: str) -> None:
    """The rows kept for one dtype are not used for another."""
    target = tiny_target("llama")
    head = make_head(target, kind, 40).requires_grad_(False)
    for dtype in (torch.float32, torch.bfloat16):
        head = head.to(dtype)
        HeadProposer(head, target, TREE)
        assert head.draft_unembedding(target.unembedding).weight.dtype is dtype


def test_the_setting_names_a_dtype() -> None:
    target = tiny_target("llama")
    assert head_dtype(DecodeConfig(), target) is torch.float32
    assert head_dtype(DecodeConfig(head_dtype="bfloat16"), target) is torch.bfloat16


def test_proposers_of_one_head_share_its_rows_and_do_not_lose_them() -> None:
    target = tiny_target("llama")
    head = make_head(target, "medusa", 31).to(torch.bfloat16)
    proposer = HeadProposer(head, target)
    rows = proposer.begin(9).unembed
    assert rows.weight.dtype is torch.bfloat16
    assert HeadProposer(head, target).begin(9).unembed is rows
    head.draft_unembedding(target.unembedding.to(torch.bfloat16))
    assert proposer.begin(9).unembed.weight.dtype is torch.bfloat16
    decoder = SpeculativeDecoder(target, proposer)
    head.draft_unembedding(target.unembedding.to(torch.float64))
    assert decoder.generate([1, 2, 3], 6, ignore_eos=True).tokens == (
        SpeculativeDecoder(target).generate([1, 2, 3], 6, ignore_eos=True).tokens
    )
    assert head.vocab is not None
    head.vocab.set_tokens(range(40, 71))
    wanted = target.unembedding.weight[40:71].to(torch.bfloat16)
    assert torch.equal(HeadProposer(head, target).begin(9).unembed.weight, wanted)
    with torch.inference_mode():
        loaded = make_head(target, "medusa", 31)
        assert len(SpeculativeDecoder(target, HeadProposer(loaded, target)).generate([1, 2], 4).tokens) <= 4
