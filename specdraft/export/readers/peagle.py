"""P-EAGLE as the speculators library writes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdraft.core.types import TargetSpec
from specdraft.export.checkpoint import Checkpoint
from specdraft.export.imported import (
    Imported,
    Reader,
    chosen_settings,
    depth_of,
    drop_zero_biases,
    fuse_layer,
    layer_config,
    layer_settings,
    missing,
    own_spec,
    refuse_leftovers,
    same_target,
)
from specdraft.export.peagle_layout import EMBEDDING, MASK, peagle_reading
from specdraft.export.readers.eagle3 import proposed_tokens, taps, target_of, vocabulary
from specdraft.targets.weights import TargetFiles

FIRST = "layers.0."


def matches(checkpoint: Checkpoint) -> bool:
    """EAGLE-3's first layer, and a mask in the place of features."""
    return {f"{FIRST}hidden_norm.weight", "fc.weight", MASK} <= set(checkpoint.tensors)


def read(checkpoint: Checkpoint, target: TargetFiles, spec: TargetSpec) -> Imported:
    """The head as a ``peagle`` of ours, the mask's embedding taken out of the table.

    Raises:
        CheckpointError: it has parts that ours has not, or does not fit the target.
    """
    told: tuple[list[str], list[str]] = ([], [])
    assumed, warnings = told
    config = checkpoint.config
    nested = config.get("transformer_layer_config") or {}
    flat: dict[str, Any] = {**nested, **{k: v for k, v in config.items() if k != "transformer_layer_config"}}
    same_target(checkpoint, spec)
    for name in ("norm_before_fc", "fc_norm", "norm_before_residual"):
        if flat.get(name):
            raise checkpoint.error(f"has {name}, which the head has not")
    tensors = dict(checkpoint.tensors)
    assumed += drop_zero_biases(checkpoint, tensors)
    num_layers = int(flat.get("num_hidden_layers", 1))
    layer = layer_config(checkpoint, spec, {**flat, "num_hidden_layers": 1})
    plain = {name: value for name, value in tensors.items() if name not in ("d2t", "t2d", "lm_head.weight", EMBEDDING)}
    if EMBEDDING not in tensors:
        raise missing(checkpoint, EMBEDDING)
    index = flat.get("mask_token_id")
    table = tensors.pop(EMBEDDING)
    if not isinstance(index, int) or not 0 <= index < len(table):
        raise checkpoint.error(f"names no mask token of its table (mask_token_id {index})")
    warnings += _other_rows(table, target.embedding, index)
    fused = tensors["fc.weight"]
    if fused.shape[0] != spec.hidden_size or fused.shape[1] % spec.hidden_size:
        raise checkpoint.error(
            "has an fc.weight that does not fit the target's width", "give its own target with target=..."
        )
    count = fused.shape[1] // spec.hidden_size
    layers = taps(checkpoint, spec, count, told)
    lm_head, ids = vocabulary(checkpoint, tensors, target, told)
    settings = chosen_settings(
        checkpoint,
        {
            "num_draft_tokens": depth_of(checkpoint, proposed_tokens(config), assumed)
            if checkpoint.record is None
            else 0,
            "draft_vocab_size": None if ids is None else ids.numel(),
            **layer_settings(layer, spec),
            "aux_layers": layers,
            "num_layers": num_layers,
        },
    )
    ours = {"lm_head.weight": lm_head, "mask_embedding": table[index].to(fused.dtype).clone()}
    ours |= _layers(checkpoint, tensors, num_layers)
    for name, found in (
        ("fc.weight", "fc.weight"),
        ("input_layernorm.weight", f"{FIRST}input_layernorm.weight"),
        ("hidden_norm.weight", f"{FIRST}hidden_norm.weight"),
        ("norm.weight", "norm.weight"),
    ):
        if found not in tensors:
            raise missing(checkpoint, found)
        ours[name] = tensors.pop(found)
    ours["mask_hidden"] = tensors.pop(MASK).flatten()
    refuse_leftovers(checkpoint, tensors)
    if ids is not None:
        mask = torch.zeros(spec.vocab_size, dtype=torch.bool)
        mask[ids] = True
        ours |= {"vocab.d2t": ids - torch.arange(ids.numel()), "vocab.t2d": mask}
        plain |= {"d2t": ours["vocab.d2t"], "t2d": mask}
    plain["lm_head.weight"] = lm_head
    mine, own = own_spec(layer, spec)
    assumed += own
    shape = {**layer, "draft_vocab_size": lm_head.shape[0], "num_hidden_layers": num_layers}
    reading = peagle_reading("the checkpoint", shape, plain, layers, table[index])
    return Imported("peagle", settings, ours, mine, reading, assumed, warnings)


def _layers(checkpoint: Checkpoint, tensors: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """Takes every layer out of ``tensors`` and gives them under our names."""
    found = fuse_layer(checkpoint, tensors, FIRST)
    for index in range(1, num_layers):
        norm = f"layers.{index}.input_layernorm.weight"
        if norm not in tensors:
            raise missing(checkpoint, norm)
        found[f"deeper.{index - 1}.input_layernorm.weight"] = tensors.pop(norm)
        layer = fuse_layer(checkpoint, tensors, f"layers.{index}.")
        found |= {f"deeper.{index - 1}.{name}": tensor for name, tensor in layer.items()}
    return found


def _other_rows(table: Tensor, embedding: Tensor, index: int) -> list[str]:
    """The warning about a table that is not the target's but for the mask, if it is not."""
    if table.shape == embedding.shape:
        differs = (table != embedding.to(table.dtype)).any(-1)
        differs[index] = False
        if not bool(differs.any()):
            return []
    return ["its embed_tokens.weight is not the target's embedding and is left out but for the mask's row"]


READER = Reader("P-EAGLE", matches, target_of, read)
