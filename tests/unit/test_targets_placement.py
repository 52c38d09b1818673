"""Targets spread over devices by accelerate, or with fewer bits: the same text, and one line where it cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import is_bitsandbytes_available

from specdraft.core.errors import ConfigError
from specdraft.core.tree import DraftTree
from specdraft.core.types import FeatureRequest
from specdraft.decode.draft_model import DraftModelProposer
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.proposers import HeadProposer
from specdraft.eval.lossless import check_greedy
from specdraft.heads.storage import check_head_matches
from specdraft.targets._config import TargetConfig
from specdraft.targets.check import token_batch
from specdraft.targets.first_layers import first_layers
from specdraft.targets.hf import HFTarget, load_target
from specdraft.targets.placement import is_dispatched
from tests.decode.oracle import prompt_ids
from tests.support import make_head
from tests.tiny import tiny_models, tiny_tokenizer

PROMPTS = [prompt_ids(length, seed=length) for length in (9, 4, 30)]
TREE = DraftTree.from_paths([[0], [1], [0, 0], [1, 0]])
KINDS = ("llama", "gemma3", "mistral")
SPLIT = {
    "model.embed_tokens": "cpu",
    "model.rotary_emb": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.layers.2": "disk",
    "model.layers.3": "cpu",
    "model.norm": "cpu",
    "lm_head": "cpu",
}
OFFLOADED = {"model": "disk", "lm_head": "cpu"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for kind in KINDS:
        found[kind] = tmp_path_factory.mktemp("targets") / kind
        tiny_models[kind](tie_word_embeddings=False).save_pretrained(found[kind])
        tiny_tokenizer().save_pretrained(found[kind])
    return found


def load(folder: Path, **settings: Any) -> HFTarget:
    return load_target(TargetConfig(name=str(folder), **settings))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device_map", [SPLIT, OFFLOADED], ids=["split", "offloaded"])
def test_a_dispatched_target_writes_the_same(folders: dict[str, Path], kind: str, device_map: dict[str, str]) -> None:
    whole = load(folders[kind], device="cpu", pack_weights=False)
    spread = load(folders[kind], device_map=device_map)
    assert any(parameter.is_meta for parameter in spread.model.parameters())
    assert is_dispatched(spread.model)
    assert not is_dispatched(whole.model)
    assert spread.spec == whole.spec
    head = make_head("eagle3", whole.spec, num_draft_tokens=2).eval()
    check_head_matches(head, spread.spec)
    wanted = SpeculativeDecoder(whole).generate_batch(PROMPTS, 12, ignore_eos=True)
    assert len({token for row in wanted for token in row.tokens}) > 5
    for proposer in (
        None,
        HeadProposer(head, spread, TREE),
        DraftModelProposer(first_layers(spread, 2), whole.spec.vocab_size, DraftTree.chain(3)),
    ):
        decoder = SpeculativeDecoder(spread, proposer)
        assert [decoder.generate(p, 12, ignore_eos=True).tokens for p in PROMPTS] == [row.tokens for row in wanted]
        rows = decoder.generate_batch(PROMPTS, 12, ignore_eos=True)
        assert [row.tokens for row in rows] == [row.tokens for row in wanted]
    draft = first_layers(whole, 2).capture(token_batch(torch.tensor([PROMPTS[0]]))).last_hidden
    found = first_layers(spread, 2).capture(token_batch(torch.tensor([PROMPTS[0]]))).last_hidden
    torch.testing.assert_close(found, draft)
    request = FeatureRequest((0, 2, 4))
    batch = token_batch(torch.tensor([PROMPTS[0]]))
    torch.testing.assert_close(spread.capture(batch, request).aux_hidden, whole.capture(batch, request).aux_hidden)


def test_packing_leaves_a_dispatched_target_alone(folders: dict[str, Path]) -> None:
    spread = load(folders["llama"], device_map=SPLIT)
    forwards = {name: module.__dict__.get("forward") for name, module in spread.model.named_modules()}
    spread.pack()
    assert spread.packed is None
    assert spread.fast_layers is None
    assert {name: module.__dict__.get("forward") for name, module in spread.model.named_modules()} == forwards
    assert spread.last_layer() is None


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}])
def test_one_device_is_packed_as_ever(folders: dict[str, Path], device_map: Any) -> None:
    if device_map == "auto" and torch.cuda.is_available():
        pytest.skip("auto takes the accelerator here")
    target = load(folders["llama"], device_map=device_map)
    assert not is_dispatched(target.model)
    assert target.fast_layers is not None
    assert len(target.fast_layers) == 4
    wanted = SpeculativeDecoder(load(folders["llama"], device="cpu", pack_weights=False)).generate(PROMPTS[0], 12)
    assert SpeculativeDecoder(target).generate(PROMPTS[0], 12).tokens == wanted.tokens


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device_map": "everywhere"}, r"target.device_map: needs auto, balanced, .*, got 'everywhere'; use e.g. auto"),
        ({"device_map": {}}, r"target.device_map: needs auto, .*, got \{\}"),
        ({"device_map": {"model": None}}, r"target.device_map: needs auto, .*, got \{'model': None\}"),
        ({"device_map": "auto", "device": "cpu"}, r"target.device_map: contradicts target.device=cpu, got 'auto'"),
        ({"quantization": "int2"}, r"target.quantization: unknown, got 'int2'; use one of none, int8, int4"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TargetConfig(**settings)


def test_maps_that_do_not_fit(folders: dict[str, Path]) -> None:
    with pytest.raises(
        ConfigError, match=r"^target.device_map: not usable here \(.+\), got \{'': 'cuda:77'\}; name devices"
    ):
        load(folders["llama"], device_map={"": "cuda:77"})
    with pytest.raises(ConfigError, match=r"target.device_map: the lm_head must stay in memory, got it offloaded"):
        load(folders["llama"], device_map={"model": "cpu", "lm_head": "disk"})


@pytest.mark.skipif(is_bitsandbytes_available(), reason="bitsandbytes is installed")
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_fewer_bits_need_bitsandbytes(folders: dict[str, Path], bits: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"target.quantization: needs the package bitsandbytes, got {bits} without it"
    ):
        load(folders["llama"], quantization=bits)


@pytest.mark.skipif(not is_bitsandbytes_available(), reason="bitsandbytes is not installed")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_fewer_bits(tmp_path: Path, bits: str) -> None:
    """The quantised target is its own reference; heads of the whole one fit it."""
    # The kernels work on blocks of 64 weights.
    tiny_models["llama"](hidden_size=64, intermediate_size=128, tie_word_embeddings=False).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    whole = load(tmp_path, device="cpu")
    target = load(tmp_path, quantization=bits)
    kinds = {type(module).__name__ for module in target.layout.layers.modules()}
    assert {"int8": "Linear8bitLt", "int4": "Linear4bit"}[bits] in kinds
    assert target.spec == whole.spec
    head = make_head("eagle3", whole.spec, num_draft_tokens=2).eval().to(target.device)
    texts = [SpeculativeDecoder(target).generate(p, 12, ignore_eos=True).tokens for p in PROMPTS]
    decoder = SpeculativeDecoder(target, HeadProposer(head, target, TREE))
    found = check_greedy(decoder, PROMPTS, texts)
    # int8 rounds activations, which makes near ties wider than those of the dtype.
    assert all(one.margin < 0.5 for one in found.differences)
    assert bits == "int8" or found.identical == len(PROMPTS)
