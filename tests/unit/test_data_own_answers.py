"""Which answers are the target's own: against sums over the whole vocabulary, and on answers of known origin."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from specdraft.core.errors import DataError
from specdraft.data._answers_config import AnswersConfig
from specdraft.data._config import DataConfig
from specdraft.data.chat import TokenRow
from specdraft.data.own_answers import check_rows, greedy_gaps, logprob_histogram, own_answers, spread
from specdraft.targets.hf import HFTarget
from tests.tiny import tiny_target

PROMPT = 6


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target("llama")


def written(target: HFTarget, temperature: float, count: int = 12, length: int = 40) -> list[TokenRow]:
    """Rows whose answers the target draws itself; 0 = greedy."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 90, (count, PROMPT), generator=generator)
    for _ in range(length):
        logits = target.model(ids).logits[:, -1].detach()
        if temperature:
            following = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        else:
            following = logits.argmax(-1, keepdim=True)
        ids = torch.cat([ids, following], dim=1)
    return [TokenRow(row, [False] * PROMPT + [True] * length) for row in ids.tolist()]


def foreign(count: int = 12, length: int = 40) -> list[TokenRow]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 90, (count, PROMPT + length), generator=generator)
    return [TokenRow(row, [False] * PROMPT + [True] * length) for row in ids.tolist()]


def test_scores_are_those_of_the_whole_distribution(target: HFTarget) -> None:
    rows = [*written(target, 1.0, 3, 9), TokenRow([5, 6, 7, 8, 9], [False, True, False, True, True])]
    found = own_answers(target, rows, temperature=2.0)
    for place, row in enumerate(rows):
        logits = target.model(torch.tensor([row.input_ids])).logits[0].double()
        terms = []
        for t, on in enumerate(row.loss_mask):
            if on:
                plain, warm = logits[t - 1].log_softmax(-1), (logits[t - 1] / 2.0).log_softmax(-1)
                mean = (warm.exp() * warm).sum()
                variance = (warm.exp() * (warm - mean) ** 2).sum()
                terms.append([plain[row.input_ids[t]], mean - warm[row.input_ids[t]], variance])
        logprob, excess, variance = torch.tensor(terms).mean(0).tolist()
        assert found.mean_logprobs[place] == pytest.approx(logprob, abs=1e-4)
        assert found.excesses[place] == pytest.approx(excess, abs=1e-4)
        z = excess * len(terms) / math.sqrt(variance * len(terms))
        assert found.z_scores[place] == pytest.approx(z, abs=1e-3)


def test_the_targets_own_answers_pass_and_others_do_not(target: HFTarget) -> None:
    greedy, drawn, warm = (own_answers(target, written(target, t)) for t in (0.0, 1.0, 0.7))
    assert greedy.suspects == drawn.suspects == warm.suspects == []
    assert max(greedy.excesses) < 0.0
    assert abs(sum(drawn.excesses)) / 12 < 0.3
    other = own_answers(target, foreign())
    assert other.share_suspect == 1.0
    mixed = own_answers(target, [*written(target, 1.0), *foreign(4)])
    assert mixed.suspects == [12, 13, 14, 15]
    assert mixed.share_suspect == 0.25


def test_answers_drawn_hot_are_judged_by_their_own_temperature(target: HFTarget) -> None:
    hot = written(target, 3.0)
    assert own_answers(target, hot).share_suspect > 0.5
    assert own_answers(target, hot, temperature=3.0).share_suspect == 0.0


def test_rows_are_scored_alike_alone_and_in_any_order(target: HFTarget) -> None:
    rows = [*written(target, 1.0, 4, 5), *written(target, 1.0, 4, 30)]
    together = own_answers(target, rows).mean_logprobs
    alone = [own_answers(target, [row]).mean_logprobs[0] for row in reversed(rows)]
    assert together == pytest.approx(alone[::-1], abs=1e-4)
    assert own_answers(target, []).share_suspect == 0.0


def test_a_row_without_an_answer_is_an_error(target: HFTarget) -> None:
    with pytest.raises(ValueError, match="supervised token"):
        own_answers(target, [TokenRow([4, 5, 6], [True, False, False])])


def test_gaps_are_zero_for_greedy_answers_alone(target: HFTarget) -> None:
    assert max(greedy_gaps(target, written(target, 0.0, 1)[0])) < 1e-3
    gaps = greedy_gaps(target, foreign(1)[0])
    assert len(gaps) == 40
    assert max(gaps) > 1.0


def test_histogram_and_spread() -> None:
    assert logprob_histogram([-9.0, -2.0, -1.99, -0.1]) == {"<=-8.0": 1, "<=-2.0": 1, "<=-1.75": 1, "<=0.0": 1}
    rows = [TokenRow([i], [True]) for i in range(10)]
    assert [row.input_ids[0] for row in spread(rows, 4)] == [0, 3, 6, 9]
    assert spread(rows, 10) == rows
    assert len(spread(rows, 1)) == 1


def test_prepare_warns_of_answers_by_others_or_ends(target: HFTarget, caplog: pytest.LogCaptureFixture) -> None:
    rows = [*written(target, 0.0, 2), *foreign(6)]
    with caplog.at_level(logging.WARNING):
        found = check_rows(target, rows, DataConfig(regenerate=False))
    assert "75% of 8 answers are not the target's own" in caplog.text
    assert found["own"]["share_suspect"] == 0.75
    assert sum(found["own"]["logprob_histogram"].values()) == 8
    strict = DataConfig(regenerate=False, answers=AnswersConfig(max_suspect_share=0.5))
    with pytest.raises(DataError, match=r"^data\.answers\.max_suspect_share: 75% .* got 0\.750"):
        check_rows(target, rows, strict)
    assert check_rows(None, rows, strict) == {}
    assert check_rows(target, rows, DataConfig(answers=AnswersConfig(check_rows=0))) == {}
