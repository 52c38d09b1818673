"""EAGLE-3 for OpenVINO GenAI: the published folder, and the conversion that tells GenAI which layers to tap."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from safetensors.torch import load_file

from specdraft.export.eagle3_layout import eagle3_reading, ordered_layers, refuse_taps
from specdraft.export.formats import eagle3
from specdraft.export.material import Material
from specdraft.export.probe import Reading
from specdraft.export.registry import Engine, Format

SCRIPT = "to_openvino.py"
CONVERSION = '''\
"""Converts this draft head and its target to OpenVINO: python {script} TARGET OUTPUT

Needs optimum-intel and openvino. Without the list below GenAI taps other layers for some heads, and accepts less.
"""

import sys
from pathlib import Path

import openvino
from optimum.exporters.openvino import main_export

# Layers whose outputs are tapped, counted from 0.
HIDDEN_LAYERS_LIST = {layers}

here, (target, output) = Path(__file__).resolve().parent, sys.argv[1:3]
main_export(
    model_name_or_path=target, task="text-generation-with-past", convert_tokenizer=True, output=Path(output) / "target"
)
main_export(
    model_name_or_path=str(here),
    task="text-generation-with-past",
    convert_tokenizer=False,
    trust_remote_code=True,
    output=Path(output) / "converted",
)
model = openvino.Core().read_model(Path(output) / "converted" / "openvino_model.xml")
model.set_rt_info(HIDDEN_LAYERS_LIST, ["hidden_layers_list"])
openvino.save_model(model, Path(output) / "draft" / "openvino_model.xml", compress_to_fp16=False)
for file in (Path(output) / "converted").glob("*.json"):
    (Path(output) / "draft" / file.name).write_text(file.read_text())
'''
GENERATE = """\
python {where}/{script} {target} openvino
python -c "
import openvino_genai as genai
draft = genai.draft_model('openvino/draft', 'CPU')
pipe = genai.LLMPipeline('openvino/target', 'CPU', draft_model=draft)
print(pipe.generate('Why is the sky blue?', max_new_tokens=64, num_assistant_tokens={depth}))
"\
"""


def refuse(material: Material) -> str | None:
    """What OpenVINO GenAI has no place for."""
    reason = refuse_taps(material)
    if reason is None and (own := eagle3.openvino_reason(material)) is not None:
        reason = f"{own}; use format=eagle3 with vLLM"
    return reason


def write(material: Material, folder: Path) -> None:
    """The published files, and the script that converts them."""
    eagle3.write(material, folder)
    layers = [layer - 1 for layer in ordered_layers(material)]
    (folder / SCRIPT).write_text(CONVERSION.format(script=SCRIPT, layers=layers))


def readings(folder: Path, material: Material) -> list[Reading]:
    """The published files with the layers of the script."""
    lines = (folder / SCRIPT).read_text().splitlines()
    (found,) = [line for line in lines if line.startswith("HIDDEN_LAYERS_LIST = ")]
    taps = [layer + 1 for layer in ast.literal_eval(found.partition(" = ")[2])]
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    return [eagle3_reading("OpenVINO GenAI", config, tensors, eagle3.PREFIX, taps)]


def engines(material: Material, where: str) -> list[Engine]:
    """GenAI on a CPU."""
    command = GENERATE.format(
        where=where, script=SCRIPT, target=material.public_target, depth=material.head.config.num_draft_tokens
    )
    return [Engine("OpenVINO GenAI", command)]


FORMAT = Format(name="openvino", kinds=("eagle3",), refuse=refuse, write=write, readings=readings, engines=engines)
