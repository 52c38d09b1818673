"""A head measured on a tiny target: exact acceptance of an oracle, identity of outputs, turns, what is recorded."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specdraft.core.errors import DataError
from specdraft.core.tree import DraftTree, Proposal
from specdraft.core.types import DraftBatch, DraftContext, DraftStep, Embed, FeatureRequest, Unembedding
from specdraft.data.chat import ChatRenderer
from specdraft.decode._config import DecodeConfig
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.eval._config import EvalConfig
from specdraft.eval.acceptance import evaluate_head, measure_acceptance
from specdraft.eval.prompts import Prompt
from specdraft.eval.speed import PairedDecoder
from specdraft.heads._config import HeadConfig
from specdraft.heads.base import DraftHead
from specdraft.targets.hf import HFTarget
from tests.support import make_head
from tests.tiny import tiny_target

PROMPTS = [
    Prompt("a", "one", ("Hello there.", "And then?")),
    Prompt("b", "one", ("Count to three.",)),
    Prompt("c", "two", ("What is a test, and why?", "Go on.", "End.")),
]
LENGTH = 13
IGNORE_EOS = DecodeConfig(max_new_tokens=LENGTH, ignore_eos=True)


class OracleHead(DraftHead):
    """Knows what the target will write down to depth ``right`` and drafts nonsense below."""

    def __init__(self, target: HFTarget, right: int, depth: int = 3) -> None:
        super().__init__(HeadConfig(kind="oracle", num_draft_tokens=depth), target.spec)
        self.decoder = SpeculativeDecoder(target)
        self.right = right
        self.weight = nn.Parameter(torch.zeros(1))

    def features(self) -> FeatureRequest:
        return FeatureRequest()

    def forward(self, batch: DraftBatch, embed: Embed, unembed: Unembedding) -> list[DraftStep]:
        raise AssertionError("an oracle is not trained")

    def init_state(self, max_length: int, tree: DraftTree, unembed: Unembedding) -> dict[str, list[int]]:
        return {"text": [1]}  # every prompt starts with BOS, which no context carries

    def propose(self, state: Any, context: DraftContext, embed: Embed, tree: DraftTree) -> Proposal:
        state["text"] += context.next_tokens[0].tolist()
        ahead = self.decoder.generate(state["text"], tree.max_depth, ignore_eos=True).tokens
        wrong = [(t + 1) % self.spec.vocab_size for t in ahead]
        known = (ahead + [0] * tree.max_depth)[: tree.max_depth]
        tokens = [*known[: self.right], *(wrong + [0] * tree.max_depth)[self.right : tree.max_depth]]
        return Proposal(torch.tensor([tokens]), tree)


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target()


def evaluate(target: HFTarget, head: DraftHead, decode: DecodeConfig = IGNORE_EOS, **settings: Any) -> dict[str, Any]:
    config = EvalConfig(bootstrap_samples=100, **settings)
    return evaluate_head(target, head, {"mine": PROMPTS}, decode, config)


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_an_oracle_is_measured_exactly(target: HFTarget, right: int) -> None:
    figures = evaluate(target, OracleHead(target, right))["sets"]["mine"]
    steps = -(-(LENGTH - 1) // (right + 1))
    assert figures["num_steps"] == 3 * steps
    assert figures["acceptance_length"]["value"] == pytest.approx((LENGTH - 1) / steps)
    assert figures["acceptance_length"]["ci95"] == pytest.approx([(LENGTH - 1) / steps] * 2)
    assert figures["accepted_per_step"] == pytest.approx((LENGTH - 1) / steps - 1)
    assert figures["acceptance_rate"][:right] == [1.0] * right
    assert figures["acceptance_rate"][right:] == [0.0, None, None][: 3 - right]
    assert figures["identical_outputs"] == figures["num_prompts"] == 3
    assert figures["first_divergences"] == []
    assert figures["finish_reasons"] == {"length": 3}
    assert {c: part["num_prompts"] for c, part in figures["by_category"].items()} == {"one": 2, "two": 1}


def test_every_turn_follows_the_targets_own_answers(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    original = PairedDecoder.decode

    def spy(self: PairedDecoder, prompts: list[list[int]], repeats: int = 1) -> Any:
        seen.extend(prompts)
        return original(self, prompts, repeats)

    monkeypatch.setattr(PairedDecoder, "decode", spy)
    results = evaluate(target, OracleHead(target, 2), turns="all", warmup_prompts=0)
    assert results["sets"]["mine"]["num_turns"] == len(seen) == 6
    assert results["sets"]["mine"]["num_prompts"] == 3
    assert target.tokenizer is not None
    first = SpeculativeDecoder(target).generate(seen[0], LENGTH, ignore_eos=True).tokens
    answer = target.tokenizer.decode(first, skip_special_tokens=True)
    messages = [
        {"role": "user", "content": "Hello there."},
        {"role": "assistant", "content": str(answer).strip()},
        {"role": "user", "content": "And then?"},
    ]
    assert seen[1] == ChatRenderer(target.tokenizer).prompt_ids(messages)


@pytest.mark.parametrize("batch_size", [2, 8])
def test_batches_give_the_counts_of_single_prompts(target: HFTarget, batch_size: int) -> None:
    """Conversations of one and of two turns in one batch, the second after its own first answer."""
    head = OracleHead(target, 2)
    single = evaluate(target, head, turns="all")
    found = evaluate(target, head, turns="all", batch_size=batch_size, repeats=2)
    assert (single["decode"]["batch_size"], found["decode"]["batch_size"]) == (1, batch_size)
    timed = (
        "tokens_per_s",
        "speedup",
        "time_ms_per_step",
        "without_prefill",
        "prefill_ms",
        "autoregressive_ms_per_step",
    )
    a, b = single["sets"]["mine"], found["sets"]["mine"]
    assert {key: a[key] for key in a if key not in (*timed, "by_category")} == {
        key: b[key] for key in b if key not in (*timed, "by_category")
    }
    assert b["num_turns"] == b["finish_reasons"]["length"] == 6
    assert found["memory_bytes"]["kv_cache"] == batch_size * single["memory_bytes"]["kv_cache"]


def test_the_times_of_a_batch_add_up(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr("specdraft.eval.speed.perf_counter", lambda: 10.0 * next(clock))
    decoder = PairedDecoder(target, None, 6, ignore_eos=True)
    pairs = decoder.decode([[5], [6, 7], [8, 9, 3]])
    assert sum(pair.plain.wall_ms for pair in pairs) == pytest.approx(10_000)
    assert all(pair.plain.wall_ms > pair.plain.prefill_ms > 0 for pair in pairs)
    assert all(pair.identical and len(pair.plain.result.tokens) == 6 for pair in pairs)


def test_plain_and_speculative_take_turns(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    original = SpeculativeDecoder.generate

    def spy(self: SpeculativeDecoder, *args: Any, **kwargs: Any) -> Any:
        calls.append("plain" if self.proposer is None else "speculative")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(SpeculativeDecoder, "generate", spy)
    head = make_head("medusa", target.spec, num_draft_tokens=2)
    figures = evaluate(target, head, repeats=2, warmup_prompts=1)["sets"]["mine"]
    assert calls == ["plain", "speculative", "speculative", "plain"] * 3 + ["plain", "speculative"]
    assert figures["num_turns"] == 3


def test_a_difference_is_reported_with_its_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that answers otherwise when several rows run at once, as low precision can."""
    target = tiny_target()
    plain = target.logits

    def logits(hidden: Tensor) -> Tensor:
        found = plain(hidden)
        if hidden.shape[0] > 1:
            found[:, 50] += 1e4
        return found

    monkeypatch.setattr(target, "logits", logits)
    head = make_head("medusa", target.spec, num_draft_tokens=2)
    figures = evaluate(target, head)["sets"]["mine"]
    assert figures["identical_outputs"] == 0
    assert [d["prompt"] for d in figures["first_divergences"]] == ["a", "b", "c"]
    for one in figures["first_divergences"]:
        assert [one["turn"], one["position"], one["speculative"]] == [1, 1, 50]
        assert one["autoregressive"] != 50
        assert 0 < one["margin"] < 1e3
    assert "first_divergences" not in figures["by_category"]["one"]


