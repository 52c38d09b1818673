"""Answers from servers: the target's tokens, each row once, whatever the servers do meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from specdraft.core.errors import ConfigError, DataError
from specdraft.data._answers_config import AnswersConfig
from specdraft.data._config import DataConfig
from specdraft.data.answering import temperature_of
from specdraft.data.chat import ChatRenderer
from specdraft.data.journal import EOS, LENGTH, NO_TOKENS, REFUSED, Answer, AnswerJournal
from specdraft.data.regenerate import answered_turns, conversation_key, regenerate
from specdraft.data.server_client import _retry_after
from specdraft.data.servers import ServerWriter
from specdraft.data.sources import Conversation
from specdraft.targets.facts import TargetFacts
from specdraft.targets.hf import HFTarget
from tests.answer_server import AnswerServer, answer_server, letters
from tests.tiny import tiny_target, tiny_tokenizer
from tests.unit.test_data_regenerate import conversation, greedy

FACTS = TargetFacts("tiny", "tiny", None, (2,), 97, 256)
TALKS = [conversation(str(i), f"question {i}") for i in range(12)]
RENDERER = ChatRenderer(tiny_tokenizer())


def settings(*servers: AnswerServer | str, **changes: Any) -> DataConfig:
    urls = [server if isinstance(server, str) else server.url for server in servers]
    base: dict[str, Any] = {"by": "server", "endpoints": urls, "model": "tiny", "backoff_s": 0.01, "concurrency": 3}
    data = {name: changes.pop(name) for name in ("temperature", "seed", "max_new_tokens") if name in changes}
    return DataConfig(**{"max_new_tokens": 24, **data}, answers=AnswersConfig(**{**base, **changes}))


def run(
    folder: Path, config: DataConfig, talks: list[Conversation] = TALKS, target: HFTarget | None = None
) -> AnswerJournal:
    journal = AnswerJournal(folder)
    regenerate(talks, RENDERER, ServerWriter(config, RENDERER, FACTS, target), journal, config)
    return AnswerJournal(folder).read()


def of(journal: AnswerJournal, talk: Conversation, turn: int = 0, sample: int = 0) -> Answer:
    return journal[conversation_key(talk), turn, sample]


def check_all_once(folder: Path, talks: list[Conversation] = TALKS) -> None:
    """Every conversation has the server's answer, on one line."""
    journal = AnswerJournal(folder).read()
    for talk in talks:
        answer = of(journal, talk)
        assert answer.prompt_ids == RENDERER.prompt_ids(talk.messages[:1])
        assert answer.answer_ids == letters(answer.prompt_ids, 24)
    lines = [line for path in folder.glob("rank-*.jsonl") for line in path.read_bytes().splitlines()]
    assert len(lines) == len(talks) == len(journal)


def test_answers_are_the_servers_token_ids(tmp_path: Path) -> None:
    with answer_server() as server:
        journal = run(tmp_path, settings(server, probes=1))
    check_all_once(tmp_path)
    assert {answer.ids_from for answer in journal.values()} == {"server"}
    assert sum(server.served.values()) == len(TALKS) + 1  # one of them as the probe
    body = server.bodies[-1]
    assert body["prompt"] in [answer.prompt_ids for answer in journal.values()]
    assert (body["temperature"], body["top_p"], body["top_k"], body["repetition_penalty"]) == (0.0, 1.0, -1, 1.0)
    assert body["stop_token_ids"] == [2]
    assert body["max_tokens"] == 24
    assert run(tmp_path, settings(server)) == journal  # nothing is asked: the server is gone


def test_an_answer_cut_by_length_has_no_end(tmp_path: Path) -> None:
    with answer_server() as server:
        journal = run(tmp_path, settings(server, max_new_tokens=3))
    found = {answer.finish for answer in journal.values()}
    assert found == {EOS, LENGTH}
    for answer in journal.values():
        assert (answer.answer_ids[-1] == 2) == (answer.finish == EOS)
        assert len(answer.answer_ids) <= 3


