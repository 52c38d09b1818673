"""EAGLE-3 as the engines lay it out: tensors, config keys, conventions for layer ids, and the forward they compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdraft.core.errors import ExportError
from specdraft.export.llama import draft_config, split_layer
from specdraft.export.material import Material, default_trio
from specdraft.export.probe import Reading, World
from specdraft.export.reference import Recurrence, Tensors, check_tensors, layer_shapes, linear, rms

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS_31 = ("fc_norm", "norm_output")
"""The switches of EAGLE-3.1."""


def refuse_taps(material: Material) -> str | None:
    """Why engines cannot hand over the layers that the head fuses; None = they can."""
    if material.spec.num_hidden_layers in material.aux_layers:
        return (
            f"engines tap layer {material.spec.num_hidden_layers} before the final norm, the head was trained behind it; "
            "use format=hf"
        )
    return None


def ordered_layers(material: Material) -> list[int]:
    """The fused layers as engines concatenate them, ascending; indices into hidden_states."""
    return sorted(material.aux_layers)


def is_default(material: Material) -> bool:
    """Whether every engine taps these layers when a config names none."""
    return ordered_layers(material) == list(default_trio(material.spec.num_hidden_layers))


def flag(material: Material, name: str) -> bool:
    """A behaviour flag among the head's settings; False where its kind does not have it."""
    return bool(material.settings.get(name, False))


def eagle3_tensors(material: Material, prefix: str) -> dict[str, Tensor]:
    """The head under the published names, its layer under ``prefix``; the map only where the vocabulary is reduced."""
    tensors, spec = material.tensors, material.spec
    fused = tensors["fc.weight"]
    norms = [f"fc_norm.{i}.weight" for i in range(len(material.aux_layers)) if flag(material, "fc_norm")]
    kept = [tensors[name] for name in norms]
    order = [material.aux_layers.index(layer) for layer in ordered_layers(material)]
    if order != sorted(order):
        columns = fused.chunk(len(order), dim=1)
        fused = torch.cat([columns[i] for i in order], dim=1)
        kept = [kept[i] for i in order] if kept else kept
    found = {
        "fc.weight": fused,
        **dict(zip(norms, kept, strict=True)),
        **split_layer(tensors, spec.num_attention_heads * spec.head_dim, prefix),
        f"{prefix}input_layernorm.weight": tensors["input_layernorm.weight"],
        f"{prefix}hidden_norm.weight": tensors["hidden_norm.weight"],
        "norm.weight": tensors["norm.weight"],
        "lm_head.weight": tensors["lm_head.weight"],
    }
    if material.head.vocab is not None:
        found |= {"d2t": tensors["vocab.d2t"], "t2d": tensors["vocab.t2d"]}
    return found


def eagle3_config(material: Material, architecture: str = "LlamaForCausalLMEagle3") -> dict[str, Any]:
    """config.json for the engines that read the published layout.

    The engines' own three layers are written as no ids at all, which no two of them read differently. Other layers are
    written twice: at the top level as inputs of layers (vLLM, llama.cpp), nested as outputs of layers (SGLang).
    """
    layers = ordered_layers(material)
    config = {
        "architectures": [architecture],
        **draft_config(material),
        "draft_vocab_size": material.settings["draft_vocab_size"] or material.spec.vocab_size,
        "num_aux_hidden_states": len(layers),
        "norm_before_residual": flag(material, "norm_before_residual"),
        "norm_before_fc": False,
        "fc_norm": flag(material, "fc_norm"),
        "norm_output": flag(material, "norm_output"),
    }
    if material.target.layout.logit_scale != 1.0:
        config["logit_scale"] = material.target.layout.logit_scale
    if not is_default(material):
        config[LAYER_IDS] = layers
        config["eagle_config"] = {"use_aux_hidden_state": True, LAYER_IDS: [layer - 1 for layer in layers]}
    return config


def taps_of_inputs(config: Mapping[str, Any], num_layers: int) -> list[int]:
    """The layers that vLLM and llama.cpp's converter tap, as indices into hidden_states."""
    ids = config.get(LAYER_IDS) or (config.get("eagle_config") or {}).get(LAYER_IDS)
    return sorted(set(ids)) if ids else list(default_trio(num_layers))


def taps_of_outputs(config: Mapping[str, Any], num_layers: int) -> list[int]:
    """The layers that SGLang taps: nested ids only, each the output of that layer."""
    ids = (config.get("eagle_config") or {}).get(LAYER_IDS)
    return [layer + 1 for layer in ids] if ids else list(default_trio(num_layers))


def eagle3_shapes(config: Mapping[str, Any], prefix: str, num_taps: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of an EAGLE-3 checkpoint as ``config`` describes it."""
    hidden, rows, vocab = config["hidden_size"], config["draft_vocab_size"], config["vocab_size"]
    norms = num_taps if config.get("fc_norm") else 0
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, num_taps * hidden),
        **{f"fc_norm.{i}.weight": (hidden,) for i in range(norms)},
        **layer_shapes(config, prefix, 2 * hidden),
        f"{prefix}input_layernorm.weight": (hidden,),
        f"{prefix}hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (rows, hidden),
    }
    if rows != vocab:
        shapes |= {"d2t": (rows,), "t2d": (vocab,)}
    return shapes


def target_ids(config: Mapping[str, Any], tensors: Tensors) -> Tensor:
    """``[D]``: what the draft ids stand for, by the offsets of ``d2t``, held against ``t2d``.

    Raises:
        ExportError: an id twice or out of range, or the two contradict each other.
    """
    ids = torch.arange(config["draft_vocab_size"])
    if "d2t" not in tensors:
        return ids
    ids = ids + tensors["d2t"].long()
    size = config["vocab_size"]
    if int(ids.min()) < 0 or int(ids.max()) >= size or ids.unique().numel() != ids.numel():
        raise ExportError("export.format: d2t maps two draft tokens to one or outside the vocabulary; report this")
    if not torch.equal(ids.sort().values, tensors["t2d"].nonzero().flatten()):
        raise ExportError("export.format: d2t and t2d name different tokens; nothing was written, report this")
    return ids


def eagle3_reading(
    engine: str, config: Mapping[str, Any], tensors: Tensors, prefix: str, taps: Sequence[int]
) -> Reading:
    """How an engine that taps ``taps`` drafts with these files."""
    check_tensors(tensors, eagle3_shapes(config, prefix, len(taps)), "the export")

    def logits(world: World, drafted: Tensor) -> tuple[Tensor, Tensor]:
        layer = Recurrence(config, tensors, prefix)
        eps, normed_first = layer.eps, bool(config.get("norm_before_residual", False))
        features = [world.hidden[tap] for tap in taps]
        if config.get("fc_norm"):
            features = [rms(part, tensors[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(features)]

        def mix(embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
            normed = rms(hidden, layer.weight("hidden_norm"), eps)
            own = rms(embedded, layer.weight("input_layernorm"), eps)
            return torch.cat([own, normed], -1), normed if normed_first else hidden

        def out(output: Tensor) -> Tensor:
            return rms(output, tensors["norm.weight"], eps)

        first = linear(torch.cat(features, -1), tensors["fc.weight"])
        feed = out if config.get("norm_output") else torch.clone
        outputs = layer.run(first, drafted, world, mix, feed)
        found = [linear(out(output), tensors["lm_head.weight"]) for output in outputs]
        return torch.stack(found, 1), target_ids(config, tensors)

    return Reading(engine, logits)
