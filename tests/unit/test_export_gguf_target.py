"""The target beside a draft for llama.cpp: written a tensor at a time, read back, and loaded by another library's reader."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdraft.core.errors import ExportError
from specdraft.export._config import ExportConfig
from specdraft.export.exporting import Source, export_head, verify
from specdraft.export.gguf_file import read_gguf
from specdraft.export.gguf_tokenizer import CUTS, cut, tokenizer_of
from specdraft.export.material import Material
from specdraft.export.registry import find_format
from tests.exports import save_target, saved_head
from tests.tiny import CHAT_TEMPLATE

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}


def cut_as(target: Path, pre_tokenizer: dict[str, Any] | None, **model: Any) -> None:
    """Changes how the saved tokenizer of a target cuts a text."""
    path = target / "tokenizer.json"
    parts = json.loads(path.read_text())
    parts["pre_tokenizer"] = pre_tokenizer
    parts["model"] |= model
    path.write_text(json.dumps(parts))


def saved(folder: Path, **overrides: Any) -> tuple[Path, Path]:
    """A target with a tokenizer of bytes, and a head for it."""
    target = save_target(folder / "target", **overrides)
    cut_as(target, BYTES)
    return target, saved_head(folder / "head", target, "eagle3", draft_vocab_size=40, aux_layers=[2, 5, 7])


@pytest.mark.parametrize("tied", [False, True])
def test_the_target_is_beside_the_draft(tied: bool, tmp_path: Path) -> None:
    target, head = saved(tmp_path, tie_word_embeddings=tied)
    (export,) = export_head(Source(head), ExportConfig(format=["gguf"], target_gguf=True))
    assert export.folder is not None
    assert {"draft.gguf", "target.gguf"} <= set(export.sizes)
    assert (
        "llama-server -m ./export-gguf/target.gguf -md ./export-gguf/draft.gguf"
        in (export.folder / "SERVE.md").read_text()
    )
    values, tensors = read_gguf(export.folder / "target.gguf", texts=True)
    assert values["tokenizer.chat_template"] == CHAT_TEMPLATE
    assert values["tokenizer.ggml.pre"] == "gpt-2"
    assert values["tokenizer.ggml.tokens"][1] == "<|im_start|>"
    assert values["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]
    assert ("output.weight" in tensors) is not tied
    theirs = AutoModelForCausalLM.from_pretrained(export.folder, gguf_file="target.gguf", dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids).logits, atol=1e-5, rtol=1e-4)


def test_half_precision_stays_what_it_is(tmp_path: Path) -> None:
    target, head = saved(tmp_path)
    AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).save_pretrained(target)
    cut_as(target, BYTES)
    head = saved_head(tmp_path / "half", target, "eagle3", torch.bfloat16, aux_layers=[2, 5, 7])
    (export,) = export_head(Source(head), ExportConfig(format=["gguf"], target_gguf=True))
    assert export.folder is not None
    _, tensors = read_gguf(export.folder / "target.gguf")
    assert tensors["blk.3.attn_q.weight"].dtype is torch.bfloat16
    assert tensors["blk.3.attn_norm.weight"].dtype is torch.float32


def flip(path: Path) -> None:
    """Changes the last byte of a tensor."""
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


FAULTS: dict[str, Callable[[Path], object]] = {
    "another weight": flip,
    "torn": lambda path: path.write_bytes(path.read_bytes()[:-40]),
    "another cut": lambda path: path.write_bytes(path.read_bytes().replace(b"gpt-2", b"qwen2")),
    "another template": lambda path: path.write_bytes(path.read_bytes().replace(b"{%", b"{#")),
    "another depth": lambda path: path.write_bytes(
        path.read_bytes().replace(
            b"llama.block_count" + struct.pack("<II", 4, 10), b"llama.block_count" + struct.pack("<II", 4, 11)
        )
    ),
}


def test_planted_faults_of_the_target_are_found(tmp_path: Path) -> None:
    _, head = saved(tmp_path)
    material, format = Material(head), find_format("gguf")
    material.target_gguf = True
    (tmp_path / "out").mkdir()
    format.write(material, tmp_path / "out")
    verify(material, format, tmp_path / "out")
    path = tmp_path / "out" / "target.gguf"
    whole = path.read_bytes()
    for name, plant in FAULTS.items():
        plant(path)
        assert path.read_bytes() != whole, name
        with pytest.raises(ExportError, match=r"^export\.format: .*(is not the target's|cannot be read back)"):
            verify(material, format, tmp_path / "out")
        path.write_bytes(whole)


def test_targets_that_llamacpp_would_misread_are_refused(tmp_path: Path) -> None:
    target, head = saved(tmp_path)
    config = ExportConfig(format=["gguf"], target_gguf=True)
    cut_as(target, None)
    with pytest.raises(ExportError, match=r"target_gguf: how the target's tokenizer cuts a text has no name here"):
        export_head(Source(head), config)
    export_head(Source(head), ExportConfig(format=["gguf"]))
    other = save_target(tmp_path / "qwen", "qwen3")
    qwen = saved_head(tmp_path / "other", other, "eagle3", aux_layers=[2, 5, 7])
    with pytest.raises(ExportError, match=r"target_gguf: targets other than Llama .*, got qwen3"):
        export_head(Source(qwen), config)
    medusa = saved_head(tmp_path / "medusa", target, "medusa")
    with pytest.raises(ExportError, match=r"^export\.target_gguf: needs format gguf"):
        export_head(Source(medusa), ExportConfig(format=["all"], target_gguf=True))


def test_how_a_text_is_cut_is_recognised(tmp_path: Path) -> None:
    target, head = saved(tmp_path)

    def found(pre_tokenizer: dict[str, Any] | None, **model: Any) -> str | None:
        cut_as(target, pre_tokenizer, **model)
        return cut(tokenizer_of(Material(head)))

    def split(pattern: str) -> dict[str, Any]:
        parts = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {**BYTES, "use_regex": False},
        ]
        return {"type": "Sequence", "pretokenizers": parts}

    patterns = {name: steps[0] for steps, name in CUTS.items() if steps[0] not in ("bytes", "digits")}
    assert found(BYTES) == "gpt-2"
    assert found({"type": "Sequence", "pretokenizers": [DIGITS, BYTES]}) == "smollm"
    assert found(split(patterns["qwen2"]), ignore_merges=False) == "qwen2"
    assert found(split(patterns["llama-bpe"]), ignore_merges=True) == "llama-bpe"
    # The cut of Llama 3 without its search for whole words, and a pattern of nobody.
    assert found(split(patterns["llama-bpe"]), ignore_merges=False) is None
    assert found(split(r"\p{N}")) is None
    assert found({"type": "Whitespace"}) is None