def test_results_say_what_they_are_about(target: HFTarget) -> None:
    head = make_head("eagle3", target.spec, num_draft_tokens=2, draft_vocab_size=40)
    decode = DecodeConfig(max_new_tokens=6, tree=[[0], [1], [0, 0]])
    results = evaluate_head(
        target, head, {"mine": PROMPTS}, decode, EvalConfig(bootstrap_samples=100), head_sha256="ab" * 32
    )
    assert json.loads(json.dumps(results, allow_nan=False)) == results
    assert results["schema"] == 1
    assert results["target"]["fingerprint"] == target.spec.fingerprint
    assert results["head"]["kind"] == "eagle3"
    assert results["head"]["sha256"] == "ab" * 32
    assert results["head"]["settings"]["draft_vocab_size"] == 40
    assert results["decode"]["tree"] == [[0], [1], [0, 0]]
    assert results["decode"]["num_draft_tokens"] == 2
    assert results["decode"]["dtype"] == "float32"
    weights = sum(p.numel() for p in target.model.parameters()) * 4
    assert results["memory_bytes"]["target"] >= weights
    assert results["memory_bytes"]["head"] >= head.num_parameters * 4
    assert results["memory_bytes"]["kv_cache"] > 0
    assert results["environment"]["libraries"]["torch"]
    assert results["environment"]["num_threads"] == torch.get_num_threads()
    figures = results["sets"]["mine"]
    assert len(figures["survival"]) == 2
    assert figures["drafted_tokens"] > 0
    assert figures["tokens_per_s"]["autoregressive"] > 0
    assert figures["skipped"] == {}