def test_texts_are_tokenised_again_and_counted(tmp_path: Path) -> None:
    with answer_server() as server:
        server.knows = set()
        journal = run(tmp_path / "a", settings(server))
        assert {answer.ids_from for answer in journal.values()} == {"text"}
        check_all_once(tmp_path / "a")
        assert "return_token_ids" not in server.bodies[-1]
        assert server.bodies[-1]["prompt"].endswith("<|im_start|>assistant\n")
        server.text = lambda ids: "a ~ b"  # type: ignore[method-assign]
        journal = run(tmp_path / "b", settings(server, probes=1))
    assert {answer.finish for answer in journal.values()} == {NO_TOKENS}
    assert answered_turns(TALKS[0], journal) == []


@pytest.mark.parametrize("fault", [429, 500, 503, "garbage", "cut", "never"])
def test_what_fails_once_is_asked_again(fault: Any, tmp_path: Path) -> None:
    with answer_server() as server:
        server.faults, server.spared = [fault, fault], 3
        run(tmp_path, settings(server, timeout_s=4.0 if fault == "never" else 60.0, probes=1))
    check_all_once(tmp_path)
    assert len(server.bodies) == len(TALKS) + 1 + 2
    assert sum(server.served.values()) == len(TALKS) + 1 + (2 if fault == "cut" else 0)


def test_a_server_that_says_when_to_come_back_is_left_alone_until_then(tmp_path: Path) -> None:
    with answer_server() as server:
        server.faults, server.spared = [429], 4
        run(tmp_path, settings(server, concurrency=1, probes=1))
    pauses = [later - sooner for sooner, later in zip(server.times, server.times[1:], strict=False)]
    assert pauses[4] >= 0.3


def test_a_date_to_come_back_at_is_by_the_servers_clock() -> None:
    dates = {"Retry-After": "Fri, 31 Dec 1999 23:59:59 GMT", "Date": "Fri, 31 Dec 1999 23:59:29 GMT"}
    assert _retry_after(httpx2.Headers(dates)) == 30.0
    assert _retry_after(httpx2.Headers({"Retry-After": "soon"})) is None
    assert _retry_after(httpx2.Headers({"Retry-After": "-3"})) == 0.0


def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hours = itertools.cycle([40.0, -90.0, 10.0])
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600 * next(hours))
    with answer_server() as server:
        server.faults, server.spared, server.retry_after = [429, 500, "never"], 3, "0.05"
        begin = time.monotonic()
        run(tmp_path, settings(server, timeout_s=4.0, probes=1))
    check_all_once(tmp_path)
    assert time.monotonic() - begin < 30


def test_the_others_do_the_work_of_a_dead_endpoint(tmp_path: Path) -> None:
    with answer_server() as dead:
        pass
    with answer_server() as one, answer_server() as two:
        run(tmp_path, settings(dead, one, two, probes=1))
    check_all_once(tmp_path)
    assert one.served and two.served
    assert sum((one.served + two.served).values()) == len(TALKS) + 2


@pytest.mark.parametrize("first", [0, 6])
def test_servers_that_are_all_dead_end_the_run_and_the_next_one_goes_on(first: int, tmp_path: Path) -> None:
    with answer_server() as server:
        server.spared, server.faults = first and 1 + first, ["never"] * 99
        with pytest.raises(DataError, match=r"^data\.answers\.endpoints: no server answers any more, got http"):
            run(tmp_path, settings(server, timeout_s=1.0, retries=1, concurrency=2, probes=1))
        assert len(AnswerJournal(tmp_path).read()) == first
        server.faults = []
        run(tmp_path, settings(server))
    check_all_once(tmp_path)


def test_a_row_that_always_fails_costs_no_other_row(tmp_path: Path) -> None:
    with answer_server() as server:
        server.breaks = "question 7"
        with pytest.raises(DataError, match=r"1 answers could not be had after 2 retries, got .*HTTP 500"):
            run(tmp_path, settings(server, retries=2))
        assert len(AnswerJournal(tmp_path).read()) == len(TALKS) - 1
        server.breaks, server.bodies = "\0", []
        run(tmp_path, settings(server, probes=1))
        assert len(server.bodies) == 2  # as the probe and as the row
    check_all_once(tmp_path)


