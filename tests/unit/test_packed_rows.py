"""Conversations packed into one row train as they do on their own: in the target, in every head, in loss and memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdraft.core.types import FeatureRequest, Features, TokenBatch
from specdraft.data.batching import collate
from specdraft.data.features import FeatureMemory
from specdraft.heads.base import DraftHead, head_config, head_kinds
from specdraft.losses._config import LossConfig
from specdraft.losses.alignment import build_draft_batch
from specdraft.losses.objectives import LossResult, Objective, Teacher
from specdraft.targets.hf import HFTarget
from specdraft.train.loop import train
from tests.tiny import tiny_models, tiny_target
from tests.training import make_head, make_rows, make_run, target, weights

ROWS = make_rows(7, masked=(2,))
SIZES = [3, 2, 2]
KINDS = list(head_kinds())


def alone() -> TokenBatch:
    return collate(ROWS, 0, range(7))


def packed() -> TokenBatch:
    return collate(ROWS, 0, range(7), SIZES)


def trained(
    head: DraftHead, teacher: Teacher, chosen: HFTarget, tokens: TokenBatch, loss: dict[str, Any]
) -> LossResult:
    """Loss of one batch, normalised; its gradients are left in the head."""
    head.zero_grad()
    objective = Objective(LossConfig(**loss))
    batch = build_draft_batch(tokens, chosen.capture(tokens, head.features()))
    result = objective(head(batch, chosen.embed, chosen.unembedding), batch, teacher)
    (result.loss_sum / float(objective.denominator(tokens))).backward()
    return result


def assert_packed_trains_the_same(head: DraftHead, chosen: HFTarget, loss: dict[str, Any]) -> None:
    teacher = Teacher(
        chosen.unembedding,
        head.draft_unembedding(chosen.unembedding),
        head.label_map(),
    )
    results, found = [], []
    for tokens in (alone(), packed()):
        results.append(trained(head, teacher, chosen, tokens, loss))
        found.append({name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None})
    torch.testing.assert_close(results[0].loss_sum, results[1].loss_sum, rtol=1e-5, atol=0)
    for row in (0, 1, 2, 3):
        assert torch.equal(results[0].stats.pack()[row], results[1].stats.pack()[row])
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        assert gradient.any(), name
        size = float(gradient.abs().max())
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=1e-5 * max(size, 1.0), msg=name)


@pytest.mark.parametrize("normalize", ["token", "sequence"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_head_trains_the_same(kind: str, normalize: str) -> None:
    head = make_head(kind).train()
    for parameter in head.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    assert_packed_trains_the_same(head, target(), {"normalize": normalize, "terms": {"soft_ce": 1.0, "hard_ce": 0.5}})


@pytest.mark.parametrize("attention", [None, "eager"])
@pytest.mark.parametrize("family", sorted(tiny_models))
def test_every_family_sees_one_document_at_a_time(family: str, attention: str | None) -> None:
    """In the kernel that transformers chooses for the family, and in the plain one."""
    chosen = tiny_target(family, **({} if attention is None else {"attn_implementation": attention}))
    request = FeatureRequest((0, 2, 4))
    one, many = alone(), packed()
    expected, got = chosen.capture(one, request), chosen.capture(many, request)
    for index, (before, after) in enumerate(places(many)):
        width = int(one.attention_mask[index].sum())
        for wanted, states in ((expected.last_hidden, got.last_hidden), (expected.aux_hidden, got.aux_hidden)):
            assert wanted is not None and states is not None
            torch.testing.assert_close(
                states[before, after : after + width], wanted[index, :width], rtol=1e-4, atol=1e-4
            )


def places(tokens: TokenBatch) -> list[tuple[int, int]]:
    """Row and first column of every document."""
    starts = [(b, int((tokens.document_ids[b] == d).nonzero()[0])) for b, n in enumerate(SIZES) for d in range(n)]
    assert len(starts) == len(ROWS)
    return starts


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "mistral", "gemma3_composite"])
def test_losses_of_other_families(family: str) -> None:
    chosen = tiny_target(family)
    torch.manual_seed(0)
    head = head_config("eagle3", {"num_draft_tokens": 3}).build(chosen.spec)
    head.init_from_target(chosen.embed, chosen.unembedding)
    assert_packed_trains_the_same(head.train(), chosen, {})


class CountedTarget(HFTarget):
    """The target of these tests, whose captures are counted; those of other threads on another one are not."""

    def __init__(self, whole: HFTarget) -> None:
        super().__init__(whole.model, whole.layout, whole.spec, whole.tokenizer)
        self.calls = 0

    def capture(self, tokens: TokenBatch, request: FeatureRequest) -> Features:
        self.calls += 1
        return super().capture(tokens, request)


def test_features_are_remembered_by_document() -> None:
    """What was seen packed serves an unpacked batch and another packing, without a forward."""
    counted = CountedTarget(target())
    memory = FeatureMemory(counted, FeatureRequest((1,)), 2**20)
    memory.capture(packed())
    other = collate([ROWS[i] for i in (6, 1, 3)], 0, [6, 1, 3], [1, 2])
    for tokens in (alone(), other):
        found, expected = memory.capture(tokens), target().capture(tokens, FeatureRequest((1,)))
        real = tokens.attention_mask
        for states, wanted in ((found.last_hidden, expected.last_hidden), (found.aux_hidden, expected.aux_hidden)):
            assert states is not None and wanted is not None
            torch.testing.assert_close(states[real], wanted[real], rtol=1e-4, atol=1e-4)
            assert not states[~real].any()
    assert counted.calls == 1


def test_a_packed_run_resumes_in_an_epoch_of_its_own_length(tmp_path: Path) -> None:
    """Two epochs straight, and one cut in the middle of the second: the same weights."""

    def run(folder: str, resume: str, **trainer: Any) -> Any:
        made = make_run(tmp_path / folder, kind="eagle3", batch_size=2, resume=resume, trainer={"epochs": 2, **trainer})
        return replace(made, plan=replace(made.plan, capacity=48))

    straight = run("straight", "never")
    total = straight.plan.num_steps(0) + straight.plan.num_steps(1)
    assert straight.total_steps == total
    state = train(straight).state
    assert (state.step, state.epoch, state.step_in_epoch) == (total, 2, 0)
    lines = [json.loads(line) for line in (tmp_path / "straight/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["tokens"] == 2 * sum(len(row.input_ids) for row in make_rows())
    first = run("cut", "never", save_every=1)

    def stop(ids: Any, inner: Any = first.rows, left: list[int] = [total - 1]) -> Any:  # noqa: B006
        left[0] -= 1
        if left[0] < 0:
            raise KeyError("killed")
        return inner(ids)

    with pytest.raises(KeyError):
        train(replace(first, rows=stop))
    resumed = run("cut", "must")
    assert train(resumed).state.step == total
    assert all(torch.equal(value, weights(straight.head)[name]) for name, value in weights(resumed.head).items())


def test_documents_do_not_reach_each_other() -> None:
    """Another first document changes nothing in the second, forward or backward."""
    grads: list[dict[str, Tensor]] = []
    for other in (0, 1):
        tokens = collate([ROWS[other], ROWS[4]], 0, [0, 1], [2])
        tokens.loss_mask[0, : len(ROWS[other].input_ids)] = False
        head = make_head("eagle3").train()
        trained(
            head,
            Teacher(target().unembedding, head.draft_unembedding(target().unembedding), head.label_map()),
            target(),
            tokens,
            {},
        )
        grads.append({name: p.grad for name, p in head.named_parameters() if p.grad is not None})
    for name, gradient in grads[0].items():
        torch.testing.assert_close(grads[1][name], gradient, rtol=1e-5, atol=1e-6)
