"""Answers by the target: equal to one-by-one decoding, resumable after a kill, shared among processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdraft.core.errors import DataError
from specdraft.data._config import DataConfig
from specdraft.data.chat import ChatRenderer, join_turns
from specdraft.data.journal import Answer, AnswerJournal
from specdraft.data.local_answers import TargetWriter
from specdraft.data.regenerate import answered_turns, conversation_key, regenerate
from specdraft.data.sources import Conversation
from specdraft.targets.hf import HFTarget
from tests.tiny import tiny_target

EOS = 2
END_TOO = 40  # a token that the random target writes now and then, as a second EOS

Answers = AnswerJournal


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target("llama", eos_token_id=[EOS, END_TOO])


def conversation(name: str, *user_turns: str) -> Conversation:
    messages: list[dict[str, str | None]] = []
    for text in user_turns:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": None}]
    return Conversation(name, "", messages)


TALKS = [conversation(str(i), "word " * (i % 5) + chr(97 + i)) for i in range(9)]
MULTI = [conversation("m0", "hi", "and you?", "bye"), conversation("m1", "so", "no")]


def settings(**changes: Any) -> DataConfig:
    return DataConfig(**{"max_new_tokens": 24, "generate_batch_size": 4, **changes})


def run(
    target: HFTarget, folder: Path, talks: list[Conversation], config: DataConfig, rank: int = 0, world_size: int = 1
) -> Answers:
    journal = AnswerJournal(folder, rank)
    writer = TargetWriter(target, target.tokenizer, config)
    regenerate(talks, ChatRenderer(target.tokenizer), writer, journal, config, rank=rank, world_size=world_size)
    return journal.read()


def greedy(target: HFTarget, prompt: list[int], length: int) -> list[int]:
    """Plain argmax decoding without cache, batch or padding."""
    ids = list(prompt)
    for _ in range(length):
        with torch.no_grad():
            ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in target.spec.eos_token_ids:
            break
    return ids[len(prompt) :]


def test_batched_answers_equal_one_by_one_decoding(target: HFTarget, tmp_path: Path) -> None:
    answers = run(target, tmp_path, TALKS, settings())
    assert {key for key, _, _ in answers} == {conversation_key(talk) for talk in TALKS}
    for answer in answers.values():
        assert answer.answer_ids == greedy(target, answer.prompt_ids, 24)
    ends = {answer.answer_ids[-1] in (EOS, END_TOO) for answer in answers.values()}
    assert ends == {True, False}  # both kinds of ending were compared


def test_penalties_of_the_checkpoint_do_not_apply(tmp_path: Path) -> None:
    target = tiny_target("llama")
    target.model.generation_config.update(repetition_penalty=5.0, no_repeat_ngram_size=1)
    (answer,) = run(target, tmp_path, TALKS[:1], settings()).values()
    assert answer.answer_ids == greedy(target, answer.prompt_ids, 24)
    assert len(set(answer.answer_ids)) < len(answer.answer_ids)


def test_later_turns_follow_the_targets_own_answers(target: HFTarget, tmp_path: Path) -> None:
    answers = run(target, tmp_path, MULTI, settings())
    renderer = ChatRenderer(target.tokenizer)
    for talk in MULTI:
        turns = answered_turns(talk, answers)
        assert turns is not None
        assert len(turns) == len(talk.user_turns)
        messages: list[dict[str, str | None]] = []
        for text, turn in zip(talk.user_turns, turns, strict=True):
            messages.append({"role": "user", "content": text})
            assert turn.prompt_ids == renderer.prompt_ids(messages)
            assert turn.answer_ids == greedy(target, turn.prompt_ids, 24)
            written = target.tokenizer.decode(turn.answer_ids, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": written})
        rows = join_turns(turns)
        assert sum(sum(row.loss_mask) for row in rows) == sum(len(turn.answer_ids) for turn in turns)


def test_an_answer_cut_by_length_has_no_end_and_is_supervised(target: HFTarget, tmp_path: Path) -> None:
    answers = run(target, tmp_path, TALKS, settings(max_new_tokens=2))
    cut = [a for a in answers.values() if a.answer_ids[-1] not in (EOS, END_TOO)]
    assert cut
    talk = next(t for t in TALKS if conversation_key(t) == cut[0].conversation)
    turns = answered_turns(talk, answers)
    assert turns is not None
    (row,) = join_turns(turns)
    assert row.input_ids == [*cut[0].prompt_ids, *cut[0].answer_ids]
    assert row.loss_mask == [False] * len(cut[0].prompt_ids) + [True, True]


class KilledError(RuntimeError):
    """Stands for the end of the process."""


def counting(target: HFTarget, monkeypatch: pytest.MonkeyPatch, dies_after: int | None = None) -> list[int]:
    """Rows of each batch that ``target.model.generate`` answers; the batch after ``dies_after`` raises."""
    sizes: list[int] = []
    generate: Callable[..., Any] = type(target.model).generate

    def call(**kwargs: Any) -> Any:
        if dies_after is not None and len(sizes) == dies_after:
            raise KilledError
        sizes.append(len(kwargs["input_ids"]))
        return generate(target.model, **kwargs)

    monkeypatch.setattr(target.model, "generate", call, raising=False)
    return sizes


@pytest.mark.parametrize("torn", [b"", b'["half a li', b"\x00\x00\x00"])
def test_a_kill_repeats_and_loses_no_row(
    target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bytes
) -> None:
    talks = [*TALKS, *MULTI]
    with monkeypatch.context() as patch:
        whole_sizes = counting(target, patch)
        whole = run(target, tmp_path / "whole", talks, settings())
    with monkeypatch.context() as patch:
        first = counting(target, patch, dies_after=2)
        with pytest.raises(KilledError):
            run(target, tmp_path / "killed", talks, settings())
    journal = tmp_path / "killed" / "rank-00000.jsonl"
    assert journal.read_bytes().count(b"\n") == sum(first) == 8
    journal.write_bytes(journal.read_bytes() + torn)
    with monkeypatch.context() as patch:
        rest = counting(target, patch)
        resumed = run(target, tmp_path / "killed", talks, settings())
    assert resumed == whole
    assert sum(first) + sum(rest) == sum(whole_sizes) == len(whole)
    assert journal.read_bytes().count(b"\n") == len(whole)
    assert run(target, tmp_path / "killed", talks, settings()) == whole  # and nothing is left to do


def test_a_line_torn_in_its_middle_is_written_again(target: HFTarget, tmp_path: Path) -> None:
    whole = run(target, tmp_path, TALKS, settings())
    journal = tmp_path / "rank-00000.jsonl"
    journal.write_bytes(journal.read_bytes()[:-10])
    assert len(AnswerJournal(tmp_path).read()) == len(whole) - 1
    assert run(target, tmp_path, TALKS, settings()) == whole


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    journal = AnswerJournal(tmp_path)
    journal.append([Answer("a", 0, [1], [2])])
    journal.path.write_bytes(b"3\n" + journal.path.read_bytes())
    with pytest.raises(DataError, match=r"line 1 of .*rank-00000\.jsonl is torn"):
        AnswerJournal(tmp_path).read()


def test_a_journal_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"^data\.cache_dir: answers cannot be saved"):
        AnswerJournal(tmp_path / "file" / "answers").append([Answer("a", 0, [1], [2])])


def test_processes_share_the_work(target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talks = [*TALKS, *MULTI]
    alone = run(target, tmp_path / "one", talks, settings(generate_batch_size=2))
    shares = []
    for rank in range(2):
        with monkeypatch.context() as patch:
            sizes = counting(target, patch)
            together = run(target, tmp_path / "two", talks, settings(generate_batch_size=2), rank, 2)
            shares.append(sum(sizes))
    assert together == alone
    assert sum(shares) == len(alone)
    assert min(shares) >= 4
    assert len(list((tmp_path / "two").glob("rank-*.jsonl"))) == 2


def test_the_same_question_is_asked_once(target: HFTarget, tmp_path: Path) -> None:
    answered = replace(TALKS[0], id="again", messages=[TALKS[0].messages[0], {"role": "assistant", "content": "A"}])
    answers = run(target, tmp_path, [TALKS[0], answered], settings())
    assert len(answers) == 1
    assert answered_turns(answered, answers) == answered_turns(TALKS[0], answers)


def test_samples_depend_on_the_seed_and_leave_the_generator_alone(target: HFTarget, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    drawn = [run(target, tmp_path / str(i), TALKS, settings(temperature=1.0, seed=i // 2)) for i in range(3)]
    assert torch.equal(torch.get_rng_state(), before)
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]
    assert drawn[0] != run(target, tmp_path / "greedy", TALKS, settings())


def test_samples_come_from_the_whole_vocabulary(target: HFTarget, tmp_path: Path) -> None:
    """Neither top-k (50 where nothing is set) nor top-p cuts the tail of the target's distribution."""
    talks = [conversation(str(i), f"{'abcdefghij'[i % 10]}{'abcdefghij'[i // 10]}") for i in range(60)]
    answers = run(target, tmp_path, talks, settings(temperature=50.0, max_new_tokens=1, generate_batch_size=60))
    ranks = []
    for answer in answers.values():
        logits = target.model(torch.tensor([answer.prompt_ids])).logits[0, -1]
        ranks.append(int((logits > logits[answer.answer_ids[0]]).sum()))
    assert max(ranks) > 80


