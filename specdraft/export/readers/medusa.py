"""Medusa heads as the original code, TGI and vLLM have them."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from specdraft.core.types import TargetSpec
from specdraft.export.checkpoint import Checkpoint
from specdraft.export.formats.medusa import medusa_reading
from specdraft.export.imported import Imported, Reader, chosen_settings, missing, refuse_leftovers, same_target
from specdraft.export.sidecar import draft_mask
from specdraft.targets.weights import TargetFiles

ORIGINAL = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
VLLM = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
VLLM_LM_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")


def names(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The tensors under the original names."""
    found = {}
    plain = {
        name.removeprefix("medusa_heads.").removeprefix("medusa_head."): t for name, t in checkpoint.tensors.items()
    }
    layers = 1 + max(
        (int(match[2]) for name in plain if (match := ORIGINAL.fullmatch(name) or VLLM.fullmatch(name))), default=0
    )
    for name, tensor in plain.items():
        if match := VLLM.fullmatch(name):
            name = f"{match[1]}.{match[2]}.linear.{match[3]}"
        elif match := VLLM_LM_HEAD.fullmatch(name):
            name = f"{match[1]}.{layers}.weight"
        found[name] = tensor
    return found


def matches(checkpoint: Checkpoint) -> bool:
    """Numbered heads of numbered blocks."""
    return "0.0.linear.weight" in names(checkpoint)


def target_of(checkpoint: Checkpoint) -> str | None:
    """The model that the heads were trained on, by the original key."""
    named = checkpoint.config.get("base_model_name_or_path")
    return None if named is None else str(named)


def read(checkpoint: Checkpoint, target: TargetFiles, spec: TargetSpec) -> Imported:
    """The heads as a ``medusa`` of ours.

    Raises:
        CheckpointError: they have parts that ours has not, or do not fit the target.
    """
    assumed: list[str] = []
    warnings: list[str] = []
    same_target(checkpoint, spec)
    tensors = names(checkpoint)
    found = [(int(m[1]), int(m[2])) for name in tensors if (m := ORIGINAL.fullmatch(name)) and m[3] == "weight"]
    depth, layers = 1 + max(h for h, _ in found), 1 + max(b for _, b in found)
    stated = checkpoint.config.get("medusa_num_heads") or checkpoint.config.get("num_heads")
    if stated is not None and stated != depth:
        warnings.append(f"it holds {depth} heads, its config says {stated}")
    config = {
        "medusa_num_heads": depth,
        "medusa_num_layers": layers,
        "medusa_fc_bias": True,
        "vocab_size": spec.vocab_size,
    }
    ours: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for head in range(depth):
        for block in range(layers):
            name = f"{head}.{block}.linear"
            if f"{name}.weight" not in tensors:
                raise missing(checkpoint, f"{name}.weight")
            weight = tensors.pop(f"{name}.weight")
            bias = tensors.pop(f"{name}.bias", None)
            if weight.shape != (spec.hidden_size, spec.hidden_size):
                raise checkpoint.error("has blocks of another width than the target", "give its own target")
            bias = torch.zeros(spec.hidden_size, dtype=weight.dtype) if bias is None else bias
            ours |= {f"blocks.{head}.{block}.linear.weight": weight, f"blocks.{head}.{block}.linear.bias": bias}
            plain |= {f"{name}.weight": weight, f"{name}.bias": bias}
    lm_heads = _lm_heads(checkpoint, tensors, depth, layers)
    mask = None if checkpoint.record is None else draft_mask(checkpoint.record, spec.vocab_size)
    token_map = tensors.pop("token_map", None)
    if token_map is not None:
        raise checkpoint.error("drafts from a part of the vocabulary (token_map), for which the head has no place")
    refuse_leftovers(checkpoint, tensors)
    shared = all(one is None or _is_targets(one, target) for one in lm_heads)
    if shared and lm_heads[0] is not None:
        assumed.append("its lm_heads are the target's, which the head shares")
    for head, one in enumerate(lm_heads):
        if not shared:
            if one is None or one.shape != target.lm_head.shape:
                raise checkpoint.error(f"has no lm_head of the target's size for head {head}")
            ours[f"lm_heads.{head}.weight"] = one
        plain[f"{head}.{layers}.weight"] = target.lm_head if one is None else one
    if mask is not None:
        ids = mask.nonzero().flatten()
        ours |= {"vocab.d2t": ids - torch.arange(ids.numel()), "vocab.t2d": mask}
    settings = chosen_settings(checkpoint, {"num_draft_tokens": depth, "num_layers": layers, "shared_lm_head": shared})
    reading = medusa_reading("the checkpoint", config, plain)
    return Imported("medusa", settings, ours, spec, reading, assumed, warnings)


def _lm_heads(checkpoint: Checkpoint, tensors: dict[str, Tensor], depth: int, layers: int) -> list[Tensor | None]:
    """The lm_head of every head; None = the target's."""
    found = [tensors.pop(f"{head}.{layers}.weight", None) for head in range(depth)]
    common = tensors.pop("lm_head.weight", None)
    if checkpoint.config.get("original_lm_head") and common is None:
        common = found[0]
    if common is not None and checkpoint.config.get("original_lm_head"):
        return [common] * depth
    return found


def _is_targets(lm_head: Tensor, target: TargetFiles) -> bool:
    return lm_head.shape == target.lm_head.shape and torch.equal(lm_head, target.lm_head.to(lm_head.dtype))


READER = Reader("Medusa", matches, target_of, read)
