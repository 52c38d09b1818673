"""A Llama target as one GGUF file, so that llama.cpp needs no converter: for a user, and for ``verify=engine``."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from gguf import GGUFWriter

from specdraft.core.errors import ExportError
from specdraft.export.gguf_file import DTYPES, Entry, interleaved, read_gguf, write_gguf
from specdraft.export.gguf_tokenizer import add_tokenizer, cut, tokenizer_of, tokenizer_values
from specdraft.export.material import Material

FILE = "target.gguf"
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Names of transformers -> those of llama.cpp."""


def refuse_target(material: Material) -> str | None:
    """Why the target cannot be written for prompts of ids; None = it can."""
    config = material.target.config
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias:
        return f"targets other than Llama without biases are left to llama.cpp's own converter, got {config.model_type}"
    rope = material.spec.rope_parameters.get("rope_type", "default")
    return None if rope == "default" else f"rope of type {rope} is left to llama.cpp's own converter"


def refuse_served(material: Material) -> str | None:
    """Why the target cannot be written for prompts of text; None = it can."""
    reason = refuse_target(material)
    if reason is None and cut(tokenizer_of(material)) is None:
        reason = "how the target's tokenizer cuts a text has no name here; use llama.cpp's own converter"
    return reason


def _entries(material: Material, dtype: torch.dtype | None) -> list[Entry]:
    """Every tensor, read when it is written. dtype: of the matrices; None = as the target's files have them.

    Norms are float32 in every file of llama.cpp. A tied lm_head is left out: llama.cpp takes the embedding then.
    """
    target, spec = material.target, material.spec
    stored = dtype or (target.embedding.dtype if target.embedding.dtype in DTYPES.values() else torch.float32)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    if not target.config.tie_word_embeddings:
        names["lm_head"] = "output"
    for layer in range(spec.num_hidden_layers):
        names |= {f"model.layers.{layer}.{name}": f"blk.{layer}.{own}" for name, own in LAYER.items()}

    def values(name: str) -> torch.Tensor:
        tensor = target.tensor(f"{name}.weight")
        if name.endswith(("q_proj", "k_proj")):
            tensor = interleaved(tensor, tensor.shape[0] // spec.head_dim)
        return tensor

    found = []
    for name, own in names.items():
        shape = target.shape(f"{name}.weight")
        kind = torch.float32 if len(shape) == 1 else stored
        found.append(Entry(f"{own}.weight", shape, kind, partial(values, name)))
    return found


def write_target(material: Material, path: Path, dtype: torch.dtype | None = None) -> None:
    """Writes the target with its tokenizer and chat template. dtype: of the matrices; None = as in the target's files.

    Raises:
        OSError: the file cannot be written.
        ExportError: another architecture than Llama's.
    """
    if (reason := refuse_target(material)) is not None:
        raise ExportError(f"export.verify: llama.cpp cannot be given the target: {reason}; use verify=files")
    spec, template = material.spec, tokenizer_of(material).chat_template
    writer = GGUFWriter(path, "llama")
    writer.add_name(material.public_target)
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_hidden_layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_attention_heads)
    writer.add_head_count_kv(spec.num_key_value_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    writer.add_rope_freq_base(float(spec.rope_parameters["rope_theta"]))
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_vocab_size(spec.vocab_size)
    add_tokenizer(writer, material)
    if template:
        writer.add_chat_template(template)
    write_gguf(writer, _entries(material, dtype))


def check_target(material: Material, path: Path) -> None:
    """Reads a target's file back and holds it against the target: every tensor bit by bit, its sizes and its tokenizer.

    Raises:
        ExportError: anything differs.
        OSError, ValueError, KeyError, struct.error: torn.
    """
    values, tensors = read_gguf(path, texts=True)
    spec = material.spec
    wanted = {f"tokenizer.ggml.{name}": value for name, value in tokenizer_values(material).items()}
    wanted |= {
        "general.architecture": "llama",
        "llama.block_count": spec.num_hidden_layers,
        "llama.embedding_length": spec.hidden_size,
        "llama.attention.head_count": spec.num_attention_heads,
        "llama.attention.head_count_kv": spec.num_key_value_heads,
        "llama.context_length": spec.max_position_embeddings,
        "tokenizer.chat_template": tokenizer_of(material).chat_template or None,
    }
    wrong = [key for key, value in wanted.items() if values.get(key) != value]
    entries = _entries(material, None)
    wrong += sorted({entry.name for entry in entries} ^ set(tensors))
    wrong = wrong or [entry.name for entry in entries if not _same(entry, tensors[entry.name])]
    if wrong:
        raise ExportError(
            f"export.format: {wrong[0]} of {path.name} is not the target's; nothing was written, report this"
        )


def _same(entry: Entry, found: torch.Tensor) -> bool:
    """Whether a tensor was read back as it was written."""
    return found.dtype == entry.dtype and torch.equal(found, entry.make().to(entry.dtype))
