"""``generate`` in the way of transformers: the same ids for the same call, and a refusal for what cannot be said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from specdraft.core.errors import ConfigError, DataError, SpecDraftError
from specdraft.core.tree import DraftTree
from specdraft.decode._proposer_config import PromptLookupConfig
from specdraft.decode._sampling_config import SamplingConfig
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.generation_config import DEFAULTS, MAPPED, WITHOUT_EFFECT
from specdraft.decode.prompt_lookup import PromptLookupProposer
from specdraft.decode.proposers import HeadProposer
from specdraft.decode.transformers_api import SpeculativeModel, SpeculativeOutput
from specdraft.targets.hf import HFTarget
from tests.decode.oracle import prompt_ids
from tests.support import make_head
from tests.tiny import tiny_models, tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`:UserWarning")
LENGTHS = (3, 11, 1, 7)
TREE = DraftTree.from_paths([[0], [1], [0, 0], [1, 0]])


@pytest.fixture(scope="module")
def target() -> HFTarget:
    """Its greedy texts repeat themselves now and then and meet the tokens that end them."""
    return HFTarget.from_model(tiny_models["llama"](initializer_range=0.14), tiny_tokenizer())


@pytest.fixture(scope="module")
def ours(target: HFTarget) -> SpeculativeModel:
    return SpeculativeModel(
        SpeculativeDecoder(target, PromptLookupProposer(PromptLookupConfig(), target.device), target.tokenizer)
    )


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    """Rows of different lengths, padded on the left."""
    width = max(LENGTHS)
    rows = [prompt_ids(length, seed=length) for length in LENGTHS]
    return {
        "input_ids": torch.tensor([[0] * (width - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }


CALLS: dict[str, dict[str, Any]] = {
    "default": {},
    "long": {"max_new_tokens": 40},
    "max_length": {"max_length": 30},
    "no_eos": {"max_new_tokens": 30, "eos_token_id": None, "pad_token_id": 0},
    "eos_list": {"max_new_tokens": 40, "eos_token_id": [2, 41, 88]},
    "eos_tensor": {"max_new_tokens": 40, "eos_token_id": torch.tensor([13, 70])},
    "penalty": {"max_new_tokens": 40, "repetition_penalty": 1.4, "eos_token_id": list(range(80, 97))},
    "least": {"max_new_tokens": 30, "min_new_tokens": 8, "eos_token_id": list(range(2, 60))},
    "min_length": {"max_new_tokens": 30, "min_length": 15, "eos_token_id": list(range(2, 60))},
    "bad_words": {"max_new_tokens": 30, "bad_words_ids": [[i] for i in range(2, 40)] + [[50, 61], [61, 50]]},
    "suppressed": {"max_new_tokens": 30, "suppress_tokens": list(range(2, 40))},
    "biased": {"max_new_tokens": 30, "sequence_bias": {(9,): 4.5, (30,): -1.5, (31, 32): float("-inf")}},
    "biased_list": {"max_new_tokens": 30, "sequence_bias": [[[9], 4.5], [[30], -1.5]]},
    "inert": {
        "max_new_tokens": 9,
        "num_beams": 1,
        "top_k": 50,
        "temperature": 1.0,
        "use_cache": True,
        "bos_token_id": 3,
    },
}


@pytest.mark.parametrize("name", list(CALLS))
@pytest.mark.parametrize("as_config", [False, True], ids=["by_name", "as_config"])
def test_greedy_ids_are_those_of_the_model(
    target: HFTarget, ours: SpeculativeModel, batch: dict[str, torch.Tensor], name: str, as_config: bool
) -> None:
    call: dict[str, Any] = dict(CALLS[name])
    if as_config:
        call = {"generation_config": GenerationConfig(**{k: v for k, v in call.items() if k != "top_k"})}
    wanted = target.model.generate(**batch, **call)
    found = ours.generate(**batch, **call)
    assert isinstance(found, torch.Tensor)
    assert found.tolist() == wanted.tolist()
    assert found.dtype == wanted.dtype
    for i, length in enumerate(LENGTHS):
        row = batch["input_ids"][i : i + 1, -length:]
        if name not in ("max_length", "min_length"):
            assert ours.generate(row, **call).tolist() == target.model.generate(row, **call).tolist()  # type: ignore[union-attr]


def test_calls_of_the_test_do_something(target: HFTarget, batch: dict[str, torch.Tensor]) -> None:
    texts = {name: target.model.generate(**batch, **call)[:, max(LENGTHS) :].tolist() for name, call in CALLS.items()}
    for name in ("penalty", "bad_words", "suppressed", "biased", "eos_list", "eos_tensor"):
        assert texts[name] != texts["long"], name
    assert texts["least"] != texts["min_length"]
    assert any(row[-1] == 0 and row[0] != 0 for row in texts["eos_list"]), "a row ends before the others"


def test_padding_is_found_without_a_mask(
    target: HFTarget, ours: SpeculativeModel, batch: dict[str, torch.Tensor]
) -> None:
    ids = batch["input_ids"]
    assert ours.generate(inputs=ids, max_new_tokens=9).tolist() == target.model.generate(ids, max_new_tokens=9).tolist()  # type: ignore[union-attr]


def test_a_config_fills_in_for_the_call(target: HFTarget, batch: dict[str, torch.Tensor]) -> None:
    """What a model ships is in use, and not in the way: its sampling settings rest while decoding is greedy."""
    shipped = GenerationConfig(
        do_sample=True, temperature=0.6, top_p=0.9, repetition_penalty=1.3, eos_token_id=[2, 60], pad_token_id=0
    )
    before = target.model.generation_config
    target.model.generation_config = shipped
    try:
        model = SpeculativeModel(SpeculativeDecoder(target))
        call = {"max_new_tokens": 20, "do_sample": False}
        assert model.generate(**batch, **call).tolist() == target.model.generate(**batch, **call).tolist()  # type: ignore[union-attr]
        drawn = model.generate(**batch, max_new_tokens=20, seed=5, return_dict_in_generate=True)
        assert isinstance(drawn, SpeculativeOutput)
        settings = SamplingConfig(temperature=0.6, top_k=50, top_p=0.9, repetition_penalty=1.3, seed=6)
        alone = model.decoder.generate(prompt_ids(11, seed=11), 20, [2, 60], sampling=settings)
        assert drawn.results is not None
        assert drawn.results[1].tokens == alone.tokens
    finally:
        target.model.generation_config = before


def test_seeds(ours: SpeculativeModel) -> None:
    ids = torch.tensor([prompt_ids(5)])

    def draw(**options: Any) -> list[list[int]]:
        return ours.generate(ids, do_sample=True, temperature=1.5, max_new_tokens=12, **options).tolist()  # type: ignore[no-any-return, union-attr]

    assert draw(seed=3) == draw(seed=3) != draw(seed=4)
    torch.manual_seed(7)
    first, second = draw(), draw()
    assert first != second
    torch.manual_seed(7)
    assert draw() == first
    assert draw(generator=torch.Generator().manual_seed(1)) == draw(generator=torch.Generator().manual_seed(1))
    three = draw(seed=3, num_return_sequences=3)
    assert [three[0], three[1]] == [draw(seed=3)[0], draw(seed=4)[0]]
    plain = ours.decoder.generate(ids, 12, [2], sampling=SamplingConfig(temperature=1.5, top_k=50, seed=3))
    assert three[0][5:] == plain.tokens + [0] * (len(three[0]) - 5 - len(plain.tokens))
    off = SamplingConfig(temperature=1.5, seed=3)
    assert draw(seed=3, top_k=None)[0][5:] == ours.decoder.generate(ids, 12, [2], sampling=off).tokens


def test_results_and_stop_strings(target: HFTarget, batch: dict[str, torch.Tensor]) -> None:
    head = make_head("medusa", target.spec, num_draft_tokens=2).eval()
    model = SpeculativeModel(SpeculativeDecoder(target, HeadProposer(head, target, TREE)))
    plain = target.model.generate(**batch, max_new_tokens=24)
    text = target.tokenizer.decode(plain[1, 11 + 4 : 11 + 6])  # type: ignore[union-attr]
    out = model.generate(
        **batch, max_new_tokens=24, stop_strings=text, tokenizer=target.tokenizer, return_dict_in_generate=True
    )
    assert isinstance(out, SpeculativeOutput)
    assert out.sequences is not None
    assert out.results is not None
    assert out["sequences"] is out.sequences
    assert out.results[1].finish_reason == "stop"
    assert out.results[1].tokens == plain[1, 11 : 11 + len(out.results[1].tokens)].tolist()
    assert text in target.tokenizer.decode(out.results[1].tokens)  # type: ignore[union-attr]
    assert sum(result.drafted_tokens for result in out.results) > 0


class Noting(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.pieces.append(value.reshape(-1).tolist())

    def end(self) -> None:
        self.ended = True


def test_streamer(target: HFTarget, ours: SpeculativeModel, batch: dict[str, torch.Tensor]) -> None:
    ids, streamer = torch.tensor([prompt_ids(6)]), Noting()
    out = ours.generate(ids, max_new_tokens=20, streamer=streamer)
    assert isinstance(out, torch.Tensor)
    assert out.tolist() == target.model.generate(ids, max_new_tokens=20).tolist()
    assert streamer.pieces[0] == ids[0].tolist()
    assert [token for piece in streamer.pieces for token in piece] == out[0].tolist()
    assert streamer.ended
    with pytest.raises(ConfigError, match=r"generate.streamer: streams one text, got 4; use stream_batch"):
        ours.generate(**batch, streamer=Noting())


REFUSED: dict[str, Any] = {
    "num_beams": 2,
    "penalty_alpha": 0.6,
    "guidance_scale": 1.5,
    "no_repeat_ngram_size": 2,
    "typical_p": 0.9,
    "epsilon_cutoff": 0.1,
    "watermarking_config": {"bias": 2.0},
    "prompt_lookup_num_tokens": 3,
    "forced_eos_token_id": 2,
    "exponential_decay_length_penalty": (3, 1.1),
    "begin_suppress_tokens": [4],
    "output_scores": True,
    "output_hidden_states": True,
    "cache_implementation": "quantized",
    "use_cache": False,
    "max_time": 1.0,
    "remove_invalid_values": True,
    "dola_layers": "low",
    "past_key_values": object(),
    "temprature": 0.5,
    "logits_processor": LogitsProcessorList([lambda ids, scores: scores]),
    "stopping_criteria": [lambda ids, scores: True],
    "assistant_model": object(),
    "prefix_allowed_tokens_fn": lambda row, ids: [3],
    "inputs_embeds": torch.ones(1, 2, 32),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_has_no_counterpart_is_refused(ours: SpeculativeModel, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^generate\.{name}: cannot be used with drafts, got .+; \w+"):
        ours.generate(torch.tensor([[5, 6]]), **{name: REFUSED[name]})


def test_every_field_is_mapped_inert_or_refused(ours: SpeculativeModel) -> None:
    """Whatever fields a release of transformers has: none is passed over."""
    fields = [name for name in vars(GenerationConfig()) if not name.startswith("_") and name != "transformers_version"]
    assert len(fields) > 50
    assert set(DEFAULTS) >= {"temperature", "num_beams"}
    for name in set(fields) - MAPPED - WITHOUT_EFFECT:
        config = GenerationConfig()
        setattr(config, name, 0.123)
        with pytest.raises(ConfigError, match=rf"^generate\.{name}: cannot be used with drafts, got 0.123"):
            ours.generate(torch.tensor([[5, 6]]), config)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"temperature": 0.5}, r"generate.temperature: has no effect without do_sample, got 0.5; set do_sample=True"),
        ({"top_p": 0.5}, r"generate.top_p: has no effect without do_sample, got 0.5"),
        ({"do_sample": True, "temperature": 0.0}, r"generate.temperature: must be above 0 with do_sample, got 0"),
        ({"num_return_sequences": 2}, r"generate.num_return_sequences: needs do_sample and at least 1, got 2"),
        ({"sequence_bias": {(3, 4): 1.0}}, r"generate.sequence_bias: only single tokens .*, got \[3, 4\]"),
        ({"max_length": 2}, r"generate.max_length: leaves no room behind a prompt of 2 tokens, got 2"),
        ({"max_new_tokens": 0}, r"decode.max_new_tokens: must be at least 1, got 0"),
        ({"repetition_penalty": -1.0}, r"sampling.repetition_penalty: must lie above 0 and at most 100, got -1.0"),
        ({"bad_words_ids": [[97]]}, r"sampling.bad_words: the target has 97 tokens, got 97"),
        ({"attention_mask": torch.tensor([[1, 0]])}, r"attention_mask\[0\]: padding must lie on the left"),
        ({"attention_mask": torch.tensor([[0, 0]])}, r"input_ids\[0\]: must hold at least one token, got padding only"),
        (
            {"attention_mask": torch.tensor([[1]])},
            r"attention_mask: must have the shape of input_ids \[1, 2\], got \[1, 1\]",
        ),
        ({"inputs": torch.tensor([[5]])}, r"input_ids: must be given once, got it and inputs"),
    ],
)
def test_bad_calls(ours: SpeculativeModel, call: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecDraftError, match=message):
        ours.generate(torch.tensor([[5, 6]]), **call)


def test_bad_ids(ours: SpeculativeModel, target: HFTarget) -> None:
    with pytest.raises(DataError, match=r"input_ids: must be given once, got none"):
        ours.generate()
    for ids, got in (
        (torch.ones(1, 2), "shape"),
        (torch.tensor([5]), "shape"),
        ([[5]], "list"),
        (torch.ones(1, 0), "shape"),
    ):
        with pytest.raises(DataError, match=rf"input_ids: needs token ids \[rows, tokens\] .*, got {got}"):
            ours.generate(ids)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"input_ids\[1\]: leaves no room in a context of 256 tokens, got 256"):
        ours.generate(torch.tensor([[0] * 250 + prompt_ids(6), prompt_ids(256)]))
    with pytest.raises(ConfigError, match=r"generate.pad_token_id: needed where texts of a batch end at different"):
        ours.generate(torch.tensor([[5], [6]]), eos_token_id=None, pad_token_id=None, stop_strings=["a"])
    with pytest.raises(ConfigError, match=r"decoder: needs a Hugging Face target, got object; call the decoder itself"):
        SpeculativeModel(SpeculativeDecoder(object()))  # type: ignore[arg-type]
    assert ours.device == target.device
    assert ours.config is target.model.config
