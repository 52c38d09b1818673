"""Answers through our own decoder: those of plain generation, resumable, drawn by seeds of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdraft.data._answers_config import AnswersConfig
from specdraft.data._config import DataConfig
from specdraft.data.chat import ChatRenderer
from specdraft.data.journal import EOS, LENGTH, AnswerJournal
from specdraft.data.local_answers import TargetWriter
from specdraft.data.regenerate import conversation_key, regenerate
from specdraft.data.sources import Conversation
from specdraft.decode.answers import DecoderWriter
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.proposers import HeadProposer
from specdraft.decode.result import BatchError
from specdraft.targets.hf import HFTarget
from tests.support import make_head
from tests.tiny import tiny_target

TALKS = [Conversation(str(i), "", [{"role": "user", "content": "word " * (i % 4) + "abcdefghi"[i]}]) for i in range(9)]


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target("llama", eos_token_id=[2, 40])


def settings(**changes: Any) -> DataConfig:
    return DataConfig(**{"max_new_tokens": 16, "generate_batch_size": 4, **changes})


def decoder(target: HFTarget) -> SpeculativeDecoder:
    head = make_head("medusa", target.spec, num_draft_tokens=3).requires_grad_(False)
    return SpeculativeDecoder(target, HeadProposer(head, target))


def run(
    writer: Any, target: HFTarget, folder: Path, config: DataConfig, talks: list[Conversation] = TALKS
) -> AnswerJournal:
    journal = AnswerJournal(folder)
    regenerate(talks, ChatRenderer(target.tokenizer), writer, journal, config)
    return journal


def test_greedy_answers_with_a_head_are_those_of_plain_generation(target: HFTarget, tmp_path: Path) -> None:
    config = settings()
    plain = run(TargetWriter(target, target.tokenizer, config), target, tmp_path / "plain", config)
    drafted = run(DecoderWriter(decoder(target), config), target, tmp_path / "head", config)
    assert drafted == plain
    assert {answer.finish for answer in drafted.values()} == {EOS, LENGTH}
    assert (tmp_path / "head" / "rank-00000.jsonl").read_bytes().count(b"\n") == len(TALKS)


def test_draws_depend_on_their_seeds_and_not_on_the_batch(target: HFTarget, tmp_path: Path) -> None:
    config = settings(answers=AnswersConfig(samples=2, temperatures=[0.0, 1.0]))
    whole = run(DecoderWriter(decoder(target), config), target, tmp_path / "a", config)
    assert len(whole) == 2 * len(TALKS)
    run(DecoderWriter(decoder(target), config), target, tmp_path / "b", config, TALKS[4:5])
    assert run(DecoderWriter(decoder(target), config), target, tmp_path / "b", config) == whole
    other = run(DecoderWriter(decoder(target), config), target, tmp_path / "c", replace(config, seed=1))
    key = conversation_key(TALKS[0])
    warm = {answer.temperature for name, answer in whole.items() if name[0] == key}
    assert warm == {0.0, 1.0}
    assert other != whole


def test_what_ends_before_another_row_fails_is_kept(
    target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(generate_batch_size=3)
    plain = decoder(target)
    logits = target.logits
    calls = 0

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        found = logits(hidden)
        return torch.full_like(found, float("nan")) if calls == 5 else found

    monkeypatch.setattr(target, "logits", broken)
    with pytest.raises(BatchError):
        run(DecoderWriter(plain, config), target, tmp_path, config)
    kept = len(AnswerJournal(tmp_path).read())
    assert 0 < kept < len(TALKS)
    monkeypatch.undo()
    whole = run(DecoderWriter(plain, config), target, tmp_path, config)
    assert whole == run(TargetWriter(target, target.tokenizer, config), target, tmp_path / "plain", config)
