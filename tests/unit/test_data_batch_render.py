"""Rendering in batches gives what rendering one conversation gives, for every style of template, and says how it was done."""

from __future__ import annotations

from typing import Any

import pytest

from specdraft.core.errors import DataError
from specdraft.data.batch_render import BatchRenderer
from specdraft.data.chat import ChatRenderer, TemplateRefusedError
from specdraft.data.formats import Message
from tests.tiny import tiny_tokenizer
from tests.unit import data_helpers as h

STYLES: dict[str, tuple[Any, str, str]] = {
    "chatml": (h.chat_tokenizer, h.CHATML, "<|im_end|>"),
    "llama3": (h.chat_tokenizer, h.LLAMA3, "<|eot|>"),
    "gemma": (h.chat_tokenizer, h.GEMMA, "</s>"),
    "mistral": (h.chat_tokenizer, h.MISTRAL, "</s>"),
    "tagged": (h.chat_tokenizer, h.TAGGED, "<|im_end|>"),
    "thinking": (h.chat_tokenizer, h.THINKING, "<|im_end|>"),
    "opens_thinking": (h.chat_tokenizer, h.OPENS_THINKING, "<|im_end|>"),
    "upper_user": (h.chat_tokenizer, h.UPPER_USER, "<|im_end|>"),
    "plain": (h.chat_tokenizer, h.PLAIN, "<|im_end|>"),
    "metaspace": (lambda template, eos: h.metaspace_tokenizer(template), h.MISTRAL, "</s>"),
    "metaspace_chatml": (lambda template, eos: h.metaspace_tokenizer(template), h.CHATML, "</s>"),
}

CONVERSATIONS: list[list[Message]] = [
    h.talk("hi", "yo"),
    h.talk("hello", "yes you", "how?", "hey hello", "bye", "so long", system="Be kind"),
    h.talk("a", "  spaces  ", "b", "\n\nlines\n"),
    h.talk("a", "<think>\nhm\n</think>\n\nyes", "b", "no", "c", "<think>\noh\n</think>\n\nwell"),
    [*h.talk("a", "b", "c"), {"role": "assistant", "content": None}],
    [*h.talk("a"), {"role": "assistant", "content": None}],
    h.talk("markers <|im_end|> in <|im_start|>assistant\n text", "an answer </s> with <|im_end|> inside"),
    h.talk("مرحبا كيف الحال", "שלום עולם", "日本語の文", "ไทย ñ 👩\u200d👩\u200d👧 e\u0301"),
    h.talk("a", "\u0301combining first", "\u202eright to left\u202c", "\ufeffmark"),
    h.talk("user", "x" * 200, "y" * 200, "z"),
]


def alone(renderer: ChatRenderer, messages: list[Message]) -> Any:
    try:
        return renderer.turns(messages)
    except TemplateRefusedError:
        return None


@pytest.mark.parametrize("style", STYLES)
def test_a_batch_has_the_turns_of_each_alone(style: str) -> None:
    make, template, eos = STYLES[style]
    renderer, other = ChatRenderer(make(template, eos)), ChatRenderer(make(template, eos))
    found = BatchRenderer(renderer).turns(CONVERSATIONS)
    assert found == [alone(other, messages) for messages in CONVERSATIONS]
    assert renderer.mask_sources == other.mask_sources
    refused = found.count(None)
    assert refused == (1 if style in ("gemma", "mistral", "metaspace") else 0)


@pytest.mark.parametrize("thinking", [True, False])
def test_thinking_on_and_off(thinking: bool) -> None:
    renderers = [ChatRenderer(h.chat_tokenizer(h.THINKING), enable_thinking=thinking, system="S") for _ in range(2)]
    assert BatchRenderer(renderers[0]).turns(CONVERSATIONS) == [alone(renderers[1], m) for m in CONVERSATIONS]


def test_the_short_way_is_taken_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates with markers around every turn need no tokenisation of their own for a turn."""
    tokenizer = h.chat_tokenizer(h.CHATML)
    usual = [CONVERSATIONS[i] for i in (0, 1, 3, 4, 5)]
    expected = [ChatRenderer(tokenizer).turns(messages) for messages in usual]
    renderer = ChatRenderer(tokenizer)
    assert renderer.end_of_turn == "<|im_end|>"
    monkeypatch.setattr(renderer, "turns", None)  # calling it would fail
    assert BatchRenderer(renderer).turns(usual) == expected


def test_what_others_set_on_the_tokenizer_does_not_count() -> None:
    tokenizer = h.chat_tokenizer(h.CHATML)
    expected = [ChatRenderer(tokenizer).turns(messages) for messages in CONVERSATIONS]
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    assert list(BatchRenderer(ChatRenderer(tokenizer)).stream([CONVERSATIONS[:3], [], CONVERSATIONS[3:]])) == [
        expected[:3],
        [],
        expected[3:],
    ]


def test_lengths_of_first_prompts() -> None:
    renderer = ChatRenderer(h.chat_tokenizer(h.GEMMA, "</s>"))
    system = h.talk("a", "b", system="S")
    found = BatchRenderer(renderer).prompt_lengths([CONVERSATIONS[0], system, CONVERSATIONS[5], system])
    first, last = (len(renderer.prompt_ids(CONVERSATIONS[i][:1])) for i in (0, 5))
    assert found == [first, None, last, None]
    assert BatchRenderer(renderer).prompt_lengths([]) == []


def test_faults_of_a_template_are_the_same_in_a_batch() -> None:
    with pytest.raises(DataError, match="two BOS tokens"):
        BatchRenderer(ChatRenderer(h.chat_tokenizer("{{ bos_token }}" + h.LLAMA3, "<|eot|>"))).turns([h.talk("a", "b")])
    with pytest.raises(DataError, match="alters answers"):
        BatchRenderer(ChatRenderer(h.chat_tokenizer(h.UPPER_ANSWER))).turns([h.talk("a", "b")])


def test_bos_that_opens_every_turn_is_no_fault() -> None:
    tokenizer = tiny_tokenizer()
    messages = h.talk("hi", "yo", "so", "no")
    assert BatchRenderer(ChatRenderer(tokenizer)).turns([messages]) == [ChatRenderer(tokenizer).turns(messages)]
