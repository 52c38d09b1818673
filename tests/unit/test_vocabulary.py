"""The draft vocabulary: its size by coverage, what is always in it, the report on text not counted, and warm starts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch

from specdraft.core.errors import CheckpointError, ConfigError
from specdraft.data.chat import ChatRenderer, TokenRow
from specdraft.data.prepared import PreparedData, held_out_counts, save_prepared
from specdraft.heads._config import HeadConfig
from specdraft.heads._vocab import coverage, size_for_coverage
from specdraft.heads.base import DraftHead
from specdraft.heads.storage import check_source_kind, save_head, start_from
from specdraft.train.vocabulary import choose_vocabulary
from tests.support import SPEC, make_head, world
from tests.tiny import tiny_tokenizer

Prepare = Callable[[list[list[int]]], PreparedData]
COUNTS = torch.tensor([0, 50, 0, 30, 15, 4, 1])


@pytest.mark.parametrize(
    ("share", "always", "size"),
    [
        (0.5, [], 1),
        (0.51, [], 2),
        (0.95, [], 3),
        (0.96, [], 4),
        (1.0, [], 5),
        (0.5, [0, 2], 3),
        (0.5, [1], 1),
        (0.9, [6], 4),
    ],
)
def test_the_smallest_size_that_covers_a_share(share: float, always: list[int], size: int) -> None:
    assert size_for_coverage(COUNTS, share, always, multiple=1) == size


def test_sizes_are_rounded_up_and_fit_the_target() -> None:
    counts = torch.ones(200, dtype=torch.int64)
    assert size_for_coverage(counts, 0.1) == 64
    assert size_for_coverage(counts, 0.33) == 128
    assert size_for_coverage(counts, 0.99) == 200
    with pytest.raises(ConfigError, match=r"^head\.draft_vocab_coverage: no supervised tokens"):
        size_for_coverage(torch.zeros(5, dtype=torch.int64), 0.9)


@pytest.fixture
def prepared(tmp_path: Path) -> Prepare:
    """Makes a data set of rows whose first token is not supervised."""
    numbers = count()

    def make(rows: list[list[int]]) -> PreparedData:
        made = [TokenRow(row, [place >= 1 for place in range(len(row))]) for row in rows]
        return save_prepared(tmp_path / str(next(numbers)), made, {"identity": {"test": True}})

    return make


def test_a_tenth_of_the_rows_is_left_out(prepared: Prepare) -> None:
    data = prepared([[9, row, row] for row in range(20)])
    split = held_out_counts(data, SPEC.vocab_size)
    assert split is not None
    others, held = split
    assert held.nonzero().flatten().tolist() == [0, 10] and int(held.sum()) == 4
    assert int(others.sum()) == 36 and not (others * held).any()
    assert held_out_counts(prepared([[9, 1]] * 9), SPEC.vocab_size) is None


def test_what_is_chosen_and_reported(prepared: Prepare) -> None:
    """Row i holds token 20 + i three times; rows 0 and 10 are the tenth, whose tokens the others do not know."""
    data = prepared([[9, *[20 + row] * 3, 5] for row in range(20)])
    config = HeadConfig(kind="medusa", draft_vocab_size=10)
    chosen = choose_vocabulary(config, data, SPEC, always=[40])
    assert chosen.config is config and chosen.token_ids is not None
    assert {2, 5, 40} <= set(chosen.token_ids) and len(chosen.token_ids) == 10  # EOS, the most frequent, the marker
    assert chosen.lines == [
        "draft vocabulary: 10 of 97 tokens cover 51.25% of the supervised tokens (21 distinct); as many chosen by nine "
        "rows in ten cover 25.00% of the tenth"
    ]
    by_share = choose_vocabulary(HeadConfig(kind="medusa", draft_vocab_coverage=0.9), data, SPEC, [])
    assert (by_share.config.draft_vocab_size, by_share.config.draft_vocab_coverage) == (64, None)
    assert by_share.token_ids is not None and len(by_share.token_ids) == 64
    every = choose_vocabulary(HeadConfig(kind="medusa"), data, SPEC, [])
    assert every.token_ids is None and every.lines == []


@pytest.mark.parametrize(
    "fields", [{"draft_vocab_coverage": 0.0}, {"draft_vocab_coverage": 0.9, "draft_vocab_size": 9}]
)
def test_bad_coverage_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"^head\.draft_vocab_coverage: .*got 0"):
        HeadConfig(kind="medusa", **fields)  # type: ignore[arg-type]


def test_markers_are_the_added_tokens_that_the_template_writes() -> None:
    tokenizer = tiny_tokenizer()
    assert ChatRenderer(tokenizer).marker_ids == [1, 2]  # the end of text is a token of its own, but never written
    tokenizer.chat_template = str(tokenizer.chat_template) + "{# <|endoftext|> #}"
    assert ChatRenderer(tokenizer).marker_ids == [0, 1, 2]


KINDS = {
    "medusa": {"shared_lm_head": False},
    "hydra_chain": {"shared_lm_head": False, "num_layers": 1},
    "eagle": {},
    "eagle3": {},
    "mlp": {"own_lm_head": True},
    "dflash": {"num_layers": 1, "markov_rank": 4},
    "peagle": {"num_layers": 1},
}


def with_vocabulary(kind: str, tokens: list[int] | None, seed: int) -> DraftHead:
    size = None if tokens is None else len(tokens)
    head = make_head(kind, SPEC, seed, num_draft_tokens=2, draft_vocab_size=size, **KINDS[kind])
    if head.vocab is not None and tokens is not None:
        head.vocab.set_tokens(tokens)
    return head


@pytest.mark.parametrize("kind", KINDS)
def test_a_warm_start_keeps_the_rows_of_tokens_kept(kind: str) -> None:
    source = with_vocabulary(kind, [2, 5, 7, 9, 11], seed=1)
    head = with_vocabulary(kind, [5, 6, 9, 50], seed=2)
    before = {name: value.clone() for name, value in head.state_dict().items()}
    line = start_from(head, source)
    by_token = head.vocabulary_parameters()
    assert ("2 of 4 draft tokens" in line) == bool(by_token)
    for name, parameter in head.named_parameters():
        given = source.get_parameter(name)
        if name not in by_token:
            assert torch.equal(parameter, given)
            continue
        assert torch.equal(parameter[[0, 2]], given[[1, 3]])
        assert torch.equal(parameter[[1, 3]], before[name][[1, 3]])
    assert torch.equal(head.vocab.d2t, before["vocab.d2t"])  # type: ignore[union-attr]


def test_a_warm_start_between_all_tokens_and_some() -> None:
    whole, some = with_vocabulary("eagle3", None, 1), with_vocabulary("eagle3", [3, 4, 90], 2)
    first = some.get_parameter("lm_head.weight").clone()
    start_from(some, whole)
    assert torch.equal(some.get_parameter("lm_head.weight"), whole.get_parameter("lm_head.weight")[[3, 4, 90]])
    other = with_vocabulary("eagle3", [3, 4, 90], 2)
    start_from(whole, other)
    assert torch.equal(whole.get_parameter("lm_head.weight")[[3, 4, 90]], first)


def test_a_warm_start_of_another_shape_or_kind_is_refused(tmp_path: Path) -> None:
    head = with_vocabulary("eagle3", [3, 4, 5], 1)
    wide = make_head("eagle3", world().spec, intermediate_size=64, num_draft_tokens=2, draft_vocab_size=3)
    with pytest.raises(ConfigError, match=r"^trainer\.warm_start: the heads differ in layer\..*, got "):
        start_from(head, wide)
    folder = save_head(head, tmp_path / "head")
    check_source_kind(folder, "eagle3")
    with pytest.raises(ConfigError, match=r"^trainer\.warm_start: .* got eagle3 for medusa; use head=eagle3$"):
        check_source_kind(folder, "medusa")
    with pytest.raises(CheckpointError):
        check_source_kind(tmp_path / "none", "eagle3")


def test_coverage_of_nothing() -> None:
    assert coverage(torch.zeros(4), [1]) == 0.0
