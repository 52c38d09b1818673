"""Rows decoded together get the text, the counts and the end they have alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdraft.core.errors import ConfigError, DataError, DecodeError
from specdraft.core.tree import DraftTree, Proposal, TreeGrowth
from specdraft.core.types import DraftContext, Features
from specdraft.decode._proposer_config import PromptLookupConfig
from specdraft.decode._sampling_config import SamplingConfig
from specdraft.decode.batch_cache import BatchCache, batch_masks
from specdraft.decode.draft_model import DraftModelProposer
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.plan import TreePlan
from specdraft.decode.prompt_lookup import PromptLookupProposer
from specdraft.decode.proposers import HeadProposer, Proposer
from specdraft.decode.result import BatchError
from specdraft.decode.sampling import RowRandom, WarpedSampler
from specdraft.heads.base import DraftHead, head_kinds
from specdraft.targets.first_layers import first_layers
from specdraft.targets.hf import HFTarget
from tests.decode.oracle import VOCAB, prompt_ids
from tests.decode.probes import one_row
from tests.decode.rows import LENGTHS, PROMPTS, TREE, alone, assert_same, family, knowing
from tests.support import make_head
from tests.tiny import tiny_target

CHAIN = DraftTree.chain(4)


@pytest.mark.parametrize(
    ("kind", "packed"),
    [(kind, False) for kind in ("llama", "mistral", "gemma2", "gemma3", "gpt_neox")]
    + [(kind, True) for kind in ("llama", "mistral", "qwen2_sliding")],
)
def test_rows_are_what_they_are_alone(kind: str, packed: bool) -> None:
    target = family(kind)
    if packed:
        target.pack()
    plain = SpeculativeDecoder(target)
    texts = alone(plain, ignore_eos=True)
    assert len({token for text in texts for token in text.tokens}) > 5, "texts of one token prove little"
    assert_same(plain.generate_batch(PROMPTS, LENGTHS, ignore_eos=True), texts)
    for trees in ([TREE], [CHAIN, None, TREE, DraftTree.chain(1)]):
        decoder = SpeculativeDecoder(target, knowing(target, list(trees)))
        single = alone(decoder, ignore_eos=True)
        assert [row.tokens for row in single] == [row.tokens for row in texts]
        assert sum(row.accepted_tokens for row in single) > 10
        for size in (None, 2) if len(trees) > 1 else (3,):
            assert_same(decoder.generate_batch(PROMPTS, LENGTHS, ignore_eos=True, max_batch_size=size), single)


def test_every_acceptance_length_occurs_beside_others() -> None:
    target = tiny_target("llama")
    result = SpeculativeDecoder(target, knowing(target, [CHAIN])).generate_batch(PROMPTS[:4], 30, ignore_eos=True)
    assert all(len(row.accepted_per_depth) == 4 for row in result)
    assert all(row.accepted_per_depth[3] > 0 and row.accepted_per_depth[0] < row.num_steps for row in result)


@pytest.mark.parametrize("name", [*head_kinds(), "draft_model", "prompt_lookup"])
def test_every_kind_of_proposer(name: str) -> None:
    target = tiny_target("llama")
    proposer: Proposer
    if name == "draft_model":
        proposer = DraftModelProposer(first_layers(target, 3), VOCAB, TREE)
    elif name == "prompt_lookup":
        proposer = PromptLookupProposer(PromptLookupConfig(max_matches=2), target.device)
    else:
        proposer = HeadProposer(make_head(name, target.spec, num_draft_tokens=3).eval(), target, TREE)
    decoder = SpeculativeDecoder(target, proposer)
    found = decoder.generate_batch(PROMPTS, LENGTHS, ignore_eos=True, max_batch_size=3)
    assert_same(found, alone(decoder, ignore_eos=True))
    assert sum(row.drafted_tokens for row in found) > 20


@pytest.mark.parametrize("shape", [DraftTree.chain(3), TREE, TreeGrowth(3, 4, 7)], ids=["chain", "tree", "grown"])
@pytest.mark.parametrize("drawn", [False, True], ids=["likeliest", "drawn"])
@pytest.mark.parametrize("kind", list(head_kinds()))
def test_rows_share_the_products_of_a_head(kind: str, drawn: bool, shape: DraftTree | TreeGrowth) -> None:
    target = tiny_target("llama")
    head = make_head(kind, target.spec, num_draft_tokens=3).eval()
    if isinstance(shape, TreeGrowth) and not head.grows:
        pytest.skip("drafts fixed trees only")
    decoder = SpeculativeDecoder(target, HeadProposer(head, target, shape))
    rows = [SamplingConfig(temperature=0.9, seed=seed) if drawn else SamplingConfig() for seed in range(len(PROMPTS))]
    calls: list[int] = []
    for module in head.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda *_: calls.append(1))
    single = [decoder.generate(p, 12, ignore_eos=True, sampling=own) for p, own in zip(PROMPTS, rows, strict=True)]
    alone_calls = len(calls)
    calls.clear()
    assert_same(decoder.generate_batch(PROMPTS, 12, ignore_eos=True, sampling=rows), single)
    assert sum(row.drafted_tokens for row in single) > 100
    if type(head).propose_batch is not DraftHead.propose_batch:
        assert 0 < len(calls) < alone_calls / 2


@pytest.mark.parametrize("shape", [TREE, TreeGrowth(3, 4, 7)], ids=["tree", "grown"])
@pytest.mark.parametrize("kind", list(head_kinds()))
def test_drafts_of_a_batch_are_those_of_its_rows(kind: str, shape: DraftTree | TreeGrowth) -> None:
    """Tokens, shapes and, where drawn, probabilities."""
    target = tiny_target("llama")
    head = make_head(kind, target.spec, num_draft_tokens=3).eval()
    if isinstance(shape, TreeGrowth) and not head.grows:
        pytest.skip("drafts fixed trees only")
    proposer = HeadProposer(head, target, shape)

    def contexts(sampled: bool) -> list[DraftContext]:
        found = []
        for row, prompt in enumerate(PROMPTS):
            features = target.capture(one_row(prompt), head.features())
            sampler = WarpedSampler(SamplingConfig(temperature=1.3), RowRandom(row, target.device)) if sampled else None
            ids = torch.tensor([[*prompt[1:], 3 + row]])
            found.append(DraftContext(ids, features, 0, [*prompt, 3 + row], sampler))
        return found

    for sampled in (False, True):
        depths = [3, 1, 3, 2, 3]
        single = [
            proposer.propose(proposer.begin(80), own, depth)
            for own, depth in zip(contexts(sampled), depths, strict=True)
        ]
        together = proposer.propose_batch([proposer.begin(80) for _ in PROMPTS], contexts(sampled), depths)
        for a, b in zip(together, single, strict=True):
            assert a is not None
            assert b is not None
            assert a.tokens.tolist() == b.tokens.tolist()
            assert a.tree.parent_rows().tolist() == b.tree.parent_rows().tolist()
            assert (a.probs is None) == (b.probs is None) == (not sampled or isinstance(shape, TreeGrowth))
            if a.probs is not None and b.probs is not None:
                torch.testing.assert_close(a.probs, b.probs)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "mistral"])
@pytest.mark.parametrize("drawn", [False, True], ids=["likeliest", "drawn"])
@pytest.mark.parametrize(
    "settings", [{}, {"min_probability": 0.12}, {"cost": 0.5}], ids=["fixed", "confident", "paced"]
)
def test_rows_share_the_forwards_of_a_draft_model(kind: str, drawn: bool, settings: dict[str, Any]) -> None:
    target = family(kind)
    model = first_layers(target, 3)
    decoder = SpeculativeDecoder(target, DraftModelProposer(model, VOCAB, CHAIN, **settings))
    rows = [SamplingConfig(temperature=0.9, seed=seed) if drawn else SamplingConfig() for seed in range(len(PROMPTS))]
    wanted = [
        decoder.generate(p, length, ignore_eos=True, sampling=own)
        for p, length, own in zip(PROMPTS, LENGTHS, rows, strict=True)
    ]
    calls: list[int] = []
    inner = model.forward_cached

    def spy(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(input_ids.shape[0])
        return inner(input_ids, *args, **kwargs)

    model.forward_cached = spy  # type: ignore[method-assign]
    for size in (None, 3):
        calls.clear()
        assert_same(
            decoder.generate_batch(PROMPTS, LENGTHS, ignore_eos=True, sampling=rows, max_batch_size=size), wanted
        )
        assert max(calls) == (size or 4)
    assert sum(row.accepted_tokens for row in wanted) > 10


def test_rows_end_for_reasons_of_their_own() -> None:
    target = tiny_target("llama", max_position_embeddings=72)
    plain = SpeculativeDecoder(target)
    text = plain.generate(PROMPTS[1], 30, ignore_eos=True).tokens
    wanted = [plain.generate(p, 20, [text[6]]) for p in PROMPTS]
    assert_same(plain.generate_batch(PROMPTS, 20, [text[6]]), wanted)
    decoder = SpeculativeDecoder(target, knowing(target, [CHAIN, None]))
    found = decoder.generate_batch(PROMPTS, 20, [text[6]])
    assert_same(found, [decoder.generate(p, 20, [text[6]]) for p in PROMPTS])
    assert [row.tokens for row in found] == [row.tokens for row in wanted]
    assert {row.finish_reason for row in found} == {"eos", "length", "context"}
    assert plain.generate_batch([], 5) == []


@pytest.mark.parametrize("verifier", ["auto", "point_mass"])
def test_drawn_rows_depend_on_their_seed_alone(verifier: str) -> None:
    target = tiny_target("llama")
    head = make_head("medusa", target.spec, num_draft_tokens=4).eval()
    rows = [
        SamplingConfig(temperature=1.0, seed=3, verifier=verifier),
        SamplingConfig(),
        SamplingConfig(temperature=0.7, top_p=0.9, seed=4, repetition_penalty=1.3, verifier=verifier),
        SamplingConfig(repetition_penalty=1.2),
        SamplingConfig(temperature=1.5, seed=2**40, verifier=verifier),
    ]
    for proposer in (None, HeadProposer(head, target, CHAIN)):
        decoder = SpeculativeDecoder(target, proposer)
        wanted = [decoder.generate(p, 20, sampling=s) for p, s in zip(PROMPTS, rows, strict=True)]
        assert_same(decoder.generate_batch(PROMPTS, 20, sampling=rows, max_batch_size=3), wanted)
        assert_same(decoder.generate_batch(PROMPTS[1:3], 20, sampling=rows[1:3]), wanted[1:3])
    one = SamplingConfig(temperature=1.0, seed=8)
    plain = SpeculativeDecoder(target)
    same = plain.generate_batch([PROMPTS[1]] * 3, 20, sampling=one)
    assert same[1].tokens == plain.generate(PROMPTS[1], 20, sampling=SamplingConfig(temperature=1.0, seed=9)).tokens
    assert len({tuple(row.tokens) for row in same}) == 3


def test_margins_are_those_of_single_rows() -> None:
    target = tiny_target("llama")
    decoder = SpeculativeDecoder(target, knowing(target, [TREE, None]))
    found = decoder.generate_batch(PROMPTS, LENGTHS, ignore_eos=True, trace=True)
    for row, single in zip(found, alone(decoder, ignore_eos=True, trace=True), strict=True):
        assert row.first_margins == pytest.approx(single.first_margins, rel=1e-3, abs=1e-4)


class Faulty:
    """A target whose states are NaN once a given token goes through it, for that row alone."""

    def __init__(self, target: HFTarget, token: int) -> None:
        self.target = target
        self.token = token

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def forward_cached(self, input_ids: torch.Tensor, *args: Any) -> Features:
        features = self.target.forward_cached(input_ids, *args)
        cache = args[3]
        bad = (input_ids == self.token).any(dim=1)
        features.last_hidden[bad] = torch.nan
        for tensor in cache.store.tensors.values():
            first, count = cache.store.slots
            tensor[:, first : first + count][:, bad] = torch.nan
        return features


@pytest.mark.parametrize("size", [None, 2, 1])
def test_a_row_that_fails_is_named_and_leaves_the_others_alone(size: int | None) -> None:
    target = tiny_target("llama")
    texts = alone(SpeculativeDecoder(target), ignore_eos=True)
    used = [{*p, *t.tokens[:-1]} for p, t in zip(PROMPTS, texts, strict=True)]
    for victim in (0, 2):
        others = set().union(*(tokens for row, tokens in enumerate(used) if row != victim))
        token = next(token for token in (*PROMPTS[victim], *texts[victim].tokens[4:-1]) if token not in others)
        decoder = SpeculativeDecoder(Faulty(target, token))  # type: ignore[arg-type]
        for _ in range(2):
            with pytest.raises(BatchError, match=rf"row {victim} of the batch: target: its logits are not") as caught:
                decoder.generate_batch(PROMPTS, LENGTHS, ignore_eos=True, max_batch_size=size)
            assert set(caught.value.errors) == {victim}
            results = caught.value.results
            failed = results.pop(victim)
            assert failed.finish_reason == ""
            assert failed.tokens == texts[victim].tokens[: len(failed.tokens)]
            assert_same(results, [text for row, text in enumerate(texts) if row != victim])
        assert isinstance(caught.value, DecodeError)


def test_memory_is_one_allocation_that_is_used_again() -> None:
    target = tiny_target("llama")
    decoder = SpeculativeDecoder(target, knowing(target, [TREE]))
    decoder.generate_batch(PROMPTS, LENGTHS, ignore_eos=True, max_batch_size=3)
    cache = decoder._idle_batch
    assert cache is not None
    assert (cache.num_slots, cache.lengths) == (3, [])
    places = [tensor.data_ptr() for tensor in cache.store.tensors.values()]
    size = cache.num_bytes
    assert size == 3 * cache.capacity * 2 * 4 * 2 * 8 * 4, "slots, columns, states, layers, heads, width, bytes"
    for count in (2, 3):
        decoder.generate_batch(PROMPTS * 3, 30, ignore_eos=True, max_batch_size=count)
        assert decoder._idle_batch is cache
        assert [tensor.data_ptr() for tensor in cache.store.tensors.values()] == places
        assert cache.num_bytes == size


def test_one_target_forward_and_one_copy_to_the_host_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    head = make_head("medusa", target.spec, num_draft_tokens=3).eval()
    decoder = SpeculativeDecoder(target, HeadProposer(head, target, TREE.truncate(3)))
    decoder.generate_batch(PROMPTS, 20, ignore_eos=True)
    copies, shapes = [0], []
    inner, forward = torch.Tensor.tolist, target.forward_cached

    def tolist(self: torch.Tensor) -> Any:
        copies[0] += 1
        return inner(self)

    def spy(input_ids: torch.Tensor, *args: Any) -> Features:
        shapes.append(input_ids.shape[0])
        return forward(input_ids, *args)

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    target.forward_cached = spy  # type: ignore[method-assign]
    found = decoder.generate_batch(PROMPTS, 20, ignore_eos=True)
    steps = max(row.num_steps for row in found)
    assert shapes[:6] == [1, 1, 1, 1, 1, 5]
    assert len(shapes) == len(PROMPTS) + steps
    # Two a prompt: its ids and its first token.
    assert copies[0] == 2 * len(PROMPTS) + steps


def test_a_batch_that_is_broken_off_leaves_nothing_behind() -> None:
    target = tiny_target("llama")
    wanted = alone(SpeculativeDecoder(target), ignore_eos=True)
    proposer = knowing(target, [TREE])
    decoder = SpeculativeDecoder(target, proposer)
    inner = proposer.propose
    calls = [0]

    def interrupted(*args: Any) -> Proposal | None:
        calls[0] += 1
        if calls[0] == 9:
            raise KeyboardInterrupt
        return inner(*args)

    proposer.propose = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        decoder.generate_batch(PROMPTS, LENGTHS, ignore_eos=True)
    assert decoder._idle_batch is None
    found = decoder.generate_batch(PROMPTS, LENGTHS, ignore_eos=True)
    assert [row.tokens for row in found] == [row.tokens for row in wanted]


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
def test_prompts_in_chunks(kind: str) -> None:
    target = family(kind)
    whole = knowing(target, [TREE, CHAIN])
    wanted = alone(SpeculativeDecoder(target, whole), ignore_eos=True)
    sizes: list[int] = []
    forward = target.forward_cached

    def spy(input_ids: torch.Tensor, *args: Any) -> Features:
        sizes.append(input_ids.shape[1])
        return forward(input_ids, *args)

    target.forward_cached = spy  # type: ignore[method-assign]
    decoder = SpeculativeDecoder(target, whole, prefill_chunk=9)
    assert_same(alone(decoder, ignore_eos=True), wanted)
    assert_same(decoder.generate_batch(PROMPTS, LENGTHS, ignore_eos=True), wanted)
    assert max(sizes) == 9
    with pytest.raises(ConfigError, match=r"prefill_chunk: must be at least 1 or None, got 0"):
        SpeculativeDecoder(target, prefill_chunk=0)


def test_bad_rows_are_refused_before_anything_is_decoded() -> None:
    decoder = SpeculativeDecoder(tiny_target("llama"))
    with pytest.raises(DataError, match=r"prompts\[1\]: must hold at least one token, got none"):
        decoder.generate_batch([[5], []], 5)
    with pytest.raises(DataError, match=r"prompts\[0\]: leaves no room in a context of 256 tokens, got 256"):
        decoder.generate_batch([prompt_ids(256)], 5)
    with pytest.raises(ConfigError, match=r"one entry a prompt, got 1 and 2 for 2 prompts"):
        decoder.generate_batch([[5], [6]], [5])
    with pytest.raises(ConfigError, match=r"decode.max_new_tokens: must be at least 1, got 0"):
        decoder.generate_batch([[5], [6]], [5, 0])
    with pytest.raises(ConfigError, match=r"max_batch_size: must be at least 1 or None, got 0"):
        decoder.generate_batch([[5], [6]], 5, max_batch_size=0)


@pytest.mark.parametrize("window", [None, 4])
def test_masks_are_those_of_single_rows(window: int | None) -> None:
    plan = TreePlan(TREE, 16, window, True, torch.device("cpu"))
    lengths = torch.tensor([2, 9, 5])
    full, sliding = batch_masks(lengths, 9, plan.depths.expand(3, -1), plan.ancestors.expand(3, -1, -1), window)
    for masks, kind in ((full, 0), (sliding, 1)):
        for row, length in enumerate(lengths.tolist()):
            single = plan.masks(length)[kind]
            if single is None:
                assert masks is None
                continue
            assert masks is not None
            assert masks[row, :, :, :length].equal(single[0, :, :, :length])
            assert not masks[row, :, :, length:9].any()
            assert masks[row, :, :, 9:].equal(single[0, :, :, length:])


def test_cache_moves_what_rows_keep_to_their_own_ends() -> None:
    cache = BatchCache(1, 16, 3)
    keys = torch.arange(4.0)[None, None, :, None].expand(1, 2, -1, 3)
    for row, length in enumerate((1, 4, 2)):
        cache.open_slot()
        cache.update(10 * row + keys[:, :, :length], -keys[:, :, :length], 0)
        cache.commit(range(length))
        cache.close_slot()
    assert cache.open_rows() == 4
    new = (100 * torch.arange(3.0)[:, None, None, None] + torch.arange(50.0, 54.0)[:, None]).expand(3, 2, 4, 3)
    seen, _ = cache.update(new, new, 0)
    assert seen.shape == (3, 2, 8, 3)
    cache.commit_rows([[0, 2, 3], [0], []])
    assert cache.lengths == [4, 5, 2]
    assert seen[0, 1, :4, 2].tolist() == [0, 50, 52, 53]
    assert seen[1, 1, :5, 2].tolist() == [10, 11, 12, 13, 150]
    assert seen[2, 1, :2, 2].tolist() == [20, 21]
    cache.remove(0)
    assert cache.lengths == [2, 5]
    assert seen[0, 1, :2, 2].tolist() == [20, 21]
    cache.wipe(1)
    assert not seen[1].any()
