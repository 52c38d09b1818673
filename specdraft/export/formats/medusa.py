"""Medusa heads for vLLM, TGI and the original code in one folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from specdraft.core.files import write_json
from specdraft.export.eagle_layout import refuse_lm_head
from specdraft.export.material import Material
from specdraft.export.probe import Reading, World
from specdraft.export.reference import Tensors, check_shared, check_tensors, linear
from specdraft.export.registry import Engine, Format
from specdraft.export.serve import vllm_command
from specdraft.export.tensors import write_safetensors

WEIGHTS = "medusa_lm_head.safetensors"
ORIGINAL_HEADS = 5
"""What the original loader makes of any number of heads."""


def refuse(material: Material) -> str | None:
    """Heads of their own over a part of the vocabulary have no rows for the rest."""
    if material.settings["draft_vocab_size"] and not material.settings["shared_lm_head"]:
        return (
            "no engine loads Medusa heads whose own lm_heads cover a part of the vocabulary "
            f"({material.settings['draft_vocab_size']} tokens); use format=hf"
        )
    return refuse_lm_head(material)


def write(material: Material, folder: Path) -> None:
    """The original names, and the config keys of all three readers.

    No key may contain both "num" and "heads", or "num" and "layers", but these: vLLM takes any such for its own.
    """
    settings = material.settings
    depth, layers = settings["num_draft_tokens"], settings["num_layers"]
    write_json(
        folder / "config.json",
        {
            "medusa_num_heads": depth,
            "medusa_num_layers": layers,
            "medusa_fc_bias": True,
            "base_model_name_or_path": material.public_target,
            "version": "2",
            "hidden_size": material.spec.hidden_size,
            "vocab_size": material.spec.vocab_size,
            "dtype": str(material.dtype).removeprefix("torch."),
            "torch_dtype": str(material.dtype).removeprefix("torch."),
        },
    )
    tensors: dict[str, Tensor] = {}
    for head in range(depth):
        for layer in range(layers):
            for part in ("weight", "bias"):
                tensors[f"{head}.{layer}.linear.{part}"] = material.tensors[f"blocks.{head}.{layer}.linear.{part}"]
        own = material.tensors.get(f"lm_heads.{head}.weight")
        tensors[f"{head}.{layers}.weight"] = material.target.lm_head if own is None else own
    write_safetensors(folder / WEIGHTS, tensors)


def medusa_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint in the original layout."""
    hidden, layers = config["hidden_size"], config["medusa_num_layers"]
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(config["medusa_num_heads"]):
        for layer in range(layers):
            shapes[f"{head}.{layer}.linear.weight"] = (hidden, hidden)
            shapes[f"{head}.{layer}.linear.bias"] = (hidden,)
        shapes[f"{head}.{layers}.weight"] = (config["vocab_size"], hidden)
    return shapes


def medusa_reading(engine: str, config: Mapping[str, Any], tensors: Tensors) -> Reading:
    """How an engine drafts with these files: head k from the last hidden state alone."""

    def logits(world: World, drafted: Tensor) -> tuple[Tensor, Tensor]:
        found = []
        for head in range(config["medusa_num_heads"]):
            x = world.hidden[-1]
            for layer in range(config["medusa_num_layers"]):
                inner = linear(x, tensors[f"{head}.{layer}.linear.weight"])
                if config.get("medusa_fc_bias", False):
                    inner = inner + tensors[f"{head}.{layer}.linear.bias"].float()
                x = x + torch.nn.functional.silu(inner)
            found.append(linear(x, tensors[f"{head}.{config['medusa_num_layers']}.weight"]))
        return torch.stack(found, 1), torch.arange(config["vocab_size"])

    return Reading(engine, logits)


def readings(folder: Path, material: Material) -> list[Reading]:
    """All three compute the same; vLLM leaves the biases out unless the config says that there are some."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / WEIGHTS)
    check_tensors(tensors, medusa_shapes(config), "the export")
    if material.settings["shared_lm_head"]:
        for head in range(config["medusa_num_heads"]):
            check_shared(tensors, f"{head}.{config['medusa_num_layers']}.weight", material.target.lm_head)
    return [medusa_reading("vLLM", config, tensors)]


def engines(material: Material, where: str) -> list[Engine]:
    """All three."""
    target = material.public_target
    depth, layers = material.settings["num_draft_tokens"], material.settings["num_layers"]
    original = ""
    if layers > 1:
        original = f"it shares one block among the {layers} layers of a head"
    elif depth > ORIGINAL_HEADS:
        original = f"it builds {ORIGINAL_HEADS} heads, this has {depth}"
    elif depth < ORIGINAL_HEADS:
        original = f"it builds {ORIGINAL_HEADS} heads whatever the config says, and leaves those beyond {depth} random"
    return [
        Engine("vLLM", vllm_command(material, "medusa", where)),
        Engine("TGI", f"text-generation-launcher --model-id {where} --speculate {depth}"),
        Engine("the original Medusa code", f"python -m medusa.inference.cli --model {where}", original),
        Engine("SGLang, llama.cpp, OpenVINO, TensorRT-LLM", reason=f"they have no Medusa heads (target: {target})"),
    ]


FORMAT = Format(
    name="medusa", kinds=("medusa",), refuse=refuse, write=write, readings=readings, engines=engines, widens=True
)
