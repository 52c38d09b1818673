"""A target's tokenizer as llama.cpp keeps it: tokens, merges, how a text is cut before them, and the chat template."""

from __future__ import annotations

import json
from typing import Any

from gguf import GGUFWriter, TokenType

from specdraft.export.material import Material
from specdraft.targets._config import TargetConfig
from specdraft.targets.loading import load_tokenizer

PLAIN_CUT = "gpt-2"
"""Of a file that is only ever given token ids."""
_WORDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
CUTS: dict[tuple[str, ...], str] = {
    ("bytes",): PLAIN_CUT,
    ("digits", "bytes"): "smollm",
    (rf"{_SHORT}|\p{{N}}{{1,3}}|{_WORDS}",): "llama-bpe",
    (rf"{_SHORT}|\p{{N}}|{_WORDS}",): "qwen2",
}
"""How a tokenizer cuts a text before it merges -> llama.cpp's name of that."""


def tokenizer_of(material: Material) -> Any:
    """The target's."""
    target = material.target
    return load_tokenizer(TargetConfig(name=target.source, revision=target.revision))


def byte_pairs(tokenizer: Any) -> list[str] | None:
    """The merges of a byte-pair tokenizer, each as two tokens with a space between; None = it is of another kind."""
    model = _parts(tokenizer).get("model", {})
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        return None
    return [" ".join(merge) if isinstance(merge, list) else str(merge) for merge in model["merges"]]


def cut(tokenizer: Any) -> str | None:
    """llama.cpp's name of how the tokenizer cuts a text; None = none is known for it."""
    parts = _parts(tokenizer)
    given = parts.get("pre_tokenizer") or {}
    steps = []
    for step in given.get("pretokenizers", [given]):
        match step:
            case {"type": "Digits", "individual_digits": True}:
                steps.append("digits")
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
                steps.append("bytes")
            case {"type": "ByteLevel", "add_prefix_space": False}:
                continue
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
                steps.append(pattern)
            case _:
                return None
    found = CUTS.get(tuple(steps))
    # Only with the cut of Llama 3 does llama.cpp look for whole words first.
    return found if bool(parts.get("model", {}).get("ignore_merges")) == (found == "llama-bpe") else None


def _parts(tokenizer: Any) -> dict[str, Any]:
    """The tokenizer's own record; empty for one of pure Python."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return {} if backend is None else dict(json.loads(backend.to_str()))


def tokenizer_values(material: Material) -> dict[str, Any]:
    """What is written, and read back, under ``tokenizer.``: tokens, their types and merges."""
    tokenizer = tokenizer_of(material)
    known = {index: token for token, index in tokenizer.get_vocab().items()}
    special, added = set(tokenizer.all_special_ids), tokenizer.added_tokens_decoder
    size = material.spec.vocab_size

    def kind(index: int) -> TokenType:
        if index in special or (index in added and added[index].special):
            return TokenType.CONTROL
        if index in added:
            return TokenType.USER_DEFINED
        return TokenType.NORMAL if index in known else TokenType.UNUSED

    return {
        "tokens": [known.get(index, f"[PAD{index}]") for index in range(size)],
        "token_type": [int(kind(index)) for index in range(size)],
        "merges": byte_pairs(tokenizer) or [" "],  # the writer has no type for an empty list
        "pre": cut(tokenizer) or PLAIN_CUT,
    }


def add_tokenizer(writer: GGUFWriter, material: Material) -> None:
    """The target's vocabulary: llama.cpp compares that of the draft with it."""
    tokenizer, values = tokenizer_of(material), tokenizer_values(material)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(values["pre"])
    writer.add_token_list(values["tokens"])
    writer.add_token_types(values["token_type"])
    writer.add_token_merges(values["merges"])
    for add, index in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if index is not None:
            add(index)
    writer.add_add_bos_token(bool(getattr(tokenizer, "add_bos_token", False)))
