"""P-EAGLE as the speculators library lays it out: EAGLE-3 with layers behind the first, and a mask for what is not known yet.

The mask has two parts: ``mask_hidden`` in the place of the fused features, and the embedding of a token that never is in a
text. Our head has a vector for the latter, so the table that is shipped is the target's but for the row of that token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdraft.core.errors import ExportError
from specdraft.export.eagle3_layout import ordered_layers, refuse_taps, target_ids
from specdraft.export.gguf_tokenizer import tokenizer_of
from specdraft.export.llama import split_layer
from specdraft.export.material import Material
from specdraft.export.probe import Reading, World
from specdraft.export.reference import Recurrence, Tensors, check_tensors, layer_shapes, linear, rms
from specdraft.export.tensors import CHUNK_ROWS, Pieces, file_pieces

EMBEDDING = "embed_tokens.weight"
MASK = "mask_hidden"


def refuse_peagle(material: Material) -> str | None:
    """What the layout has no place for."""
    if ordered_layers(material) != list(material.aux_layers):
        return f"engines fuse layers in ascending order, the head {list(material.aux_layers)}; use format=hf"
    reason = refuse_taps(material)
    if reason is None and mask_token(material) is None:
        reason = "no token of the target is free to stand for what is to be drafted; use format=hf"
    return reason


def mask_token(material: Material) -> int | None:
    """A token that is in no text: one that the tokenizer does not know, else a special one that no chat uses."""
    tokenizer = tokenizer_of(material)
    size = min(material.spec.vocab_size, material.target.embedding.shape[0])
    known = set(tokenizer.get_vocab().values())
    unknown = [index for index in range(size) if index not in known]
    if unknown:
        return unknown[-1]
    template = str(tokenizer.chat_template or "")
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    used |= set(material.spec.eos_token_ids)
    free = [
        index
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special and index not in used and index < size and token.content not in template
    ]
    return max(free, default=None)


def peagle_tensors(material: Material) -> dict[str, Tensor | Pieces]:
    """The head under the names of the library, with its table of embeddings."""
    tensors, spec = material.tensors, material.spec
    q_size = spec.num_attention_heads * spec.head_dim
    found: dict[str, Tensor | Pieces] = {
        "fc.weight": tensors["fc.weight"],
        **split_layer(tensors, q_size, "layers.0."),
        "layers.0.input_layernorm.weight": tensors["input_layernorm.weight"],
        "layers.0.hidden_norm.weight": tensors["hidden_norm.weight"],
        "norm.weight": tensors["norm.weight"],
        "lm_head.weight": tensors["lm_head.weight"],
        MASK: tensors["mask_hidden"][None, None],
    }
    for index in range(1, material.settings["num_layers"]):
        own = f"deeper.{index - 1}."
        layer = {name.removeprefix(own): tensor for name, tensor in tensors.items() if name.startswith(own)}
        found |= split_layer(layer, q_size, f"layers.{index}.")
        found[f"layers.{index}.input_layernorm.weight"] = layer["input_layernorm.weight"]
    if material.head.vocab is not None:
        found |= {"d2t": tensors["vocab.d2t"], "t2d": tensors["vocab.t2d"]}
    whole = material.target.embedding
    dtype = torch.promote_types(whole.dtype, tensors["mask_embedding"].dtype)
    return {**found, EMBEDDING: Pieces(whole.shape, dtype, lambda: _table(material, dtype))}


def _table(material: Material, dtype: torch.dtype) -> Iterator[Tensor]:
    """The target's embeddings, some rows at a time, with the mask's in the row of its token."""
    index, start = mask_token(material), 0
    assert index is not None
    for rows in file_pieces(*material.target.embedding_file()):
        part = rows.to(dtype)
        if start <= index < start + CHUNK_ROWS:
            part = part.clone()
            part[index - start] = material.tensors["mask_embedding"].to(dtype)
        yield part
        start += CHUNK_ROWS


def check_table(path: Path, material: Material, index: int) -> None:
    """Holds the shipped table against the target's, but for one row.

    Raises:
        ExportError: another row differs.
    """
    start = 0
    for mine, theirs in zip(file_pieces(path, EMBEDDING), file_pieces(*material.target.embedding_file()), strict=True):
        differs = (mine != theirs.to(mine.dtype)).any(-1).nonzero().flatten() + start
        if [row for row in differs.tolist() if row != index]:
            raise ExportError(f"export.format: {EMBEDDING} differs from the target's; nothing was written, report this")
        start += CHUNK_ROWS


def peagle_shapes(config: Mapping[str, Any], num_taps: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint as ``config`` describes it, without the table."""
    hidden, rows, vocab = config["hidden_size"], config["draft_vocab_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, num_taps * hidden),
        "layers.0.hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (rows, hidden),
        MASK: (1, 1, num_taps * hidden),
    }
    for index in range(config["num_hidden_layers"]):
        shapes |= layer_shapes(config, f"layers.{index}.", hidden if index else 2 * hidden)
        shapes[f"layers.{index}.input_layernorm.weight"] = (hidden,)
    return shapes | ({"d2t": (rows,), "t2d": (vocab,)} if rows != vocab else {})


def peagle_reading(
    engine: str, config: Mapping[str, Any], tensors: Tensors, taps: Sequence[int], mask: Tensor
) -> Reading:
    """How an engine that taps ``taps`` drafts all depths in one pass. mask: ``[H]``, the embedding of the mask's token."""
    check_tensors(tensors, peagle_shapes(config, len(taps)), "the export")
    layers = [Recurrence(config, tensors, f"layers.{index}.") for index in range(config["num_hidden_layers"])]
    first, eps = layers[0], float(config["rms_norm_eps"])
    normed_first = bool(config.get("norm_before_residual", False))

    def logits(world: World, drafted: Tensor) -> tuple[Tensor, Tensor]:
        count, depth = drafted.shape
        fused = linear(torch.cat([world.hidden[tap] for tap in taps], -1), tensors["fc.weight"])
        masked = linear(tensors[MASK].float().reshape(1, -1), tensors["fc.weight"])
        embedded, masks = world.embedding[world.next_tokens].float(), depth - 1
        found = []
        for end in range(1, count + 1):
            hidden = torch.cat([fused[:end], masked.expand(masks, -1)])
            token = torch.cat([embedded[:end], mask.float().expand(masks, -1)])
            normed = rms(hidden, first.weight("hidden_norm"), eps)
            x = torch.cat([rms(token, first.weight("input_layernorm"), eps), normed], -1)
            hidden = first.causal(x, normed if normed_first else hidden)
            for layer in layers[1:]:
                hidden = layer.causal(rms(hidden, layer.weight("input_layernorm"), eps), hidden)
            found.append(linear(rms(hidden[-depth:], tensors["norm.weight"], eps), tensors["lm_head.weight"]))
        return torch.stack(found), target_ids(config, tensors)

    return Reading(engine, logits)
