"""EAGLE-3 for TensorRT-LLM's PyTorch backend: the published folder and the YAML that starts the server on it."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from safetensors.torch import load_file

from specdraft.core.errors import ExportError
from specdraft.export.eagle3_layout import eagle3_reading, ordered_layers, refuse_taps
from specdraft.export.formats import eagle3
from specdraft.export.material import Material
from specdraft.export.probe import Reading
from specdraft.export.registry import Engine, Format

OPTIONS = "trtllm.yaml"
PLACE = "DRAFT_FOLDER"


def refuse(material: Material) -> str | None:
    """What TensorRT-LLM has no place for."""
    reason = refuse_taps(material)
    if reason is None and (own := eagle3.trtllm_reason(material)) is not None:
        reason = f"{own}; use format=eagle3 with vLLM"
    return reason


def write(material: Material, folder: Path) -> None:
    """The published files, and the server's options, which name the tapped layers by their outputs, counted from 0."""
    eagle3.write(material, folder)
    options = {
        "speculative_config": {
            "decoding_type": "Eagle3",
            "max_draft_len": material.head.config.num_draft_tokens,
            "speculative_model": PLACE if material.in_subfolder else material.repo_id or PLACE,
            "eagle3_layers_to_capture": [layer - 1 for layer in ordered_layers(material)],
        }
    }
    (folder / OPTIONS).write_text(yaml.safe_dump(options, sort_keys=False))


def readings(folder: Path, material: Material) -> list[Reading]:
    """The published files with the layers of the YAML."""
    options = yaml.safe_load((folder / OPTIONS).read_text())["speculative_config"]
    if options["decoding_type"] != "Eagle3" or options["max_draft_len"] != material.head.config.num_draft_tokens:
        raise ExportError(f"export.format: {OPTIONS} does not start the head; nothing was written, report this")
    config = json.loads((folder / "config.json").read_text())
    taps = sorted(layer + 1 for layer in options["eagle3_layers_to_capture"])
    tensors = load_file(folder / "model.safetensors")
    return [eagle3_reading("TensorRT-LLM", config, tensors, eagle3.PREFIX, taps)]


def engines(material: Material, where: str) -> list[Engine]:
    """The server alone."""
    fill = (
        ""
        if material.repo_id and not material.in_subfolder
        else f'sed -i "s|{PLACE}|$(realpath {where})|" {where}/{OPTIONS}\n'
    )
    return [
        Engine(
            "TensorRT-LLM",
            f"{fill}trtllm-serve {material.public_target} --extra_llm_api_options {where}/{OPTIONS}",
        )
    ]


FORMAT = Format(name="trtllm", kinds=("eagle3",), refuse=refuse, write=write, readings=readings, engines=engines)
