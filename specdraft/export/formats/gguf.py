"""EAGLE-3 as one GGUF file for llama.cpp, written without its converter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from torch import Tensor

from specdraft.export.eagle3_layout import eagle3_reading, eagle3_tensors, flag, ordered_layers, refuse_taps
from specdraft.export.formats import eagle3
from specdraft.export.gguf_file import read_gguf
from specdraft.export.llama import draft_config
from specdraft.export.material import Material
from specdraft.export.probe import Reading
from specdraft.export.registry import Engine, Format
from specdraft.targets._config import TargetConfig
from specdraft.targets.loading import load_tokenizer

FILE = "draft.gguf"
ARCHITECTURE = "eagle3"
LAYERS = "eagle3.target_layers"
NAMES = {
    "fc.weight": "fc.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "midlayer.input_layernorm.weight": "blk.0.attn_norm.weight",
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "midlayer.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "midlayer.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "midlayer.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "midlayer.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "midlayer.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "midlayer.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "midlayer.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "midlayer.mlp.down_proj.weight": "blk.0.ffn_down.weight",
}
"""Published names -> those of llama.cpp."""
TYPES = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
}


def refuse(material: Material) -> str | None:
    """What llama.cpp, or this writer, has no place for."""
    reason = refuse_taps(material)
    if reason is None and (own := eagle3.llamacpp_reason(material)) is not None:
        reason = f"llama.cpp: {own}; use format=eagle3 with vLLM"
    rope = material.spec.rope_parameters.get("rope_type", "default")
    if reason is None and rope != "default":
        reason = f"rope of type {rope} is left to llama.cpp's own converter; use format=eagle3 and convert that"
    if reason is None and _byte_pairs(_tokenizer(material)) is None:
        reason = "the target's tokenizer is not of byte pairs; use format=eagle3 and llama.cpp's own converter"
    return reason


def interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of queries or keys as llama.cpp rotates them: pairs side by side instead of halves apart."""
    return weight.view(num_heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def halved(weight: Tensor, num_heads: int) -> Tensor:
    """The inverse of ``interleaved``."""
    return weight.view(num_heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write(material: Material, folder: Path) -> None:
    """The draft with the target's tokenizer. Its map holds target ids rather than offsets, unlike every other format."""
    config, spec = draft_config(material), material.spec
    writer = GGUFWriter(folder / FILE, ARCHITECTURE)
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(1)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    writer.add_rope_freq_base(float(config["rope_theta"]))
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_vocab_size(spec.vocab_size)
    writer.add_array(LAYERS, ordered_layers(material))
    writer.add_uint32("eagle3.target_hidden_size", spec.hidden_size)
    writer.add_bool("eagle3.norm_before_residual", flag(material, "norm_before_residual"))
    add_tokenizer(writer, material)
    tensors = eagle3_tensors(material, eagle3.PREFIX)
    for name, gguf_name in NAMES.items():
        tensor = tensors[name]
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = interleaved(tensor, tensor.shape[0] // spec.head_dim)
        # Norms are float32 in every file of llama.cpp.
        kind = GGMLQuantizationType.F32 if tensor.dim() == 1 else TYPES[tensor.dtype]
        tensor = (tensor.float() if tensor.dim() == 1 else tensor).contiguous()
        if kind is GGMLQuantizationType.BF16:
            writer.add_tensor(gguf_name, tensor.view(torch.uint8).numpy(), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name, tensor.numpy())
    if material.draft_ids is not None:
        writer.add_tensor("d2t", material.draft_ids.numpy().astype(np.int64), raw_dtype=GGMLQuantizationType.I64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tokenizer(material: Material) -> Any:
    """The target's."""
    target = material.target
    return load_tokenizer(TargetConfig(name=target.source, revision=target.revision))


def _byte_pairs(tokenizer: Any) -> list[str] | None:
    """The merges of a byte-pair tokenizer, each as two tokens with a space between; None = it is of another kind."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = {} if backend is None else json.loads(backend.to_str())["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        return None
    return [" ".join(merge) if isinstance(merge, list) else str(merge) for merge in model["merges"]]


def add_tokenizer(writer: GGUFWriter, material: Material) -> None:
    """The target's vocabulary: llama.cpp compares that of the draft with it."""
    tokenizer = _tokenizer(material)
    known = {index: token for token, index in tokenizer.get_vocab().items()}
    special = set(tokenizer.all_special_ids)
    size = material.spec.vocab_size
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([known.get(index, f"[PAD{index}]") for index in range(size)])
    writer.add_token_types(
        [
            TokenType.CONTROL if index in special else TokenType.NORMAL if index in known else TokenType.UNUSED
            for index in range(size)
        ]
    )
    writer.add_token_merges(_byte_pairs(tokenizer) or [" "])  # the writer has no type for an empty list
    for add, index in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if index is not None:
            add(index)
    writer.add_add_bos_token(bool(getattr(tokenizer, "add_bos_token", False)))


def read_draft(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a draft's file, under the published names and with offsets in ``d2t``.

    Raises:
        ValueError: it is no EAGLE-3 draft.
    """
    values, found = read_gguf(path)
    value = values.get
    if value("general.architecture") != ARCHITECTURE:
        raise ValueError(f"{path.name} is no EAGLE-3 draft")
    theta = value("eagle3.rope.freq_base")
    config: dict[str, Any] = {
        "hidden_size": value("eagle3.embedding_length"),
        "intermediate_size": value("eagle3.feed_forward_length"),
        "num_attention_heads": value("eagle3.attention.head_count"),
        "num_key_value_heads": value("eagle3.attention.head_count_kv"),
        "head_dim": value("eagle3.attention.key_length"),
        "rms_norm_eps": value("eagle3.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": value("eagle3.context_length"),
        "vocab_size": value("eagle3.vocab_size"),
        "rope_theta": theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "norm_before_residual": value("eagle3.norm_before_residual"),
        "eagle_aux_hidden_state_layer_ids": value(LAYERS),
    }
    theirs = {gguf_name: name for name, gguf_name in NAMES.items()}
    tensors = {theirs.get(name, name): tensor for name, tensor in found.items()}
    for part in ("q", "k"):
        name = f"midlayer.self_attn.{part}_proj.weight"
        if name in tensors:
            tensors[name] = halved(tensors[name], tensors[name].shape[0] // config["head_dim"])
    config["draft_vocab_size"] = tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else 0
    if "d2t" in tensors:
        ids = tensors["d2t"]
        mask = torch.zeros(config["vocab_size"], dtype=torch.bool)
        mask[ids] = True
        tensors |= {"d2t": ids - torch.arange(ids.numel()), "t2d": mask}
    return config, tensors


def readings(folder: Path, material: Material) -> list[Reading]:
    """As llama.cpp reads it: layers by their inputs, and always three of them."""
    config, tensors = read_draft(folder / FILE)
    layers = config["eagle_aux_hidden_state_layer_ids"]
    return [eagle3_reading("llama.cpp", config, tensors, eagle3.PREFIX, layers)]


def engines(material: Material, where: str) -> list[Engine]:
    """llama.cpp's server, with the target converted by its own script."""
    depth = material.head.config.num_draft_tokens
    command = (
        f"python convert_hf_to_gguf.py {material.target.source} --outtype bf16 --outfile target.gguf\n"
        f"llama-server -m target.gguf -md {where}/{FILE} --spec-type draft-eagle3 --spec-draft-n-max {depth} "
        "--spec-draft-p-min 0"
    ).replace(material.target.source, material.public_target)
    return [Engine("llama.cpp", command)]


FORMAT = Format(name="gguf", kinds=("eagle3",), refuse=refuse, write=write, readings=readings, engines=engines)
