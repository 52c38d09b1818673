"""EAGLE-1 as the engines lay it out: tensors, config keys, and the forward they compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specdraft.export.llama import draft_config, split_layer
from specdraft.export.material import Material
from specdraft.export.probe import Reading, World
from specdraft.export.reference import Recurrence, Tensors, layer_shapes, linear

PREFIX = "layers.0."


def folded_scale(material: Material) -> float:
    """What the head multiplies rows of the target's table by; engines know of no such factor."""
    return float(material.tensors["embedding_scale"]) * material.target.embedding_scale


def fold(columns: Tensor, scale: float) -> Tensor:
    """The fusion's columns that read the embedding, ``[H, H]``, with the factor taken into them."""
    return (columns.double() * scale).to(columns.dtype)


def eagle_tensors(material: Material) -> dict[str, Tensor]:
    """The head under the published names. Its layer has no norm on the input, its logits none before the lm_head."""
    tensors, spec = material.tensors, material.spec
    embedded, hidden = tensors["fc.weight"].split(spec.hidden_size, dim=1)
    found = {
        "fc.weight": torch.cat([fold(embedded, folded_scale(material)), hidden], dim=1),
        **split_layer(tensors, spec.num_attention_heads * spec.head_dim, PREFIX),
    }
    if "fc.bias" in tensors:
        found["fc.bias"] = tensors["fc.bias"]
    return found


def eagle_config(material: Material, architecture: str) -> dict[str, Any]:
    """config.json; ``bias`` is a bias of the attention to some engines and of the fusion to others, so it is false."""
    return {"architectures": [architecture], **draft_config(material), "bias": False}


def refuse_lm_head(material: Material) -> str | None:
    """Why engines cannot give the head's logits: they read the target's lm_head as a plain matrix."""
    if material.target.has_lm_head_bias:
        return "the target's lm_head has a bias, which engines leave out of drafts; use format=hf"
    return None


def eagle_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of an EAGLE-1 checkpoint as ``config`` describes it, without a fusion bias."""
    hidden = config["hidden_size"]
    return {"fc.weight": (hidden, 2 * hidden), **layer_shapes(config, PREFIX, hidden)}


def eagle_reading(engine: str, config: Mapping[str, Any], tensors: Tensors, ids: Tensor | None) -> Reading:
    """How an engine drafts with these files. ids: ``[D]``, the rows of the target's lm_head it uses; None = all."""

    def logits(world: World, drafted: Tensor) -> tuple[Tensor, Tensor]:
        layer = Recurrence(config, tensors, PREFIX)
        rows = torch.arange(config["vocab_size"]) if ids is None else ids
        lm_head = world.lm_head if ids is None else world.lm_head[ids]

        def mix(embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
            fused = linear(torch.cat([embedded, hidden], -1), tensors["fc.weight"])
            if "fc.bias" in tensors:
                fused = fused + tensors["fc.bias"].float()
            return fused, fused

        outputs = layer.run(world.hidden[-1], drafted, world, mix, torch.clone)
        return torch.stack([linear(output, lm_head) for output in outputs], 1), rows

    return Reading(engine, logits)