def test_a_refused_row_is_counted_and_refusals_without_end_are_an_error(tmp_path: Path) -> None:
    with answer_server() as server:
        server.refuses = "question 7"
        journal = run(tmp_path / "a", settings(server))
        assert of(journal, TALKS[7]).finish == REFUSED
        assert sum(bool(answer.answer_ids) for answer in journal.values()) == len(TALKS) - 1
        server.refuses = "many"
        many = [TALKS[0], *(conversation(str(i), f"many more questions {i}") for i in range(30))]
        with pytest.raises(DataError, match=r"refuses one request after the other, got HTTP 400: .*prompt refused"):
            run(tmp_path / "b", settings(server, probes=1, concurrency=1), many)
    assert len(AnswerJournal(tmp_path / "b").read()) == 1  # what was refused for nothing is asked again


def test_another_model_is_found_out_by_name_and_by_its_tokens(tmp_path: Path) -> None:
    target, other = tiny_target("llama"), tiny_target("llama", seed=1)
    with answer_server(lambda prompt, count: greedy(target, prompt, count)) as server:
        with pytest.raises(ConfigError, match=r"^data\.answers\.model: .* got 'huge'; it serves tiny$"):
            run(tmp_path, settings(server, model="huge"))
        with pytest.raises(ConfigError, match=r"serves another model than target\.name"):
            run(tmp_path, settings(server), target=other)
        assert not len(AnswerJournal(tmp_path).read())
        journal = run(tmp_path, settings(server), target=target)
        assert of(journal, TALKS[3]).answer_ids == greedy(target, of(journal, TALKS[3]).prompt_ids, 24)
    with (
        answer_server(lambda prompt, count: [2000, 2]) as server,
        pytest.raises(ConfigError, match="of a vocabulary of 97"),
    ):
        run(tmp_path / "b", settings(server))


@pytest.mark.parametrize("tells_prompt", [True, False])
def test_a_server_that_changes_the_prompts_tokens_is_refused(tells_prompt: bool, tmp_path: Path) -> None:
    with answer_server() as server:
        server.shift, server.tells_prompt = [1], tells_prompt
        with pytest.raises(ConfigError, match=r"^data\.answers\.prompts: .* changes .* prompts, got 30 for 29 of ours"):
            run(tmp_path, settings(server))
    assert not len(AnswerJournal(tmp_path).read())


def test_the_key_goes_to_the_server_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with answer_server() as server:
        server.key = "sk-secret"
        monkeypatch.setenv("ANSWER_KEY", "sk-secret")
        run(tmp_path, settings(server, api_key_env="ANSWER_KEY"))
        check_all_once(tmp_path)
        assert b"secret" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())
        monkeypatch.setenv("ANSWER_KEY", "sk-other-secret")
        with pytest.raises(ConfigError, match=r"^data\.answers\.api_key_env: the server refused the key") as error:
            run(tmp_path / "b", settings(server, api_key_env="ANSWER_KEY"))
    assert "***" in str(error.value)
    assert "secret" not in caplog.text + str(error.value)
    monkeypatch.delenv("ANSWER_KEY")
    with pytest.raises(ConfigError, match="no such environment variable, got ANSWER_KEY"):
        run(tmp_path / "b", settings(server, api_key_env="ANSWER_KEY"))
    with pytest.raises(ConfigError) as error:
        AnswersConfig(by="server", endpoints=["http://h/v1"], model="m", api_key_env="sk-secret")
    assert "secret" not in str(error.value)


def test_requests_under_way_and_a_minute_are_bounded(tmp_path: Path) -> None:
    with answer_server() as server:
        server.gather, server.spared = 4, 1
        run(tmp_path / "a", settings(server, concurrency=4, probes=1))
        assert server.most_in_flight == 4
        begin = time.monotonic()
        run(tmp_path / "b", settings(server, requests_per_minute=1200.0, probes=1), TALKS[:7])
    assert time.monotonic() - begin >= 6 * 0.05 - 0.01


