"""What a reader makes of a published head, and the parts that several readers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdraft.core.errors import CheckpointError
from specdraft.core.types import TargetSpec
from specdraft.export.checkpoint import Checkpoint
from specdraft.export.probe import Reading
from specdraft.targets.weights import TargetFiles

DEFAULT_DEPTH = 4
"""Depth of drafts where a checkpoint does not say one."""


@dataclass
class Imported:
    """One head, understood.

    settings: of its kind, without the kind. tensors: under our names. spec: the target, with what the draft layer has of
    its own. reading: the forward that the checkpoint's own conventions mean, to hold the head against; None = our format.
    """

    kind: str
    settings: dict[str, Any]
    tensors: dict[str, Tensor]
    spec: TargetSpec
    reading: Reading | None
    assumed: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Reader:
    """One layout.

    matches: whether a checkpoint is of it, by its keys and shapes.
    target_of: the target that the checkpoint names, None where it names none.
    read: what it holds, given its target's files and record.
    """

    layout: str
    matches: Callable[[Checkpoint], bool]
    target_of: Callable[[Checkpoint], str | None]
    read: Callable[[Checkpoint, TargetFiles, TargetSpec], Imported]


def chosen_settings(checkpoint: Checkpoint, guessed: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the head was exported with, else those that were worked out."""
    if checkpoint.record is None:
        return dict(guessed)
    return {key: value for key, value in checkpoint.record["head"].items() if key != "kind"}


def same_target(checkpoint: Checkpoint, spec: TargetSpec) -> None:
    """Refuses a target that the checkpoint does not fit.

    Raises:
        CheckpointError: another width, vocabulary or fingerprint.
    """
    for key, mine in (("hidden_size", spec.hidden_size), ("vocab_size", spec.vocab_size)):
        found = checkpoint.config.get(key)
        if found is not None and found != mine:
            raise checkpoint.error(
                f"is for a target with {key} {found}, {spec.name} has {mine}", "give its own target with target=..."
            )
    if checkpoint.record is not None and checkpoint.record["target"]["fingerprint"] != spec.fingerprint:
        raise checkpoint.error(
            f"was exported for {checkpoint.record['target']['name']} (fingerprint "
            f"{checkpoint.record['target']['fingerprint']}), {spec.name} has {spec.fingerprint}",
            "give its own target with target=...",
        )


def fuse_layer(checkpoint: Checkpoint, tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Takes a Llama layer out of ``tensors`` and gives it under our names, its projections fused."""

    def take(name: str) -> Tensor:
        try:
            return tensors.pop(f"{prefix}{name}.weight")
        except KeyError as error:
            raise checkpoint.error(f"lacks {prefix}{name}.weight", "the file is not whole") from error

    try:
        return {
            "layer.qkv_proj.weight": torch.cat([take(f"self_attn.{name}_proj") for name in "qkv"]),
            "layer.o_proj.weight": take("self_attn.o_proj"),
            "layer.gate_up_proj.weight": torch.cat([take(f"mlp.{name}_proj") for name in ("gate", "up")]),
            "layer.down_proj.weight": take("mlp.down_proj"),
            "layer.post_attention_layernorm.weight": take("post_attention_layernorm"),
        }
    except RuntimeError as error:
        raise checkpoint.error(f"has projections of different widths ({error})", "the file is not whole") from error


def drop_zero_biases(checkpoint: Checkpoint, tensors: dict[str, Tensor], keep: tuple[str, ...] = ()) -> list[str]:
    """Takes out biases that are zero; the assumption to tell, if any.

    Raises:
        CheckpointError: one is not zero and has no place in our head.
    """
    names = [name for name in tensors if name.endswith(".bias") and name not in keep]
    for name in names:
        if bool(tensors.pop(name).any()):
            raise checkpoint.error(f"has a bias that is not zero ({name}), for which the head has no place")
    return [f"biases that are zero were left out: {', '.join(sorted(names))}"] if names else []


def check_embedding(checkpoint: Checkpoint, tensors: dict[str, Tensor], target: TargetFiles) -> list[str]:
    """Takes out an embedding of the checkpoint's own; the warning, if it is not the target's."""
    own = tensors.pop("embed_tokens.weight", None)
    if own is None or (own.shape == target.embedding.shape and torch.equal(own, target.embedding.to(own.dtype))):
        return []
    return [
        "its embed_tokens.weight is not the target's embedding and is left out: drafts use the target's, as SGLang's do"
    ]


def refuse_leftovers(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError for a tensor that has no place."""
    if tensors:
        raise checkpoint.error(f"holds {min(tensors)}, for which the head has no place")


def rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary block of a config as transformers 5 writes it, whichever layout it has."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0
    kind = rope.pop("rope_type", None) or rope.get("type") or "default"
    rope.pop("type", None)
    return {"rope_type": kind, "rope_theta": float(theta), **rope}


def layer_config(checkpoint: Checkpoint, spec: TargetSpec, config: Mapping[str, Any]) -> dict[str, Any]:
    """A draft layer's keys, complete: of ``config``, else the target's; both rotary layouts."""
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise checkpoint.error(f"has the activation {config['hidden_act']}, the head's is silu")
    if config.get("num_hidden_layers", 1) != 1:
        raise checkpoint.error(f"has {config['num_hidden_layers']} layers, the head has one")
    heads = config.get("num_attention_heads") or spec.num_attention_heads
    rope = rotary(config)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "intermediate_size": config.get("intermediate_size") or spec.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or spec.hidden_size // heads,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "max_position_embeddings": spec.max_position_embeddings,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
    }


def layer_settings(layer: Mapping[str, Any], spec: TargetSpec) -> dict[str, Any]:
    """Settings of a draft layer: null where it has the target's value."""
    return {
        key: layer[key] if layer[key] != getattr(spec, key) else None
        for key in ("intermediate_size", "num_key_value_heads")
    }


def own_spec(layer: Mapping[str, Any], spec: TargetSpec) -> tuple[TargetSpec, list[str]]:
    """The target's record with the layer's own attention geometry, norm and rotary block, and what was changed."""
    changes: dict[str, Any] = {
        key: layer[key]
        for key in ("num_attention_heads", "head_dim", "rms_norm_eps")
        # Some files keep float32.
        if np.float32(layer[key]) != np.float32(getattr(spec, key))
    }
    mine = {key: value for key, value in spec.rope_parameters.items() if key not in ("partial_rotary_factor", "type")}
    if {**layer["rope_parameters"]} != {**mine, "rope_theta": float(mine["rope_theta"])}:
        changes["rope_parameters"] = dict(layer["rope_parameters"])
    told = [f"the draft layer has its own {key}: {value}" for key, value in changes.items()]
    return replace(spec, **changes), told


def depth_of(checkpoint: Checkpoint, found: int | None, assumed: list[str]) -> int:
    """Depth of drafts, with the assumption told where the checkpoint does not say it."""
    if found is None:
        assumed.append(f"the depth of drafts is {DEFAULT_DEPTH}, the checkpoint does not say it")
    return found or DEFAULT_DEPTH


def missing(checkpoint: Checkpoint, name: str) -> CheckpointError:
    """The error about a tensor that is not there."""
    return checkpoint.error(f"lacks {name}", "the file is not whole")
