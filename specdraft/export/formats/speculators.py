"""The layout of the speculators library, which vLLM serves by the folder's name alone."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file

from specdraft.core.errors import ExportError
from specdraft.core.files import write_json
from specdraft.export.eagle3_layout import (
    FLAGS_31,
    LAYER_IDS,
    eagle3_reading,
    eagle3_tensors,
    flag,
    is_default,
    ordered_layers,
    refuse_taps,
)
from specdraft.export.llama import draft_config
from specdraft.export.material import Material, default_trio
from specdraft.export.peagle_layout import (
    EMBEDDING,
    check_table,
    mask_token,
    peagle_reading,
    peagle_tensors,
    refuse_peagle,
)
from specdraft.export.probe import Reading
from specdraft.export.reference import check_shared_file
from specdraft.export.registry import Engine, Format
from specdraft.export.serve import vllm_command
from specdraft.export.tensors import Pieces, file_pieces, write_safetensors

PREFIX = "layers.0."
VERSION = "0.9.0"
"""Of the library whose schema this is."""


def write(material: Material, folder: Path) -> None:
    """config.json without a model type, which would hide the format from vLLM, and the target's embedding beside the head."""
    parallel = material.kind == "peagle"
    kind = "peagle" if parallel else "eagle3"
    layer = draft_config(material) | {"num_hidden_layers": material.settings["num_layers"] if parallel else 1}
    dtype = layer.pop("torch_dtype")
    layers = ordered_layers(material)
    config = {
        "architectures": ["PEagleDraftModel" if parallel else "Eagle3DraftModel"],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "draft_vocab_size": material.settings["draft_vocab_size"] or material.spec.vocab_size,
        "target_hidden_size": None,
        "norm_before_residual": flag(material, "norm_before_residual"),
        "norm_before_fc": False,
        **{name: flag(material, name) for name in FLAGS_31},
        LAYER_IDS: None if is_default(material) else layers,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "transformer_layer_config": {**layer, "architectures": ["LlamaForCausalLM"]},
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": material.head.config.num_draft_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": material.public_target,
                "architectures": list(material.target.config.architectures or []),
            },
        },
    }
    if parallel:
        config |= {"mask_token_id": mask_token(material), "embed_requires_grad": True}
        write_json(folder / "config.json", config)
        write_safetensors(folder / "model.safetensors", peagle_tensors(material))
        return
    write_json(folder / "config.json", config)
    whole = material.target.embedding
    embedding = Pieces(whole.shape, whole.dtype, lambda: file_pieces(*material.target.embedding_file()))
    write_safetensors(folder / "model.safetensors", {**eagle3_tensors(material, PREFIX), EMBEDDING: embedding})


def readings(folder: Path, material: Material) -> list[Reading]:
    """As vLLM does: ids are inputs of layers, and a missing norm_before_residual would count as true."""
    config = json.loads((folder / "config.json").read_text())
    tensors = dict(load_file(folder / "model.safetensors"))
    if EMBEDDING not in tensors:
        raise ExportError(f"export.format: the export lacks {EMBEDDING}; nothing was written, report this")
    table = tensors.pop(EMBEDDING)
    taps = config[LAYER_IDS] or default_trio(material.spec.num_hidden_layers)
    flat = {
        **config["transformer_layer_config"],
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_residual": config.get("norm_before_residual", True),
        **{name: config.get(name, False) for name in FLAGS_31},
    }
    path = folder / "model.safetensors"
    if config["speculators_model_type"] == "peagle":
        index = config["mask_token_id"]
        check_table(path, material, index)
        return [peagle_reading("vLLM", flat, tensors, taps, table[index])]
    check_shared_file(path, EMBEDDING, material.target.embedding_file())
    return [eagle3_reading("vLLM", flat, tensors, PREFIX, taps)]


def engines(material: Material, where: str) -> list[Engine]:
    """VLLM alone, by the folder or with the target named."""
    more = {"parallel_drafting": True} if material.kind == "peagle" else {}
    return [
        Engine("vLLM, target as named in config.json", f"vllm serve {where}"),
        Engine("vLLM, with a target of your own path", vllm_command(material, "eagle3", where, **more)),
    ]


def refuse(material: Material) -> str | None:
    """What the schema has no place for."""
    return refuse_peagle(material) if material.kind == "peagle" else refuse_taps(material)


FORMAT = Format(
    name="speculators",
    kinds=("eagle3", "peagle"),
    refuse=refuse,
    write=write,
    readings=readings,
    engines=engines,
    absent={
        "dflash": "its dflash norms queries and keys in every layer, as Qwen3 does, which this head does not; use format=hf"
    },
)
