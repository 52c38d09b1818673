"""EAGLE-3 as published: one folder for vLLM, SGLang, TensorRT-LLM, the EAGLE code, llama.cpp's and OpenVINO's converters."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file

from specdraft.core.files import write_json
from specdraft.export.eagle3_layout import (
    FLAGS_31,
    eagle3_config,
    eagle3_reading,
    eagle3_tensors,
    flag,
    is_default,
    refuse_taps,
    taps_of_inputs,
    taps_of_outputs,
)
from specdraft.export.material import DEFAULT_TRIO, Material
from specdraft.export.probe import Reading
from specdraft.export.registry import Engine, Format
from specdraft.export.serve import sglang_command, vllm_command
from specdraft.export.tensors import write_safetensors

PREFIX = "midlayer."
EAGLE_CODE_ROPE = ("default", "linear", "dynamic")
EAGLE_CODE = """\
python -c "
from eagle.model.ea_model import EaModel
model = EaModel.from_pretrained(base_model_path='{target}', ea_model_path='{where}', use_eagle3={use_eagle3})
ids = model.tokenizer('Why is the sky blue?', return_tensors='pt').input_ids
print(model.tokenizer.decode(model.eagenerate(ids, temperature=0.0, max_new_tokens=64)[0]))
"\
"""


def write(material: Material, folder: Path) -> None:
    """config.json and model.safetensors under the published names."""
    write_json(folder / "config.json", eagle3_config(material))
    write_safetensors(folder / "model.safetensors", eagle3_tensors(material, PREFIX))


def readings(folder: Path, material: Material) -> list[Reading]:
    """Layer ids as inputs and as outputs of layers; without ids the two are one."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    count = material.spec.num_hidden_layers
    found = [eagle3_reading("vLLM", config, tensors, PREFIX, taps_of_inputs(config, count))]
    if sglang_reason(material) is None:
        found.append(eagle3_reading("SGLang", config, tensors, PREFIX, taps_of_outputs(config, count)))
    return found


def sglang_reason(material: Material) -> str | None:
    """Why SGLang cannot draft with the head; None = it can."""
    if flag(material, "norm_before_residual"):
        return "it has no norm_before_residual"
    if len(material.aux_layers) == 1:
        # It tells by the width alone whether a state is fused already.
        return "it leaves out the fusion of a single layer"
    return "it cannot tap the embeddings (layer 0)" if 0 in material.aux_layers else None


def trtllm_reason(material: Material) -> str | None:
    """Why TensorRT-LLM cannot draft with the head; None = it can."""
    if material.spec.num_hidden_layers < 6 and is_default(material):
        return "it needs a target of at least 6 layers"
    return sglang_reason(material)


def eagle_code_reason(material: Material) -> str | None:
    """Why the code of the EAGLE authors cannot draft with the head; None = it can."""
    changed = [name for name in ("norm_before_residual", *FLAGS_31) if flag(material, name)]
    if changed:
        return f"it has no {' and no '.join(changed)}"
    if not is_default(material):
        return f"it always taps layers {DEFAULT_TRIO}"
    rope = material.spec.rope_parameters.get("rope_type", "default")
    return None if rope in EAGLE_CODE_ROPE else f"it has no {rope} rope"


def llamacpp_reason(material: Material) -> str | None:
    """Why llama.cpp cannot draft with the head; None = it can."""
    changed = [name for name in FLAGS_31 if flag(material, name)]
    if changed:
        return f"it has no {' and no '.join(changed)}"
    return None if len(material.aux_layers) == 3 else f"it fuses 3 layers, the head {len(material.aux_layers)}"


def openvino_reason(material: Material) -> str | None:
    """Why OpenVINO GenAI cannot draft with the head; None = it can."""
    if flag(material, "norm_before_residual"):
        return "it has no norm_before_residual"
    if 0 in material.aux_layers:
        return "it cannot tap the embeddings (layer 0)"
    return llamacpp_reason(material)


def engines(material: Material, where: str) -> list[Engine]:
    """Everything that reads the folder."""
    target = material.public_target
    depth = material.head.config.num_draft_tokens
    script = f"python -m eagle.application.webui --ea-model-path {where} --base-model-path {target} --total-token -1"
    convert = (
        f"python convert_hf_to_gguf.py {where} --target-model-dir {target} --outtype bf16 --outfile draft.gguf\n"
        f"llama-server -m target.gguf -md draft.gguf --spec-type draft-eagle3 --spec-draft-n-max {depth} "
        "--spec-draft-p-min 0"
    )
    return [
        Engine("vLLM", vllm_command(material, "eagle3", where)),
        Engine("SGLang", sglang_command(material, "EAGLE3", where), sglang_reason(material) or ""),
        Engine(
            "TensorRT-LLM",
            "# format=trtllm writes this folder together with the YAML that starts it",
            trtllm_reason(material) or "",
        ),
        Engine("the EAGLE code", script, eagle_code_reason(material) or ""),
        Engine("llama.cpp", convert, llamacpp_reason(material) or ""),
        Engine(
            "OpenVINO GenAI",
            "# format=openvino writes this folder together with the conversion that sets the layer list",
            openvino_reason(material) or "",
        ),
    ]


FORMAT = Format(name="eagle3", kinds=("eagle3",), refuse=refuse_taps, write=write, readings=readings, engines=engines)
