"""EAGLE-1 for SGLang, with the draft vocabulary as its map of hot tokens."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from specdraft.core.files import write_json
from specdraft.export.eagle_layout import eagle_config, eagle_reading, eagle_shapes, eagle_tensors, refuse_lm_head
from specdraft.export.material import Material
from specdraft.export.probe import Reading
from specdraft.export.reference import check_tensors
from specdraft.export.registry import Engine, Format
from specdraft.export.serve import sglang_command
from specdraft.export.tensors import write_safetensors

HOT_TOKENS = "hot_token_ids.pt"


def write(material: Material, folder: Path) -> None:
    """The fusion's bias is written even where it is zero: SGLang would leave it random."""
    write_json(folder / "config.json", eagle_config(material, "LlamaForCausalLMEagle"))
    tensors = eagle_tensors(material)
    tensors.setdefault("fc.bias", torch.zeros(material.spec.hidden_size, dtype=material.dtype))
    write_safetensors(folder / "model.safetensors", tensors)
    if material.draft_ids is not None:
        torch.save(material.draft_ids, folder / HOT_TOKENS)


def readings(folder: Path, material: Material) -> list[Reading]:
    """Drafts from the hot tokens."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    check_tensors(tensors, {**eagle_shapes(config), "fc.bias": (config["hidden_size"],)}, "the export")
    hot = folder / HOT_TOKENS
    ids = torch.load(hot, weights_only=True) if hot.exists() else None
    return [eagle_reading("SGLang", config, tensors, ids)]


def engines(material: Material, where: str) -> list[Engine]:
    """SGLang alone."""
    hot = f" \\\n  --speculative-token-map {where}/{HOT_TOKENS}" if material.draft_ids is not None else ""
    return [
        Engine("SGLang", sglang_command(material, "EAGLE", where, hot)),
        Engine("vLLM", reason="it takes another name of the architecture; use format=vllm_eagle"),
    ]


FORMAT = Format(
    name="sglang_eagle",
    kinds=("eagle",),
    refuse=refuse_lm_head,
    write=write,
    readings=readings,
    engines=engines,
    rounds=True,
)
