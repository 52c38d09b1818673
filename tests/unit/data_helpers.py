"""Chat templates in the styles of well-known models, small tokenizers for them, and readers of loss masks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from specdraft.data.chat import TokenRow
from specdraft.data.formats import Message

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% set text = '<|head|>' + m['role'] + '<|/head|>\n\n' + m['content'] | trim + '<|eot|>' %}"
    "{% if loop.first %}{% set text = bos_token + text %}{% endif %}{{ text }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}"
    "{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles') }}{% endif %}{% endfor %}"
)
# The tag is closed before the end-of-turn token, as in many templates.
TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
    "{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EMPTY_TAGS = CHATML + "{% generation %}{% endgeneration %}"
# Thinking is kept in the last turn and stripped from earlier ones; without thinking an empty block is put in.
THINKING = (
    "{% for m in messages %}{% set text = m['content'] %}"
    "{% if m['role'] == 'assistant' and '</think>' in text and not loop.last %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}"
    "{% elif m['role'] == 'assistant' and '</think>' not in text and loop.last %}"
    "{% set text = '<think>\n\n</think>\n\n' + text %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + text + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
# The generation prompt opens a thinking block which no finished turn shows.
OPENS_THINKING = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
UPPER_USER = (
    "{% for m in messages %}{% set text = m['content'] | upper if m['role'] == 'user' else m['content'] %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + text + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
UPPER_ANSWER = (
    "{% for m in messages %}{% set text = m['content'] | upper if m['role'] == 'assistant' else m['content'] %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + text + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# No special tokens around the answer, and a space at the end of the prompt that merges with the first word.
PLAIN = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

SPECIALS = (
    "<pad>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|head|>",
    "<|/head|>",
    "<|eot|>",
    "<start_of_turn>",
    "<end_of_turn>",
)


def chat_tokenizer(template: str | None, eos: str = "<|im_end|>", bos: str = "<s>") -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges that cross word boundaries; plain text gets BOS, as in Llama's tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "h"), ("Ġ", "y"), ("e", "l"), ("l", "o"), ("Ċ", "Ċ"), ("Ġh", "el")]
    tokens = [*SPECIALS, *alphabet, *(a + b for a, b in merges)]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    # Line breaks stay together, as in the tokenizers of Llama 3 and Qwen.
    words = pre_tokenizers.Split(tokenizers.Regex(r"\s*[\r\n]+| ?[^\s]+|\s+"), "isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_only])
    backend.decoder = decoders.ByteLevel()
    return _finish(backend, vocab, template, eos, bos)


def metaspace_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Characters with a space before every text, in the style of SentencePiece models."""
    characters = ["▁", "\n", *(chr(c) for c in range(0x21, 0x7F))]
    merges = [("▁", "h"), ("▁", "y")]
    tokens = [*SPECIALS, "<unk>", *characters, *(a + b for a, b in merges)]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    return _finish(backend, vocab, template, "</s>", "<s>")


def _finish(
    backend: tokenizers.Tokenizer, vocab: dict[str, int], template: str | None, eos: str, bos: str
) -> PreTrainedTokenizerFast:
    backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, vocab[bos])])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token="<pad>", extra_special_tokens=list(SPECIALS)
    )
    tokenizer.chat_template = template
    return tokenizer


def talk(*texts: str, system: str | None = None) -> list[Message]:
    """Messages from alternating user and assistant texts."""
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return [*messages, *({"role": roles[i % 2], "content": text} for i, text in enumerate(texts))]


def runs(row: TokenRow, tokenizer: PreTrainedTokenizerFast, supervised: bool = True) -> list[str]:
    """The decoded stretches of a row that are supervised (or not), special tokens visible."""
    pairs = zip(row.input_ids, row.loss_mask, strict=True)
    groups = [(on, [token for token, _ in group]) for on, group in groupby(pairs, key=lambda pair: pair[1])]
    return [tokenizer.decode(ids, skip_special_tokens=False) for on, ids in groups if on == supervised]


def ids_of(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[int]:
    """Ids of special tokens."""
    return [tokenizer.convert_tokens_to_ids(text) for text in texts]
