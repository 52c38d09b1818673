"""What is sent to OpenAI-compatible servers and to llama.cpp's own route, and what their replies say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdraft.data._answers_config import AnswersConfig
from specdraft.data.answering import Job
from specdraft.data.chat import ChatRenderer
from specdraft.data.journal import EOS, LENGTH
from specdraft.data.server_client import FaultError, RefusedError


@dataclass(frozen=True)
class Form:
    """How a request is put. ids: the prompt as token ids, else as text. extras: with fields beyond OpenAI's own."""

    ids: bool
    extras: bool

    def __str__(self) -> str:
        return f"prompts as {'ids' if self.ids else 'text'}{'' if self.extras else ', OpenAI fields only'}"


@dataclass(frozen=True)
class Reply:
    """An answer as a server tells it: its token ids or None, its text, how it ended, and what it says of the prompt.

    prompt_ids, num_prompt, num_tokens: None where it does not tell. lacks_text: part of the answer is elsewhere.
    """

    ids: list[int] | None
    text: str
    finish: str
    prompt_ids: list[int] | None
    num_prompt: int | None
    num_tokens: int | None
    lacks_text: bool = False


def forms(settings: AnswersConfig) -> list[Form]:
    """The forms that may be tried with a server, the best one first."""
    if settings.api == "llamacpp":
        return [Form(settings.prompts != "text", True)]
    kinds = {"auto": (True, False), "ids": (True,), "text": (False,)}[settings.prompts]
    kinds = (False,) if settings.api == "chat" else kinds
    return [Form(ids, extras) for extras in (True, False) for ids in kinds]


class Route:
    """Requests and replies of one kind of route.

    Args:
        settings: which one, and the model's name.
        renderer: our own template.
        eos_token_ids: where the target ends.
        max_new_tokens: of an answer.
    """

    def __init__(
        self, settings: AnswersConfig, renderer: ChatRenderer, eos_token_ids: Sequence[int], max_new_tokens: int
    ) -> None:
        self.settings = settings
        self.renderer = renderer
        self.eos = list(eos_token_ids)
        self.max_new_tokens = max_new_tokens

    def url(self, endpoint: str) -> str:
        """Where requests go."""
        base = endpoint.rstrip("/")
        if self.settings.api == "llamacpp":
            return base.removesuffix("/v1") + "/completion"
        return base + ("/chat/completions" if self.settings.api == "chat" else "/completions")

    def request(self, job: Job, form: Form, max_new_tokens: int | None = None) -> dict[str, Any]:
        """The body that asks for ``job``. Every setting of sampling is spelled out: servers have defaults of their own."""
        count = max_new_tokens or self.max_new_tokens
        body: dict[str, Any] = {
            "model": self.settings.model,
            "temperature": job.temperature,
            "top_p": 1.0,
            "seed": job.seed,
            "stream": False,
        }
        if self.settings.api == "chat":
            body |= {"messages": self.renderer.as_sent(job.messages), "max_tokens": count}
        else:
            prompt = job.prompt_ids if form.ids else self.renderer.prompt_text(job.messages)
            body |= {"prompt": prompt, ("n_predict" if self.settings.api == "llamacpp" else "max_tokens"): count}
        if self.settings.api == "llamacpp":
            return body | {"return_tokens": True, "top_k": 0, "min_p": 0.0, "typical_p": 1.0, "repeat_penalty": 1.0}
        if form.extras:
            body |= {
                "return_token_ids": True,
                "stop_token_ids": self.eos,
                "skip_special_tokens": False,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
            }
            if self.settings.api == "completions" and not form.ids:
                body["add_special_tokens"] = False
            if self.settings.api == "chat" and self.renderer.template_arguments:
                body["chat_template_kwargs"] = self.renderer.template_arguments
        return body

    def read(self, value: dict[str, Any]) -> Reply:
        """What a reply says.

        Raises:
            FaultError: it is not of the form that was asked for, or the answer was broken off.
            RefusedError: the server filtered the answer.
        """
        return _llamacpp(value) if self.settings.api == "llamacpp" else _openai(value, self.settings.api == "chat")


def _openai(value: dict[str, Any], chat: bool) -> Reply:
    choices = value.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise FaultError(f"the reply has no choice, got keys {sorted(value)}")
    choice = choices[0]
    lacks_text = False
    text = choice.get("text")
    if chat:
        message = choice.get("message")
        if not isinstance(message, dict):
            raise FaultError("the reply has no message")
        text = message.get("content") or ""
        lacks_text = any(message.get(name) for name in ("reasoning_content", "reasoning", "tool_calls"))
    ids = _ids(choice.get("token_ids"))
    if not isinstance(text, str):
        raise FaultError("the reply has no text")
    usage = value.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    # vLLM puts the ids of a chat's prompt beside the choices.
    prompt_ids = _ids(choice.get("prompt_token_ids") or value.get("prompt_token_ids"))
    finish = _finish(choice.get("finish_reason"), {"stop": EOS, "length": LENGTH, "tool_calls": EOS})
    counts = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    return Reply(ids, text, finish, prompt_ids, *counts, lacks_text)


def _llamacpp(value: dict[str, Any]) -> Reply:
    ids, text = _ids(value.get("tokens")), value.get("content")
    if not isinstance(text, str) or value.get("stop") is not True:
        raise FaultError(f"the reply has no whole answer, got keys {sorted(value)}")
    finish = _finish(value.get("stop_type"), {"eos": EOS, "limit": LENGTH})
    counts = _count(value.get("tokens_evaluated")), _count(value.get("tokens_predicted"))
    # An empty list is what a build without return_tokens writes.
    return Reply(ids if ids or not text else None, text, finish, None, *counts)


def _finish(reason: Any, known: dict[str, str]) -> str:
    if reason == "content_filter":
        raise RefusedError("the server filtered the answer")
    if not isinstance(reason, str) or reason not in known:
        raise FaultError(f"the answer was broken off, finish reason {reason!r}")
    return known[reason]


def _ids(value: Any) -> list[int] | None:
    """A list of token ids; None where there is none."""
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        raise FaultError("the reply has token ids that are none")
    return value


def _count(value: Any) -> int | None:
    return value if type(value) is int else None
