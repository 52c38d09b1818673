"""EAGLE-3 as the EAGLE code, SpecForge, SGLang, vLLM and speculators write it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdraft.core.types import TargetSpec
from specdraft.export.checkpoint import Checkpoint
from specdraft.export.eagle3_layout import LAYER_IDS, eagle3_reading
from specdraft.export.imported import (
    Imported,
    Reader,
    check_embedding,
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
from specdraft.export.material import default_trio
from specdraft.targets.weights import TargetFiles

PREFIX = "midlayer."


def names(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The tensors under the published names, whichever prefix an engine gave them."""
    found = {}
    for name, tensor in checkpoint.tensors.items():
        plain = name.removeprefix("model.")
        found[plain.replace("layers.0.", PREFIX, 1) if plain.startswith("layers.0.") else plain] = tensor
    return found


def matches(checkpoint: Checkpoint) -> bool:
    """A layer with a norm of its own for hidden states, and no mask of P-EAGLE."""
    found = names(checkpoint)
    return f"{PREFIX}hidden_norm.weight" in found and "fc.weight" in found and "mask_hidden" not in found


def target_of(checkpoint: Checkpoint) -> str | None:
    """Only the speculators layout names it."""
    named = checkpoint.config.get("speculators_config", {}).get("verifier", {}).get("name_or_path")
    return None if named is None else str(named)


def taps(checkpoint: Checkpoint, spec: TargetSpec, count: int, told: tuple[list[str], list[str]]) -> list[int]:
    """The fused layers, as indices into hidden_states."""
    assumed, warnings = told
    config = checkpoint.config
    top, nested = config.get(LAYER_IDS), (config.get("eagle_config") or {}).get(LAYER_IDS)
    default = list(default_trio(spec.num_hidden_layers))
    if top:
        layers = list(top)
        warnings.append(f"its layer ids are explicit: {layers}, read as inputs of layers (vLLM, speculators)")
        if nested and [layer + 1 for layer in nested] != layers:
            warnings.append(f"its nested layer ids {nested} say otherwise as outputs of layers (SGLang)")
    elif nested:
        layers = [layer + 1 for layer in nested]
        warnings.append(f"its layer ids are explicit: {nested}, read as outputs of layers (SGLang, SpecForge)")
    else:
        layers = default
        assumed.append(f"it fuses layers {layers} (2, n/2 and n-3), as it names none")
    if len(layers) != count:
        raise checkpoint.error(f"names layers {layers}, its fc.weight fuses {count}")
    return layers


def vocabulary(
    checkpoint: Checkpoint, tensors: dict[str, Tensor], target: TargetFiles, told: tuple[list[str], list[str]]
) -> tuple[Tensor, Tensor | None]:
    """lm_head ``[D, H]`` in ascending order of target ids, and these ids; None = the whole vocabulary."""
    assumed, warnings = told
    offsets, mask = tensors.pop("d2t", None), tensors.pop("t2d", None)
    lm_head, size = tensors.pop("lm_head.weight", None), target.lm_head.shape[0]
    if lm_head is None:
        assumed.append("its lm_head is the target's, as it has none")
        return target.lm_head.to(tensors["fc.weight"].dtype), None
    rows = lm_head.shape[0]
    if rows > size:
        raise checkpoint.error(f"has an lm_head of {rows} rows, the target has {size} tokens")
    stated = checkpoint.config.get("draft_vocab_size")
    if stated is not None and stated != rows:
        warnings.append(f"its lm_head is truncated to {rows} rows, draft_vocab_size says {stated}")
    if rows == size and (offsets is None or not bool(offsets.any())):
        return lm_head, None
    if offsets is None:
        warnings.append(
            f"it has no d2t: its {rows} draft tokens are taken for the first {rows} of the target, as vLLM does"
        )
        return lm_head, torch.arange(rows)
    if offsets.shape != (rows,):
        raise checkpoint.error(f"has a d2t of {offsets.numel()} tokens for an lm_head of {rows} rows")
    ids = torch.arange(rows) + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= size or ids.unique().numel() != rows:
        raise checkpoint.error("has a d2t that maps two draft tokens to one or outside the vocabulary")
    order = ids.argsort()
    if mask is not None and not torch.equal(mask.bool().nonzero().flatten(), ids[order]):
        warnings.append("its t2d contradicts d2t and is left out: engines read d2t alone")
    if not torch.equal(order, torch.arange(rows)):
        assumed.append("its draft tokens were put in the order of their ids, lm_head rows with them")
        return lm_head[order], ids[order]
    return lm_head, ids


