"""EAGLE-1 for vLLM; the code of the EAGLE authors reads it, too."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file

from specdraft.core.files import write_json
from specdraft.export.eagle_layout import eagle_config, eagle_reading, eagle_shapes, eagle_tensors, refuse_lm_head
from specdraft.export.formats.eagle3 import EAGLE_CODE, EAGLE_CODE_ROPE
from specdraft.export.material import Material
from specdraft.export.probe import Reading
from specdraft.export.reference import check_tensors
from specdraft.export.registry import Engine, Format
from specdraft.export.serve import vllm_command
from specdraft.export.tensors import write_safetensors


def refuse(material: Material) -> str | None:
    """What vLLM has no place for."""
    bias = material.tensors.get("fc.bias")
    if bias is not None and bool(bias.any()):
        return "vLLM ignores the bias of the fusion (fc.bias); use format=sglang_eagle"
    return refuse_lm_head(material)


def write(material: Material, folder: Path) -> None:
    """Embedding and lm_head are the target's own in vLLM, which refuses a second lm_head."""
    write_json(folder / "config.json", eagle_config(material, "LlamaForCausalLM"))
    tensors = eagle_tensors(material)
    tensors.pop("fc.bias", None)
    write_safetensors(folder / "model.safetensors", tensors)


def readings(folder: Path, material: Material) -> list[Reading]:
    """Drafts from the target's whole vocabulary."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    check_tensors(tensors, eagle_shapes(config), "the export")
    return [eagle_reading("vLLM", config, tensors, None)]


def engines(material: Material, where: str) -> list[Engine]:
    """VLLM and the original code."""
    rope = material.spec.rope_parameters.get("rope_type", "default")
    return [
        Engine("vLLM", vllm_command(material, "eagle", where)),
        Engine(
            "the EAGLE code",
            EAGLE_CODE.format(target=material.public_target, where=where, use_eagle3=False),
            "" if rope in EAGLE_CODE_ROPE else f"it has no {rope} rope",
        ),
        Engine("SGLang", reason="it takes another name of the architecture; use format=sglang_eagle"),
    ]


FORMAT = Format(
    name="vllm_eagle",
    kinds=("eagle",),
    refuse=refuse,
    write=write,
    readings=readings,
    engines=engines,
    widens=True,
    rounds=True,
)
