"""EAGLE-3 as one GGUF file for llama.cpp, written without its converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import GGUFWriter
from torch import Tensor

from specdraft.export.eagle3_layout import eagle3_reading, eagle3_tensors, flag, ordered_layers, refuse_taps
from specdraft.export.formats import eagle3
from specdraft.export.gguf_file import Entry, halved, interleaved, read_gguf, write_gguf
from specdraft.export.gguf_target import FILE as TARGET
from specdraft.export.gguf_target import check_target, refuse_served, write_target
from specdraft.export.gguf_tokenizer import add_tokenizer, byte_pairs, tokenizer_of
from specdraft.export.llama import draft_config
from specdraft.export.material import Material
from specdraft.export.probe import Reading
from specdraft.export.registry import Engine, Format

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


def refuse(material: Material) -> str | None:
    """What llama.cpp, or this writer, has no place for."""
    reason = refuse_taps(material)
    if reason is None and (own := eagle3.llamacpp_reason(material)) is not None:
        reason = f"llama.cpp: {own}; use format=eagle3 with vLLM"
    rope = material.spec.rope_parameters.get("rope_type", "default")
    if reason is None and rope != "default":
        reason = f"rope of type {rope} is left to llama.cpp's own converter; use format=eagle3 and convert that"
    if reason is None and byte_pairs(tokenizer_of(material)) is None:
        reason = "the target's tokenizer is not of byte pairs; use format=eagle3 and llama.cpp's own converter"
    if reason is None and material.target_gguf and (own := refuse_served(material)) is not None:
        reason = f"target_gguf: {own}"
    return reason


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
    write_gguf(writer, _entries(material))
    if material.target_gguf:
        write_target(material, folder / TARGET)


def _entries(material: Material) -> list[Entry]:
    """The head's tensors; norms are float32 in every file of llama.cpp."""
    found = []
    for name, tensor in eagle3_tensors(material, eagle3.PREFIX).items():
        if name not in NAMES:
            continue

        def values(name: str = name, tensor: Tensor = tensor) -> Tensor:
            rotates = name.endswith(("q_proj.weight", "k_proj.weight"))
            return interleaved(tensor, tensor.shape[0] // material.spec.head_dim) if rotates else tensor

        kind = torch.float32 if tensor.dim() == 1 else tensor.dtype
        found.append(Entry(NAMES[name], tensor.shape, kind, values))
    if (ids := material.draft_ids) is not None:
        found.append(Entry("d2t", ids.shape, torch.int64, ids.contiguous))
    return found


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
    if material.target_gguf:
        check_target(material, folder / TARGET)
    config, tensors = read_draft(folder / FILE)
    layers = config["eagle_aux_hidden_state_layer_ids"]
    return [eagle3_reading("llama.cpp", config, tensors, eagle3.PREFIX, layers)]


def engines(material: Material, where: str) -> list[Engine]:
    """llama.cpp's server, with the target that is beside the draft or that its own script has converted."""
    depth = material.head.config.num_draft_tokens
    served, convert = (
        "target.gguf",
        f"python convert_hf_to_gguf.py {material.public_target} --outtype bf16 --outfile target.gguf\n",
    )
    if material.target_gguf:
        served, convert = f"{where}/{TARGET}", ""
    command = (
        f"{convert}llama-server -m {served} -md {where}/{FILE} --spec-type draft-eagle3 --spec-draft-n-max {depth} "
        "--spec-draft-p-min 0"
    )
    return [Engine("llama.cpp", command)]


FORMAT = Format(name="gguf", kinds=("eagle3",), refuse=refuse, write=write, readings=readings, engines=engines)
