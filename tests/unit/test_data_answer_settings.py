"""Settings of answers that do not fit, and replies whose form does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specdraft.core.errors import ConfigError
from specdraft.data._answers_config import AnswersConfig
from specdraft.data._config import DataConfig
from specdraft.data.chat import ChatRenderer
from specdraft.data.server_client import FaultError
from specdraft.data.server_route import Route
from tests.answer_server import AnswerServer
from tests.tiny import tiny_tokenizer

RENDERER = ChatRenderer(tiny_tokenizer())


def settings(*servers: AnswerServer | str, **changes: Any) -> DataConfig:
    urls = [server if isinstance(server, str) else server.url for server in servers]
    base: dict[str, Any] = {"by": "server", "endpoints": urls, "model": "tiny", "backoff_s": 0.01, "concurrency": 3}
    data = {name: changes.pop(name) for name in ("temperature", "seed", "max_new_tokens") if name in changes}
    return DataConfig(**{"max_new_tokens": 24, **data}, answers=AnswersConfig(**{**base, **changes}))


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"choices": []},
        {"choices": ["text"]},
        {"choices": [{"text": "a", "finish_reason": None}]},
        {"choices": [{"text": "a", "finish_reason": "abort"}]},
        {"choices": [{"text": 3, "finish_reason": "stop"}]},
        {"choices": [{"text": "a", "finish_reason": "stop", "token_ids": ["1"]}]},
        {"choices": [{"text": "a", "finish_reason": "stop", "token_ids": [-1]}]},
    ],
)
def test_a_reply_of_another_form_is_a_fault(value: dict[str, Any]) -> None:
    with pytest.raises(FaultError):
        Route(settings("http://h/v1").answers, RENDERER, [2], 8).read(value)


def test_a_chats_thinking_that_stands_elsewhere_is_noticed() -> None:
    route = Route(settings("http://h/v1", api="chat").answers, RENDERER, [2], 8)
    message = {"content": "a", "reasoning_content": "hm"}
    assert route.read({"choices": [{"message": message, "finish_reason": "stop"}]}).lacks_text
    del message["reasoning_content"]
    assert not route.read({"choices": [{"message": message, "finish_reason": "stop"}]}).lacks_text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"by": "robot"}, r"^data\.answers\.by: unknown, got 'robot'"),
        ({"by": "server"}, r"^data\.answers\.endpoints: are needed"),
        ({"by": "server", "endpoints": ["http://h/v1"]}, r"^data\.answers\.model: is needed"),
        ({"endpoints": ["http://h/v1"]}, r"^data\.answers\.endpoints: has no effect"),
        ({"by": "server", "model": "m", "endpoints": ["h:8000"]}, r"^data\.answers\.endpoints: is no http address"),
        ({"by": "server", "model": "m", "endpoints": ["http://a/v1", "http://a/v1/"]}, "given twice"),
        ({"by": "vllm", "head": "x"}, r"^data\.answers\.head"),
        ({"samples": 0}, r"^data\.answers\.samples: must be at least 1, got 0"),
        ({"timeout_s": float("nan")}, r"^data\.answers\.timeout_s: .* got nan"),
        ({"temperatures": [0.5, -1.0]}, r"^data\.answers\.temperatures: .* got -1\.0"),
        ({"temperatures": [0.5], "weights": [1.0, 2.0]}, r"^data\.answers\.weights: must be one for each"),
        ({"max_suspect_share": 2.0}, r"^data\.answers\.max_suspect_share: .* got 2\.0"),
    ],
)
def test_settings_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AnswersConfig(**changes)


def test_settings_that_do_not_fit_the_datas() -> None:
    with pytest.raises(ConfigError, match=r"^data\.answers\.samples: the greedy answer is always the same, got 2"):
        DataConfig(answers=AnswersConfig(samples=2))
    with pytest.raises(ConfigError, match=r"^data\.answers\.samples: has no effect with data\.regenerate=false"):
        DataConfig(regenerate=False, temperature=1.0, answers=AnswersConfig(samples=2))
    with pytest.raises(ConfigError, match=r"^data\.temperature: has no effect beside"):
        DataConfig(temperature=1.0, answers=AnswersConfig(temperatures=[0.5]))


def test_a_key_in_an_address_is_not_repeated() -> None:
    with pytest.raises(ConfigError, match=r"^data\.answers\.endpoints: an address must not hold") as error:
        AnswersConfig(by="server", model="m", endpoints=["http://me:secret@h/v1"])
    assert "secret" not in str(error.value)


def test_identity_holds_what_decides_answers_and_not_how_they_are_had() -> None:
    assert AnswersConfig().identity() == {}
    base = AnswersConfig(by="server", model="m", endpoints=["http://a/v1"])
    assert base.identity() == replace(base, endpoints=["http://b/v1"], concurrency=1, retries=0).identity()
    assert base.identity() != replace(base, model="n").identity()
    assert base.identity() != replace(base, temperatures=[1.0]).identity()
