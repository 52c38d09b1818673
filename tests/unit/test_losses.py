"""The chunked objective equals an eager one in value and gradient; alignment shifts what it should; counts add up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from specdraft.core.errors import ConfigError
from specdraft.core.types import DraftBatch, DraftStep, Features, TokenBatch, Unembedding
from specdraft.losses._config import DISTRIBUTION_TERMS, LossConfig
from specdraft.losses.alignment import align, anchor_positions, build_draft_batch
from specdraft.losses.metrics import StepStats
from specdraft.losses.objectives import Objective, Teacher
from tests.support import SPEC, token_batch, world


def steps_and_batch(trained: bool, unembed_fields: dict[str, float]) -> tuple[list[DraftStep], DraftBatch, Teacher]:
    """Three steps with random hidden states over a reduced vocabulary of 40."""
    w = world()
    unembed = replace(w.unembed, **unembed_fields)
    ids = torch.arange(0, 80, 2)
    label_map = torch.full((SPEC.vocab_size,), -1).index_copy(0, ids, torch.arange(40))
    tokens = token_batch([14, 11, 6], [(5, 14), (4, 9), (0, 0)])
    batch = build_draft_batch(tokens, w.features(tokens, 0))
    draft = unembed.select(ids)
    weight = torch.randn_like(draft.weight).requires_grad_() if trained else draft.weight
    own = replace(draft, weight=weight)
    steps = [
        DraftStep(torch.randn(batch.anchors.numel(), SPEC.hidden_size).requires_grad_(), offset, own)
        for offset in (2, 3, 4)
    ]
    return steps, batch, Teacher(unembed, draft, label_map)


def eager_term(name: str, p: torch.Tensor, q: torch.Tensor, config: LossConfig, inside: float = 1.0) -> torch.Tensor:
    """A term of the target's distribution p and the draft's q, ``[D]`` each, by its definition.

    p is renormalised; ``inside`` is the target's mass on these D tokens.
    """
    overlap = torch.minimum(p * inside, q).sum()
    if name == "soft_ce":
        return -(p * q.log()).sum()
    if name == "forward_kl":
        return (p * (p / q).log()).sum()
    if name == "reverse_kl":
        return (q * (q / p).log()).sum()
    if name == "jensen_shannon":
        m = (p + q) / 2
        return ((p * (p / m).log()).sum() + (q * (q / m).log()).sum()) / 2
    if name == "total_variation":
        return 1 - overlap
    if name == "log_acceptance":
        return -overlap.log()
    if name == "adaptive":
        share = torch.exp(-config.adaptive_rate * overlap.detach())
        return share * (p * (p / q).log()).sum() + (1 - share) * (1 - overlap)
    assert name == "top_k"
    best = p.topk(min(config.top_k, p.numel())).indices
    return -(p[best] * q[best].log()).sum()


def eager(steps: list[DraftStep], batch: DraftBatch, teacher: Teacher, config: LossConfig) -> torch.Tensor:
    """The definition, with loops and whole logits."""
    total = torch.zeros(())
    length = batch.input_ids.shape[1]
    assert teacher.label_map is not None
    rows = [int(a) // length for a in batch.anchors]
    for k, step in enumerate(steps):
        for n, anchor in enumerate(batch.anchors.tolist()):
            b, t = divmod(anchor, length)
            if t + step.offset >= length or not batch.loss_mask[b, t + step.offset]:
                continue
            label = int(batch.input_ids[b, t + step.offset])
            teacher_hidden = batch.features.last_hidden[b, t + step.offset - 1]
            draft_label = int(teacher.label_map[label])
            if config.outside_vocab == "label" and draft_label < 0:
                continue
            best = int(teacher.unembed(teacher_hidden).argmax())
            if config.outside_vocab == "argmax" and int(teacher.label_map[best]) < 0:
                continue
            weight = 1 / rows.count(b) if config.normalize == "sequence" else 1.0
            log_q = step.unembed(step.hidden[n]).log_softmax(-1)
            p = (teacher.draft_unembed(teacher_hidden) / config.teacher_temperature).softmax(-1)
            every = (teacher.unembed(teacher_hidden) / config.teacher_temperature).softmax(-1)
            inside = float(every[teacher.label_map >= 0].sum())
            term = torch.zeros(())
            for name in set(config.terms) - {"hard_ce", "smooth_l1", "confidence"}:
                term = term + config.terms[name] * eager_term(name, p, log_q.exp(), config, inside)
            if step.confidence is not None:
                accepted = torch.minimum(p * inside, log_q.exp()).sum().detach()
                own = step.confidence[n].sigmoid()
                cross = -(accepted * own.log() + (1 - accepted) * (1 - own).log())
                term = term + config.terms["confidence"] * cross
            if "hard_ce" in config.terms and draft_label >= 0:
                term = term - config.terms["hard_ce"] * log_q[draft_label]
            if "smooth_l1" in config.terms:
                term = term + config.terms["smooth_l1"] * F.smooth_l1_loss(step.hidden[n], teacher_hidden)
            depth = config.step_decay**k if config.step_weights is None else config.step_weights[k]
            total = total + weight * depth * term
    return total


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("unembed", [{}, {"scale": 0.5, "softcap": 3.0}])
@pytest.mark.parametrize(
    "fields",
    [
        {"terms": {"soft_ce": 1.0}},
        {"terms": {"hard_ce": 0.7}, "step_decay": 0.9},
        {"terms": {"smooth_l1": 1.0, "soft_ce": 0.1}, "normalize": "sequence"},
        {"terms": {"soft_ce": 0.5, "hard_ce": 0.5}, "outside_vocab": "argmax"},
        {"terms": {"soft_ce": 0.5, "hard_ce": 0.5}, "outside_vocab": "keep"},
        {"terms": {"soft_ce": 0.5, "forward_kl": 0.3, "hard_ce": 0.2}, "teacher_temperature": 0.7},
        *({"terms": {name: 0.7}} for name in DISTRIBUTION_TERMS if name != "soft_ce"),
        {"terms": {"top_k": 1.0}, "top_k": 3, "step_weights": [1.0, 0.5, 0.3]},
        {"terms": {"adaptive": 1.0}, "adaptive_rate": 10.0, "teacher_temperature": 2.0},
        {"terms": {**dict.fromkeys(DISTRIBUTION_TERMS, 0.4), "hard_ce": 0.3, "smooth_l1": 0.2}},
    ],
)
def test_chunked_equals_eager(fields: dict[str, object], unembed: dict[str, float], trained: bool) -> None:
    torch.manual_seed(1)
    config = LossConfig(**fields, chunk_size=5)  # type: ignore[arg-type]
    steps, batch, teacher = steps_and_batch(trained, unembed)
    leaves = [step.hidden for step in steps] + ([steps[0].unembed.weight] if trained else [])
    expected = eager(steps, batch, teacher, config)
    wanted = torch.autograd.grad(expected, leaves)
    result = Objective(config)(steps, batch, teacher)
    got = torch.autograd.grad(result.loss_sum * 3, leaves)
    torch.testing.assert_close(result.loss_sum, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b * 3, rtol=1e-4, atol=1e-5)
    assert result.stats.loss_sums.sum().item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("others", [{"hard_ce": 0.1, "total_variation": 1.8}, {"soft_ce": 1.0}, {"hard_ce": 1.0}])
def test_confidence_is_trained_towards_what_sampling_accepts(others: dict[str, float]) -> None:
    torch.manual_seed(2)
    config = LossConfig(terms={**others, "confidence": 0.5}, chunk_size=5)
    steps, batch, teacher = steps_and_batch(True, {})
    steps = [replace(step, confidence=torch.randn(batch.anchors.numel()).requires_grad_()) for step in steps]
    leaves = [tensor for step in steps for tensor in (step.hidden, step.confidence)]
    expected = eager(steps, batch, teacher, config)
    result = Objective(config)(steps, batch, teacher)
    torch.testing.assert_close(result.loss_sum, expected, rtol=1e-5, atol=1e-5)
    wanted, got = (torch.autograd.grad(value, leaves) for value in (expected, result.loss_sum))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_confidence_and_its_term_belong_together() -> None:
    steps, batch, teacher = steps_and_batch(False, {})
    with pytest.raises(ConfigError, match=r"^loss\.terms\.confidence: is not for this head, .*; remove the term$"):
        Objective(LossConfig(terms={"soft_ce": 1.0, "confidence": 1.0}))(steps, batch, teacher)
    steps = [replace(step, confidence=torch.zeros(batch.anchors.numel())) for step in steps]
    with pytest.raises(ConfigError, match=r"^loss\.terms\.confidence: is for this head, .*; add the term$"):
        Objective(LossConfig())(steps, batch, teacher)


def test_chosen_anchors_stand_for_the_others() -> None:
    """Over all choices of one anchor in two, the mean of loss and gradient is that of all anchors; counts are of the chosen."""
    torch.manual_seed(3)
    steps, batch, teacher = steps_and_batch(False, {})
    objective = Objective(LossConfig(normalize="sequence"))
    whole = objective(steps, batch, teacher)
    count = batch.anchors.numel()
    halves = [torch.arange(start, count, 2) for start in (0, 1)]
    losses = []
    for half in halves:
        second = replace(steps[1], hidden=steps[1].hidden[half], chosen=half, share=torch.full((half.numel(),), 2.0))
        result = objective([steps[0], second, steps[2]], batch, teacher)
        valid = align(batch, steps[1]).valid
        assert result.stats.counts.tolist() == [
            whole.stats.counts[0],
            float(valid[half].sum()),
            whole.stats.counts[2],
        ]
        losses.append(result.loss_sum)
    torch.testing.assert_close(sum(losses) / 2, whole.loss_sum, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("terms", [{"soft_ce": 1.0}, {"total_variation": 1.0, "top_k": 1.0}])
def test_logits_exist_for_one_chunk_only(terms: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    from specdraft.losses import chunked

    rows: list[int] = []
    original = chunked._product
    monkeypatch.setattr(chunked, "_product", lambda h, w, u: rows.append(h.shape[0]) or original(h, w, u))
    steps, batch, teacher = steps_and_batch(True, {})
    Objective(LossConfig(terms=terms, chunk_size=4))(steps, batch, teacher)
    assert max(rows) <= 4 < batch.anchors.numel()


def test_stats_count_what_a_hand_counts() -> None:
    w = world()
    tokens = token_batch([8], [(4, 8)])
    batch = build_draft_batch(tokens, w.features(tokens, 0))
    assert batch.anchors.tolist() == [2, 3, 4, 5]
    one_hot = Unembedding(torch.eye(SPEC.vocab_size))
    labels = tokens.input_ids[0]
    step2 = F.one_hot(labels[4:8], SPEC.vocab_size).float() * 20
    step2[1] = -step2[1]  # the second anchor misses at depth 0
    step3 = F.one_hot(torch.cat([labels[5:8], labels[:1]]), SPEC.vocab_size).float() * 20
    steps = [DraftStep(step2, 2, one_hot), DraftStep(step3, 3, one_hot)]
    teacher = Teacher(one_hot, one_hot, None)
    stats = Objective(LossConfig(terms={"hard_ce": 1.0}))(steps, batch, teacher).stats
    assert stats.hits.tolist() == [3, 3] and stats.counts.tolist() == [4, 3]
    assert stats.prefix_hits.tolist() == [3, 2] and stats.prefix_counts.tolist() == [4, 3]
    assert stats.expected_acceptance_length == pytest.approx(1 + 3 / 4 + 2 / 3)
    twice = stats + stats
    assert twice.hits.tolist() == [6, 6] and StepStats.unpack(twice.pack()).agreement == stats.agreement


def test_a_label_outside_the_draft_vocabulary_is_a_miss() -> None:
    steps, batch, teacher = steps_and_batch(False, {})
    outside = Teacher(teacher.unembed, teacher.draft_unembed, torch.full((SPEC.vocab_size,), -1))
    result = Objective(LossConfig())(steps, batch, outside)
    assert result.loss_sum.item() == 0.0
    assert result.stats.hits.sum() == 0 and result.stats.counts.sum() > 0


def test_first_draft_after_the_prompt_is_trained_and_nothing_past_the_end() -> None:
    """The last prompt position drafts the second answer token; the shift of ids, states and mask is one."""
    tokens = token_batch([10], [(6, 10)])
    w = world()
    batch = build_draft_batch(tokens, w.features(tokens, 0))
    assert batch.anchors.tolist() == [4, 5, 6, 7]
    step = DraftStep(torch.zeros(4, SPEC.hidden_size), 3, w.unembed)
    aligned = align(batch, step)
    assert aligned.valid.tolist() == [True, True, True, False]
    assert aligned.labels[:3].tolist() == tokens.input_ids[0, 7:10].tolist()
    assert aligned.teacher_positions[:3].tolist() == [6, 7, 8]


def test_alignment_stops_at_documents() -> None:
    tokens = token_batch([10], [(0, 10)])
    tokens.document_ids[0, 5:] = 1
    assert anchor_positions(tokens).tolist() == [0, 1, 2, 5, 6, 7]
    batch = build_draft_batch(tokens, Features(torch.zeros(1, 10, SPEC.hidden_size), None))
    aligned = align(batch, DraftStep(torch.zeros(6, SPEC.hidden_size), 3, world().unembed))
    assert aligned.valid.tolist() == [True, True, False, True, True, False]


def test_an_offset_below_two_is_a_fault_of_the_head() -> None:
    tokens = token_batch([10], [(0, 10)])
    w = world()
    batch = build_draft_batch(tokens, w.features(tokens, 0))
    with pytest.raises(ValueError, match="at least 2"):
        align(batch, DraftStep(torch.zeros(8, SPEC.hidden_size), 1, w.unembed))


@pytest.mark.parametrize(("normalize", "expected"), [("token", 7 + 5), ("sequence", 2), ("legacy_bt", 3 * 14)])
def test_denominators(normalize: str, expected: float) -> None:
    tokens: TokenBatch = token_batch([14, 11, 6], [(7, 14), (4, 9), (0, 0)])
    assert Objective(LossConfig(normalize=normalize)).denominator(tokens).item() == expected


@pytest.mark.parametrize("name", DISTRIBUTION_TERMS)
def test_a_draft_equal_to_the_target_is_a_minimum(name: str) -> None:
    """No gradient there, and divergences are 0."""
    _, batch, teacher = steps_and_batch(False, {})
    whole = Teacher(teacher.unembed, teacher.unembed, None)
    hidden = batch.features.last_hidden.flatten(0, 1)[batch.anchors + 1].requires_grad_()
    config = LossConfig(terms={name: 1.0}, **({"top_k": SPEC.vocab_size} if name == "top_k" else {}))
    loss = Objective(config)([DraftStep(hidden, 2, teacher.unembed)], batch, whole).loss_sum
    (gradient,) = torch.autograd.grad(loss, hidden)
    if name not in ("total_variation", "log_acceptance"):  # where p = q to rounding, their slope has a step
        assert gradient.abs().max() < 1e-5
    if name not in ("soft_ce", "top_k"):
        assert abs(loss.item()) < 1e-3


def test_nothing_in_common_stays_finite() -> None:
    one_hot = Unembedding(torch.eye(SPEC.vocab_size) * 200)
    _, batch, _ = steps_and_batch(False, {})
    count = batch.anchors.numel()
    features = torch.zeros(*batch.input_ids.shape, SPEC.vocab_size)
    features[..., 3] = 1.0
    batch = replace(batch, features=Features(features, None))
    for name in DISTRIBUTION_TERMS:
        hidden = F.one_hot(torch.full((count,), 5), SPEC.vocab_size).float().requires_grad_()
        config = LossConfig(terms={name: 1.0})
        loss = Objective(config)([DraftStep(hidden, 2, one_hot)], batch, Teacher(one_hot, one_hot, None)).loss_sum
        (gradient,) = torch.autograd.grad(loss, hidden)
        assert loss.isfinite() and loss > 0 and gradient.isfinite().all()


def test_steps_that_do_not_fit_the_settings_are_refused() -> None:
    steps, batch, teacher = steps_and_batch(False, {})
    with pytest.raises(
        ConfigError, match=r"^loss\.step_weights: the head trains 3 depths, got \[1\.0\]; give as many$"
    ):
        Objective(LossConfig(step_weights=[1.0]))(steps, batch, teacher)
    narrow = [DraftStep(step.hidden[:, :7], step.offset, step.unembed) for step in steps]
    with pytest.raises(ConfigError, match=r"^loss\.terms\.smooth_l1: .* width 32, got 7; remove the term$"):
        Objective(LossConfig(terms={"soft_ce": 1.0, "smooth_l1": 1.0}))(narrow, batch, teacher)


@pytest.mark.parametrize("terms", [{"soft_ce": 1.0}, {"forward_kl": 1.0}, {"adaptive": 1.0, "hard_ce": 0.1}])
def test_bf16_autocast_is_close_to_fp32(terms: dict[str, float]) -> None:
    torch.manual_seed(0)
    steps, batch, teacher = steps_and_batch(True, {})
    objective = Objective(LossConfig(terms=terms))
    plain = objective(steps, batch, teacher).loss_sum
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = objective(steps, batch, teacher).loss_sum
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, plain, rtol=2e-2, atol=1e-2)
    assert mixed.item() != plain.item()


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"terms": {}}, "loss.terms"),
        ({"terms": {"kl": 1.0}}, "loss.terms"),
        ({"terms": {"soft_ce": -1.0}}, "loss.terms.soft_ce"),
        ({"terms": {"smooth_l1": 1.0}}, "loss.terms"),
        ({"terms": {"confidence": 1.0, "smooth_l1": 1.0}}, "loss.terms"),
        ({"step_decay": 0.0}, "loss.step_decay"),
        ({"normalize": "mean"}, "loss.normalize"),
        ({"outside_vocab": "x"}, "loss.outside_vocab"),
        ({"chunk_size": 0}, "loss.chunk_size"),
        ({"step_weights": [1.0, 0.0]}, "loss.step_weights"),
        ({"top_k": 0, "terms": {"top_k": 1.0}}, "loss.top_k"),
        ({"top_k": 5}, "loss.top_k"),
        ({"adaptive_rate": 10.0}, "loss.adaptive_rate"),
        ({"teacher_temperature": 0.0}, "loss.teacher_temperature"),
        ({"terms": {"hard_ce": 1.0}, "teacher_temperature": 2.0}, "loss.teacher_temperature"),
    ],
)
def test_bad_settings_name_their_key(fields: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        LossConfig(**fields)  # type: ignore[arg-type]
    assert str(error.value).startswith(f"{key}: ") and "got" in str(error.value)