def test_several_answers_at_several_temperatures(tmp_path: Path) -> None:
    config = settings("http://127.0.0.1:9/v1", samples=3, temperatures=[0.0, 0.7, 1.0], weights=[2.0, 1.0, 1.0])
    with answer_server() as server:
        config = replace(config, answers=replace(config.answers, endpoints=[server.url]))
        journal = run(tmp_path, config)
    assert len(journal) == 3 * len(TALKS)
    for talk in TALKS:
        warm = [of(journal, talk, sample=i).temperature for i in range(3)]
        assert warm.count(0.0) <= 1
    asked = [(tuple(body["prompt"]), body["temperature"], body["seed"]) for body in server.bodies[4:]]
    assert len(set(asked)) == 3 * len(TALKS)
    first = [of(journal, talk).temperature for talk in TALKS]
    assert len(set(first)) == 3
    assert first == [temperature_of(config, conversation_key(talk), 0) for talk in TALKS]


def test_later_turns_follow_the_servers_earlier_answers(tmp_path: Path) -> None:
    talk = conversation("m", "hi", "and then", "bye")
    with answer_server() as server:
        journal = run(tmp_path, settings(server), [talk])
    turns = answered_turns(talk, journal)
    assert turns is not None
    assert len(turns) == 3
    said = RENDERER.tokenizer.decode(turns[0].answer_ids, skip_special_tokens=True)
    messages: list[Any] = [talk.messages[0], {"role": "assistant", "content": said}, talk.messages[2]]
    assert turns[1].prompt_ids == RENDERER.prompt_ids(messages)
    assert turns[1].answer_ids == letters(turns[1].prompt_ids, 24)


@pytest.mark.parametrize("api", ["chat", "llamacpp"])
def test_other_routes(api: str, tmp_path: Path) -> None:
    with answer_server() as server:
        journal = run(tmp_path, settings(server, api=api))
        check_all_once(tmp_path)
        assert {answer.ids_from for answer in journal.values()} == {"server"}
        if api == "chat":
            assert server.bodies[-1]["messages"][0]["role"] == "user"
            server.shift = [1]
            journal = run(tmp_path / "b", settings(server, api=api))
            assert {answer.ids_from for answer in journal.values()} == {"server, other prompt"}


def _answer_slowly(url: str, folder: Path) -> None:
    run(folder, settings(url, concurrency=1, probes=1))


def test_a_killed_run_is_continued_without_loss_or_repetition(tmp_path: Path) -> None:
    with answer_server() as server:
        server.hold_after = 5
        process = multiprocessing.get_context("fork").Process(target=_answer_slowly, args=(server.url, tmp_path))
        process.start()
        journal, until = AnswerJournal(tmp_path), time.monotonic() + 60
        while len(journal.read()) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        kept = len(AnswerJournal(tmp_path).read())
        assert 3 <= kept < len(TALKS)
        file = tmp_path / "rank-00000.jsonl"
        file.write_bytes(file.read_bytes() + b'["half a li')
        server.hold_after, server.bodies = None, []
        server.release.set()
        run(tmp_path, settings(server, probes=1))
        assert len(server.bodies) == 1 + len(TALKS) - kept
    check_all_once(tmp_path)


def test_a_disk_that_is_full_ends_the_requests_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: AnswerJournal, answers: Any) -> None:
        raise DataError("data.cache_dir: answers cannot be saved")

    with answer_server() as server:
        server.hold_after = 2
        with monkeypatch.context() as patch:
            patch.setattr(AnswerJournal, "append", full)
            with pytest.raises(DataError, match="cannot be saved"):
                run(tmp_path, settings(server, concurrency=1, probes=1), TALKS)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("specdraft-answers")]
        assert len(server.bodies) < len(TALKS)
        server.hold_after = None
        run(tmp_path, settings(server))
    check_all_once(tmp_path)


def test_inside_an_event_loop_as_in_a_notebook(tmp_path: Path) -> None:
    async def cell() -> None:
        run(tmp_path, settings(server))

    with answer_server() as server:
        asyncio.run(cell())
    check_all_once(tmp_path)
