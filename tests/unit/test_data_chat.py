"""Rendering with chat templates: what is supervised, where the prompt ends, and which templates are refused."""

from __future__ import annotations

import pytest

from specdraft.core.errors import ConfigError, DataError
from specdraft.data.chat import (
    ChatRenderer,
    TemplateRefusedError,
    TokenRow,
    Turn,
    join_turns,
    pad_token_id,
    tokenizer_hash,
)
from tests.tiny import tiny_tokenizer
from tests.unit import data_helpers as h

SIX_TURNS = h.talk("hello", "yes you", "how?", "hey hello", "bye", "so long", system="Be kind")

STYLES = {
    "chatml": (h.chat_tokenizer, h.CHATML, "<|im_end|>", "<|im_end|>"),
    "llama3": (h.chat_tokenizer, h.LLAMA3, "<|eot|>", "<|eot|>"),
    "gemma": (h.chat_tokenizer, h.GEMMA, "<end_of_turn>", "</s>"),
    "mistral": (h.chat_tokenizer, h.MISTRAL, "</s>", "</s>"),
    "tagged": (h.chat_tokenizer, h.TAGGED, "<|im_end|>", "<|im_end|>"),
    "upper_user": (h.chat_tokenizer, h.UPPER_USER, "<|im_end|>", "<|im_end|>"),
    "plain": (h.chat_tokenizer, h.PLAIN, "<|im_end|>", "<|im_end|>"),
}


def renderer_of(style: str) -> tuple[ChatRenderer, str]:
    make, template, end, eos = STYLES[style]
    return ChatRenderer(make(template, eos)), end


def messages_for(style: str) -> list[dict[str, str | None]]:
    return SIX_TURNS[1:] if style in ("gemma", "mistral") else SIX_TURNS


@pytest.mark.parametrize("style", STYLES)
def test_exactly_the_answers_and_their_end_of_turn_are_supervised(style: str) -> None:
    renderer, end = renderer_of(style)
    rows = renderer.rows(messages_for(style))
    texts = [text for row in rows for text in h.runs(row, renderer.tokenizer)]
    assert [text.strip(" ") for text in texts] == [f"{a}{end}" for a in ("yes you", "hey hello", "so long")]
    assert renderer.tokenizer.convert_tokens_to_ids(end) in renderer.end_of_turn_ids


@pytest.mark.parametrize("style", STYLES)
def test_every_supervised_answer_follows_the_ids_of_its_generation_prompt(style: str) -> None:
    renderer, _ = renderer_of(style)
    messages = messages_for(style)
    rows = renderer.rows(messages)
    prompts = [renderer.prompt_ids(messages[:i]) for i, m in enumerate(messages) if m["role"] == "assistant"]
    for prompt in prompts:
        matching = [row for row in rows if row.input_ids[: len(prompt)] == prompt]
        assert matching
        assert any(row.loss_mask[len(prompt)] and not row.loss_mask[len(prompt) - 1] for row in matching)