def test_a_prompt_without_room_ends_its_conversation(target: HFTarget, tmp_path: Path) -> None:
    longest = target.spec.max_position_embeddings
    talks = [conversation("long", "x" * longest), conversation("second", "hi", "y" * longest, "bye")]
    answers = run(target, tmp_path, talks, settings())
    assert answered_turns(talks[0], answers) == []
    turns = answered_turns(talks[1], answers)
    assert turns is not None
    assert len(turns) == 1
    assert answered_turns(conversation("new", "hello"), answers) is None


def test_a_full_disk_keeps_what_was_written_and_the_next_run_goes_on(target: HFTarget, tmp_path: Path) -> None:
    import resource
    import signal

    whole = run(target, tmp_path / "whole", TALKS, settings())
    size = whole.path.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        # The last of three batches does not fit: a part of it is written, as on a disk that fills up.
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 20, limits[1]))
        with pytest.raises(
            DataError, match=r"^data\.cache_dir: answers cannot be saved, got .*free space and run again"
        ):
            run(target, tmp_path / "full", TALKS, settings())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    kept = len(AnswerJournal(tmp_path / "full").read())
    assert 4 <= kept < len(TALKS)
    assert run(target, tmp_path / "full", TALKS, settings()) == whole
    assert whole.path.read_bytes() == (tmp_path / "full" / whole.path.name).read_bytes()


