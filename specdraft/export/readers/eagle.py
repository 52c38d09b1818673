"""EAGLE-1 and EAGLE-2 as the EAGLE code, vLLM and SGLang have them; the two differ in decoding only."""

from __future__ import annotations

import torch

from specdraft.core.types import TargetSpec
from specdraft.export.checkpoint import Checkpoint
from specdraft.export.eagle_layout import PREFIX, eagle_reading
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
    own_spec,
    refuse_leftovers,
    same_target,
)
from specdraft.export.sidecar import draft_mask, unfold
from specdraft.targets.weights import TargetFiles

INPUT_NORM = f"{PREFIX}input_layernorm.weight"


def matches(checkpoint: Checkpoint) -> bool:
    """A fusion of one embedding and one hidden state before a layer without a norm for hidden states."""
    found = {name.removeprefix("model.") for name in checkpoint.tensors}
    return {"fc.weight", f"{PREFIX}self_attn.q_proj.weight"} <= found and f"{PREFIX}hidden_norm.weight" not in found


def target_of(checkpoint: Checkpoint) -> str | None:
    """None: the layout does not name it."""
    return None


def read(checkpoint: Checkpoint, target: TargetFiles, spec: TargetSpec) -> Imported:
    """The head as an ``eagle`` of ours.

    Raises:
        CheckpointError: it has parts that ours has not, or does not fit the target.
    """
    assumed: list[str] = []
    same_target(checkpoint, spec)
    tensors = {name.removeprefix("model."): tensor for name, tensor in checkpoint.tensors.items()}
    if INPUT_NORM in tensors:
        raise checkpoint.error(f"has a norm before the attention ({INPUT_NORM}), which the head has not")
    warnings = check_embedding(checkpoint, tensors, target)
    if tensors.pop("lm_head.weight", None) is not None:
        assumed.append("its lm_head is left out: EAGLE-1 drafts through the target's")
    bias = tensors.get("fc.bias")
    has_bias = bias is not None and bool(bias.any())
    if has_bias:
        warnings.append("its fusion has a bias that is not zero: vLLM ignores it and accepts less, SGLang adds it")
    wanted_bias = has_bias if checkpoint.record is None else bool(checkpoint.record["head"].get("fusion_bias", False))
    assumed += drop_zero_biases(checkpoint, tensors, ("fc.bias",) if wanted_bias else ())
    layer = layer_config(checkpoint, spec, checkpoint.config)
    plain = dict(tensors)
    fused = tensors.pop("fc.weight")
    if tuple(fused.shape) != (spec.hidden_size, 2 * spec.hidden_size):
        raise checkpoint.error("has an fc.weight that does not fit the target's width", "give its own target")
    scale = torch.tensor(1.0 / target.embedding_scale)
    if checkpoint.record is not None and "embedding_columns" in checkpoint.record:
        embedded, hidden = fused.split(spec.hidden_size, dim=1)
        columns, own = unfold(embedded.contiguous(), checkpoint.record)
        fused, scale = torch.cat([columns, hidden], dim=1), torch.tensor(own)
    elif target.embedding_scale != 1.0:
        assumed.append("it was trained on unscaled embeddings, as engines hand them to it")
    ids = checkpoint.hot_tokens
    mask = None if checkpoint.record is None else draft_mask(checkpoint.record, spec.vocab_size)
    if ids is not None:
        mask = torch.zeros(spec.vocab_size, dtype=torch.bool)
        mask[ids] = True
    settings = chosen_settings(
        checkpoint,
        {
            "num_draft_tokens": depth_of(checkpoint, None, assumed) if checkpoint.record is None else 0,
            "draft_vocab_size": None if mask is None else int(mask.sum()),
            **layer_settings(layer, spec),
            "fusion_bias": has_bias,
        },
    )
    ours = {"fc.weight": fused, "embedding_scale": scale.to(fused.dtype), **fuse_layer(checkpoint, tensors, PREFIX)}
    if wanted_bias:
        ours["fc.bias"] = tensors.pop("fc.bias")
    refuse_leftovers(checkpoint, tensors)
    if mask is not None:
        ids = mask.nonzero().flatten()
        ours |= {"vocab.d2t": ids - torch.arange(ids.numel()), "vocab.t2d": mask}
    mine, own_parts = own_spec(layer, spec)
    reading = eagle_reading("the checkpoint", layer, plain, ids)
    return Imported("eagle", settings, ours, mine, reading, [*assumed, *own_parts], warnings)


READER = Reader("EAGLE-1", matches, target_of, read)