@pytest.mark.parametrize("style", ["chatml", "llama3", "gemma", "mistral", "tagged", "upper_user"])
def test_a_conversation_is_one_row_equal_to_the_template_text(style: str) -> None:
    renderer, _ = renderer_of(style)
    messages = messages_for(style)
    (row,) = renderer.rows(messages)
    text = renderer.tokenizer.apply_chat_template(messages, tokenize=False)
    assert renderer.tokenizer.decode(row.input_ids, skip_special_tokens=False) == text.rstrip()
    assert row.input_ids == renderer.tokenizer(text.rstrip(), add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("style", ["llama3", "gemma", "mistral"])
def test_one_bos_and_no_other(style: str) -> None:
    renderer, _ = renderer_of(style)
    bos = renderer.tokenizer.bos_token_id
    row = renderer.row(messages_for(style))
    assert row.input_ids[0] == bos
    assert row.input_ids.count(bos) == 1
    # The usual mistake: text that holds BOS already, tokenised with the special tokens of plain text.
    text = renderer.tokenizer.apply_chat_template(messages_for(style), tokenize=False)
    assert renderer.tokenizer(text)["input_ids"][:2] == [bos, bos]


def test_bos_that_opens_every_turn_is_no_fault() -> None:
    tokenizer = tiny_tokenizer()
    row = ChatRenderer(tokenizer).row(h.talk("hi", "yo", "so", "no"))
    assert row.input_ids.count(tokenizer.bos_token_id) == 4


def test_bos_written_twice_by_the_template_is_refused() -> None:
    renderer = ChatRenderer(h.chat_tokenizer("{{ bos_token }}" + h.LLAMA3, "<|eot|>"))
    with pytest.raises(DataError, match="two BOS tokens"):
        renderer.prompt_ids(h.talk("hi"))


def test_whitespace_after_the_end_of_turn_is_context() -> None:
    renderer, _ = renderer_of("chatml")
    row = renderer.row(h.talk("hi", "yo", "so", "no"))
    assert h.runs(row, renderer.tokenizer, supervised=False)[1].startswith("\n<|im_start|>user")
    assert row.input_ids[-1] == renderer.tokenizer.eos_token_id


@pytest.mark.parametrize("style", STYLES)
def test_answers_that_end_in_spaces(style: str) -> None:
    renderer, end = renderer_of(style)
    row = renderer.row(h.talk("hi", "yes you  "))
    (text,) = h.runs(row, renderer.tokenizer)
    assert text.endswith(end)
    assert text.removesuffix(end).strip() == "yes you"


def test_the_first_answer_of_tagged_templates_does_not_run_to_the_end() -> None:
    renderer, _ = renderer_of("tagged")
    row = renderer.row(h.talk("a", "b ", "c", "d"))
    assert h.runs(row, renderer.tokenizer) == ["b <|im_end|>", "d<|im_end|>"]
    assert renderer.mask_sources == {"generation tags": 2}


def test_tags_that_mark_nothing_are_named() -> None:
    renderer = ChatRenderer(h.chat_tokenizer(h.EMPTY_TAGS))
    row = renderer.row(h.talk("a", "b"))
    assert h.runs(row, renderer.tokenizer) == ["b<|im_end|>"]
    assert renderer.mask_sources == {"prefix (generation tags mark nothing)": 1}


def test_untagged_templates_are_rendered_by_prefix() -> None:
    renderer, _ = renderer_of("llama3")
    renderer.row(SIX_TURNS)
    assert not renderer.has_generation_tags
    assert renderer.mask_sources == {"prefix": 3}


def test_history_without_thinking_gives_a_row_for_each_answer() -> None:
    renderer = ChatRenderer(h.chat_tokenizer(h.THINKING))
    thought = ["<think>\nhm\n</think>\n\nyes", "<think>\noh\n</think>\n\nno"]
    messages = h.talk("a", thought[0], "b", thought[1])
    rows = renderer.rows(messages)
    assert [h.runs(row, renderer.tokenizer) for row in rows] == [[f"{t}<|im_end|>"] for t in thought]
    # The second row's history is what the template shows when the second answer is written.
    assert rows[1].input_ids[: rows[1].loss_mask.index(True)] == renderer.prompt_ids(messages[:3])
    assert "hm" not in renderer.tokenizer.decode(rows[1].input_ids)


def test_a_thinking_block_put_in_by_the_template_is_not_supervised() -> None:
    tokenizer = h.chat_tokenizer(h.THINKING)
    for thinking in (None, True, False):
        row = ChatRenderer(tokenizer, enable_thinking=thinking).row(h.talk("a", "yes"))
        assert h.runs(row, tokenizer) == ["yes<|im_end|>"], thinking
        assert "<think>\n\n</think>" in tokenizer.decode(row.input_ids)


def test_an_answer_is_appended_where_the_template_treats_the_last_turn_differently() -> None:
    renderer = ChatRenderer(h.chat_tokenizer(h.OPENS_THINKING))
    messages = h.talk("a", "hm</think>yes")
    row = renderer.row(messages)
    assert h.runs(row, renderer.tokenizer) == ["hm</think>yes<|im_end|>"]
    assert row.input_ids[: row.loss_mask.index(True)] == renderer.prompt_ids(messages[:1])
    assert renderer.mask_sources == {"appended": 1}


def test_a_template_whose_answers_cannot_be_found_is_an_error() -> None:
    renderer = ChatRenderer(h.chat_tokenizer(h.UPPER_ANSWER))
    assert renderer.end_of_turn is None
    with pytest.raises(DataError, match="alters answers"):
        renderer.rows(h.talk("a", "b"))


def test_a_token_across_the_prompt_boundary_is_split_as_in_decoding() -> None:
    renderer, _ = renderer_of("plain")
    messages = h.talk("a", "hello")
    tokenizer = renderer.tokenizer
    prompt = renderer.prompt_ids(messages[:1])
    whole = tokenizer("user: a<|im_end|>assistant: hello<|im_end|>", add_special_tokens=False)["input_ids"]
    assert whole[: len(prompt)] != prompt  # the space merges with the answer's first letters
    row = renderer.row(messages)
    assert row.input_ids[: len(prompt)] == prompt
    assert h.runs(row, tokenizer) == ["hello<|im_end|>"]


def test_no_space_is_put_before_an_answer_tokenised_alone() -> None:
    tokenizer = h.metaspace_tokenizer(h.PLAIN.replace("<|im_end|>", "</s>"))
    row = ChatRenderer(tokenizer).row(h.talk("a", "hello"))
    start = row.loss_mask.index(True)
    assert tokenizer.convert_ids_to_tokens(row.input_ids[start:]) == ["h", "e", "l", "l", "o", "</s>"]
    # In Mistral's template the space is part of the answer.
    tokenizer = h.metaspace_tokenizer(h.MISTRAL)
    row = ChatRenderer(tokenizer).row(h.talk("a", "hello"))
    assert tokenizer.convert_ids_to_tokens(row.input_ids[row.loss_mask.index(True) :])[:2] == ["▁h", "e"]


def test_truncation_cuts_ids_and_mask_together() -> None:
    renderer, _ = renderer_of("chatml")
    row = renderer.row(h.talk("a", "hello hello"))
    start = row.loss_mask.index(True)
    cut = row.truncate(start + 3)
    assert cut is not None
    assert (len(cut.input_ids), cut.loss_mask[start:]) == (start + 3, [True] * 3)
    assert "hello hello".startswith(h.runs(cut, renderer.tokenizer)[0])
    assert row.truncate(start) is None


def test_loss_on_the_last_answer_only() -> None:
    renderer, _ = renderer_of("chatml")
    row = renderer.row(SIX_TURNS, "last")
    assert h.runs(row, renderer.tokenizer) == ["so long<|im_end|>"]
    assert row.input_ids == renderer.row(SIX_TURNS).input_ids


def test_rows_end_before_an_unwritten_answer() -> None:
    renderer, _ = renderer_of("chatml")
    messages = [*h.talk("a", "b", "c"), {"role": "assistant", "content": None}]
    (row,) = renderer.rows(messages)
    assert h.runs(row, renderer.tokenizer) == ["b<|im_end|>"]
    assert renderer.rows(messages[2:]) == []
    with pytest.raises(DataError, match=r"data\.regenerate=true"):
        renderer.row(messages[2:])


def test_system_message_for_conversations_that_bring_none() -> None:
    tokenizer = h.chat_tokenizer(h.CHATML)
    renderer = ChatRenderer(tokenizer, system="Be kind")
    assert "Be kind" in tokenizer.decode(renderer.prompt_ids(h.talk("hi")))
    assert "Be kind" not in tokenizer.decode(renderer.prompt_ids(h.talk("hi", system="Own")))
    assert "Be kind" in tokenizer.decode(renderer.row(h.talk("hi", "yo")).input_ids)


def test_a_conversation_the_template_refuses() -> None:
    renderer, _ = renderer_of("gemma")
    with pytest.raises(TemplateRefusedError, match="System role not supported"):
        renderer.prompt_ids(h.talk("hi", system="Be kind"))


def test_a_tokenizer_without_chat_template_is_an_error() -> None:
    with pytest.raises(DataError, match=r"^target\.name: the tokenizer has no chat template.*instruction-tuned"):
        ChatRenderer(h.chat_tokenizer(None))


def test_the_thinking_switch_changes_the_hash_and_needs_a_template_that_has_it() -> None:
    tokenizer = h.chat_tokenizer(h.THINKING)
    hashes = {ChatRenderer(tokenizer, enable_thinking=on).template_hash for on in (None, True, False)}
    hashes.add(ChatRenderer(tokenizer, system="Be kind").template_hash)
    assert len(hashes) == 4
    with pytest.raises(ConfigError, match=r"data\.enable_thinking: .* got True"):
        ChatRenderer(h.chat_tokenizer(h.CHATML), enable_thinking=True)


def test_join_turns_keeps_generated_ids_as_they_are() -> None:
    first = Turn([1, 2], [3, 4], [True, True])
    follows = Turn([1, 2, 3, 4, 9], [5], [True])
    other = Turn([1, 2, 34, 9], [5], [True])
    assert join_turns([first, follows]) == [TokenRow([1, 2, 3, 4, 9, 5], [False, False, True, True, False, True])]
    assert [row.input_ids for row in join_turns([first, other])] == [[1, 2, 3, 4], [1, 2, 34, 9, 5]]
    assert join_turns([first, other], "last") == [TokenRow([1, 2, 34, 9, 5], [False] * 4 + [True])]
    assert join_turns([]) == []


def test_tokenizers_are_told_apart_and_padded() -> None:
    chatml = h.chat_tokenizer(h.CHATML)
    assert tokenizer_hash(chatml) == tokenizer_hash(h.chat_tokenizer(h.GEMMA))
    assert tokenizer_hash(chatml) != tokenizer_hash(h.metaspace_tokenizer(h.CHATML))
    assert pad_token_id(chatml) == chatml.pad_token_id
    chatml.pad_token = None
    assert pad_token_id(chatml) == chatml.eos_token_id
    chatml.eos_token = None
    assert pad_token_id(chatml) == 0