def test_a_journal_reads_what_others_append_and_each_line_once(tmp_path: Path) -> None:
    mine, others = AnswerJournal(tmp_path), AnswerJournal(tmp_path, rank=1)
    mine.append([Answer("a", 0, [1], [2])])
    others.append([Answer("b", 0, [1], [2], sample=1, finish="length", temperature=0.5, ids_from="text")])
    assert set(mine.read()) == {("a", 0, 0), ("b", 0, 1)}
    with others.path.open("ab") as file:
        file.write(b'["c",0,[1]')  # a line that is being written
    assert len(mine.read()) == 2
    with others.path.open("ab") as file:
        file.write(b",[3]]\n")
    assert mine.read()["c", 0, 0] == Answer("c", 0, [1], [3])
    assert mine["b", 0, 1].temperature == 0.5
    assert mine == AnswerJournal(tmp_path).read()


def test_a_torn_line_is_cut_off_wherever_the_last_newline_is(tmp_path: Path) -> None:
    journal = AnswerJournal(tmp_path)
    journal.append([Answer("a", 0, [1], [2])])
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole + b"x" * (1 << 20) + b"y" * 17)
    AnswerJournal(tmp_path).append([Answer("b", 0, [1], [2])])
    assert journal.path.read_bytes() == whole + whole.replace(b'"a"', b'"b"')
    journal.path.write_bytes(b"torn")
    AnswerJournal(tmp_path).append([Answer("a", 0, [1], [2])])
    assert journal.path.read_bytes() == whole