def read(checkpoint: Checkpoint, target: TargetFiles, spec: TargetSpec) -> Imported:
    """The head as an ``eagle3`` of ours.

    Raises:
        CheckpointError: it has parts that ours has not, or does not fit the target.
    """
    told: tuple[list[str], list[str]] = ([], [])
    assumed, warnings = told
    config = checkpoint.config
    nested = config.get("transformer_layer_config")
    flat: dict[str, Any] = {**(nested or {}), **{k: v for k, v in config.items() if k != "transformer_layer_config"}}
    same_target(checkpoint, spec)
    if flat.get("norm_before_fc") or (flat.get("eagle_config") or {}).get("norm_before_fc"):
        raise checkpoint.error("has norm_before_fc, which the head has not")
    tensors = names(checkpoint)
    assumed += drop_zero_biases(checkpoint, tensors)
    warnings += check_embedding(checkpoint, tensors, target)
    layer = layer_config(checkpoint, spec, flat)
    plain = {name: value for name, value in tensors.items() if name not in ("d2t", "t2d", "lm_head.weight")}
    fused = tensors.get("fc.weight")
    if fused is None or fused.shape[0] != spec.hidden_size or fused.shape[1] % spec.hidden_size:
        raise checkpoint.error(
            "has an fc.weight that does not fit the target's width", "give its own target with target=..."
        )
    count = fused.shape[1] // spec.hidden_size
    layers = taps(checkpoint, spec, count, told)
    lm_head, ids = vocabulary(checkpoint, tensors, target, told)
    # The speculators layout alone calls a missing flag true.
    normed_first = bool(flat.get("norm_before_residual", nested is not None))
    if normed_first:
        warnings.append("norm_before_residual is true: SGLang, TensorRT-LLM and the EAGLE code cannot serve it")
    norms = [f"fc_norm.{i}.weight" for i in range(count) if "fc_norm.0.weight" in tensors]
    settings = chosen_settings(
        checkpoint,
        {
            "num_draft_tokens": depth_of(checkpoint, proposed_tokens(config), assumed)
            if checkpoint.record is None
            else 0,
            "draft_vocab_size": None if ids is None else ids.numel(),
            **layer_settings(layer, spec),
            "aux_layers": layers,
            "norm_before_residual": normed_first,
            "fc_norm": bool(norms),
            "norm_output": bool(flat.get("norm_output", False)),
        },
    )
    ours = {"fc.weight": tensors.pop("fc.weight"), "lm_head.weight": lm_head}
    for name, found in (
        ("input_layernorm.weight", f"{PREFIX}input_layernorm.weight"),
        ("hidden_norm.weight", f"{PREFIX}hidden_norm.weight"),
        ("norm.weight", "norm.weight"),
        *((name, name) for name in norms),
    ):
        if found not in tensors:
            raise missing(checkpoint, found)
        ours[name] = tensors.pop(found)
    ours |= fuse_layer(checkpoint, tensors, PREFIX)
    refuse_leftovers(checkpoint, tensors)
    wanted = settings.get("aux_layers")
    if wanted is not None and list(wanted) != layers and sorted(wanted) == layers:
        # Engines concatenate in ascending order; this head of ours did not.
        place = [layers.index(layer_) for layer_ in wanted]
        parts = ours["fc.weight"].chunk(count, dim=1)
        ours["fc.weight"] = torch.cat([parts[i] for i in place], dim=1)
        ours |= {f"fc_norm.{k}.weight": plain[f"fc_norm.{i}.weight"] for k, i in enumerate(place) if norms}
    if ids is not None:
        mask = torch.zeros(spec.vocab_size, dtype=torch.bool)
        mask[ids] = True
        ours |= {"vocab.d2t": ids - torch.arange(ids.numel()), "vocab.t2d": mask}
        plain |= {"d2t": ours["vocab.d2t"], "t2d": mask}
    plain["lm_head.weight"] = lm_head
    mine, own = own_spec(layer, spec)
    assumed += own
    flags = {"fc_norm": bool(norms), "norm_output": bool(flat.get("norm_output")), "norm_before_residual": normed_first}
    reading = eagle3_reading(
        "the checkpoint", {**layer, **flags, "draft_vocab_size": lm_head.shape[0]}, plain, PREFIX, layers
    )
    return Imported("eagle3", settings, ours, mine, reading, assumed, warnings)


def proposed_tokens(config: dict[str, Any]) -> int | None:
    """The speculators layout says how many tokens to draft."""
    methods = config.get("speculators_config", {}).get("proposal_methods") or [{}]
    found: int | None = methods[0].get("speculative_tokens")
    return found


READER = Reader("EAGLE-3", matches, target_of, read)