def test_prompts_that_do_not_fit_are_counted() -> None:
    target = tiny_target(max_position_embeddings=64)
    long = Prompt("long", "one", ("x" * 80,))
    prompts = {"mine": [long, *PROMPTS[:2]]}
    head = make_head("medusa", target.spec, num_draft_tokens=2)
    config = EvalConfig(bootstrap_samples=100, turns="all")
    figures = evaluate_head(target, head, prompts, DecodeConfig(max_new_tokens=4), config)["sets"]["mine"]
    assert figures["skipped"] == {"longer than the target's context": 2}
    assert figures["num_prompts"] == 2
    with pytest.raises(DataError, match=r"no prompt of the set can be decoded, got mine \(longer"):
        evaluate_head(target, head, {"mine": [long]}, DecodeConfig(), config)


def test_a_target_without_chat_template_is_refused() -> None:
    target = tiny_target()
    assert target.tokenizer is not None
    target.tokenizer.chat_template = None
    head = make_head("medusa", target.spec)
    with pytest.raises(DataError, match="no chat template"):
        evaluate(target, head)


def test_measuring_for_training_agrees_and_leaves_the_head_alone(target: HFTarget) -> None:
    head = make_head("eagle", target.spec, num_draft_tokens=3).train()
    before = {name: value.clone() for name, value in head.state_dict().items()}
    assert target.tokenizer is not None
    renderer = ChatRenderer(target.tokenizer)
    ids = [renderer.prompt_ids([{"role": "user", "content": p.turns[0]}]) for p in PROMPTS]
    point = measure_acceptance(target, head, [*ids, [5] * 500], max_new_tokens=LENGTH)
    assert head.training
    figures = evaluate(target, head, DecodeConfig(max_new_tokens=LENGTH))["sets"]["mine"]
    assert point.num_steps == figures["num_steps"]
    assert point.acceptance_length == figures["acceptance_length"]["value"]
    assert point.survival == figures["survival"]
    assert point.acceptance_rate == [rate or 0.0 for rate in figures["acceptance_rate"]]
    for name, value in head.state_dict().items():
        assert torch.equal(value, before[name])
        assert not value.is_inference()


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_a_float32_head_is_measured_on_a_bfloat16_target(kind: str) -> None:
    target = tiny_target()
    lower = HFTarget.from_model(target.model.to(torch.bfloat16), target.tokenizer, name="lower")
    head = make_head(kind, lower.spec, num_draft_tokens=2, draft_vocab_size=40)
    point = measure_acceptance(lower, head, [[1, 5, 6, 7]], max_new_tokens=8)
    assert point.num_steps > 0
    assert head.dtype == torch.float32


def test_without_steps_the_point_is_neutral(target: HFTarget) -> None:
    head = make_head("medusa", target.spec, num_draft_tokens=2)
    point = measure_acceptance(target, head, [[1, 5, 6]], max_new_tokens=1)
    assert [point.acceptance_length, point.num_steps, point.num_tokens] == [1.0, 0, 0]
    assert point.survival == [0.0, 0.0]
