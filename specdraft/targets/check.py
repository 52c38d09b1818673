"""Does a target behave as the package assumes? Run once at load, on a few tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import DynamicCache

from specdraft.core.errors import UnsupportedTargetError
from specdraft.core.tree import DraftTree
from specdraft.core.types import FeatureRequest, TokenBatch
from specdraft.targets.layout import refuse

if TYPE_CHECKING:
    from specdraft.targets.hf import HFTarget

TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest accepted difference relative to the spread of what is compared, by dtype of the weights."""
LARGEST_WINDOW = 64
"""Sliding windows up to this size are checked with a longer prefix."""
TREE = DraftTree((-1, -1, 0, 0, 2), (0, 1, 0, 1, 0))


def check_target(target: HFTarget) -> None:
    """Compares features, logits and a cached tree forward with the model's own full forward.

    Raises:
        UnsupportedTargetError: they differ, or the model cannot be called as needed.
    """
    kind = target.spec.model_type
    try:
        _check_features(target)
        _check_tree(target)
    except UnsupportedTargetError:
        raise
    except (
        RuntimeError,
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
        IndexError,
        AssertionError,
    ) as error:
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        raise refuse(kind, f"a test forward failed ({type(error).__name__}: {reason})") from error


def _tokens(target: HFTarget, length: int, offset: int = 0) -> Tensor:
    """``[1, length]`` int64: a fixed scatter over the vocabulary, so that no random state is touched."""
    size = min(target.spec.vocab_size, target.layout.embedding.get_parameter("weight").shape[0])
    return ((torch.arange(length) + offset) * 7919 % max(size - 3, 1)).to(target.device)[None] + min(2, size - 1)


def token_batch(input_ids: Tensor) -> TokenBatch:
    """Rows ``[B, T]`` without padding, one document each, everything supervised."""
    ones = torch.ones_like(input_ids, dtype=torch.bool)
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    rows = torch.arange(input_ids.shape[0], device=input_ids.device)
    return TokenBatch(input_ids, ones, ones, positions, torch.zeros_like(input_ids), rows)


def _distance(found: Tensor, wanted: Tensor) -> Tensor:
    """Per position (all but the last axis): size of the difference relative to the spread of ``wanted``."""
    wanted = wanted.float()
    spread = (wanted - wanted.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(1e-6)
    distance: Tensor = (found.float() - wanted).norm(dim=-1) / spread
    return distance


@torch.no_grad()
def _check_features(target: HFTarget) -> None:
    """Captured states are the model's ``hidden_states``, the embedding the first of them, and the last gives logits."""
    kind, num_layers = target.spec.model_type, target.spec.num_hidden_layers
    tolerance = TOLERANCE[target.dtype]
    ids = _tokens(target, 8)
    output = target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    layers = tuple(sorted({0, num_layers // 2, num_layers}))
    features = target.capture(token_batch(ids), FeatureRequest(layers))
    assert features.aux_hidden is not None
    for index, state in zip(layers, features.aux_hidden.chunk(len(layers), dim=-1), strict=True):
        wanted = output.hidden_states[index]
        if wanted.shape != state.shape or _distance(state, wanted).max() > tolerance:
            raise refuse(kind, f"captured hidden state {index} is not what the model reports")
    if _distance(target.unembedding(features.last_hidden), output.logits).max() > tolerance:
        raise refuse(kind, "logits do not follow from the last hidden state and the lm_head")
    if _distance(target.logits(features.last_hidden), output.logits).max() > tolerance:
        raise refuse(kind, "the lm_head gives other logits than the model")
    # Learned absolute positions (GPT-2) are added after the embedding: then the rest must not depend on the token.
    others = _tokens(target, 8, offset=31)
    second = target.capture(token_batch(others), FeatureRequest((0,)))
    assert second.aux_hidden is not None
    rest = output.hidden_states[0] - target.embed(ids)
    other_rest = second.aux_hidden - target.embed(others)
    scale = output.hidden_states[0].float().norm(dim=-1).clamp_min(1e-6)
    if ((rest - other_rest).float().norm(dim=-1) / scale).max() > tolerance:
        raise refuse(kind, "its first hidden state is not the (scaled) token embedding")


@torch.no_grad()
def _check_tree(target: HFTarget) -> None:
    """A tree after a cached prefix gives, along each path, what a full forward of the path gives."""
    window = target.sliding_window
    length = 9 if window is None or window > LARGEST_WINDOW else 2 * window + 3
    limit = target.spec.max_position_embeddings
    length = max(1, min(length, limit - TREE.max_depth - 1))
    prefix, tail = _tokens(target, length), _tokens(target, len(TREE) + 1, offset=length)
    cache = DynamicCache(config=target.model.config)
    positions = torch.arange(length, device=target.device)[None]
    target.forward_cached(prefix, positions, None, None, cache)
    full, sliding = tree_masks(TREE, length, window, target.device)
    depths = TREE.depth_tensor(target.device)[None] + length
    hidden = target.forward_cached(tail, depths, full, sliding, cache).last_hidden
    logits = target.logits(hidden)[0]
    distances = []
    for node, path in enumerate(TREE.path_table().tolist()):
        rows = sorted(set(path))
        text = torch.cat([prefix, tail[:, rows]], dim=1)
        wanted = target.model(input_ids=text, use_cache=False).logits[0, -1]
        distances.append(_distance(logits[node], wanted))
    # The median, since in low precision an expert's choice near a tie may flip at one node.
    if torch.stack(distances).median() > TOLERANCE[target.dtype]:
        raise refuse(target.spec.model_type, "a forward with a cache and a tree mask differs from a plain forward")


def tree_masks(tree: DraftTree, length: int, window: int | None, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Masks for the root and nodes of ``tree`` after ``length`` cached tokens, as a ``DynamicCache`` lays out its keys.

    Returns bool ``[1, 1, N+1, length+N+1]`` for full layers and ``[1, 1, N+1, min(length, window-1)+N+1]`` for sliding
    ones (None without a window), True = may attend.
    """
    positions = tree.depth_tensor(device) + length
    ancestors = tree.ancestor_mask(device)
    full = torch.cat([torch.ones(len(tree) + 1, length, dtype=torch.bool, device=device), ancestors], dim=1)
    if window is None:
        return full[None, None], None
    kept = min(length, window - 1)
    keys = torch.cat([torch.arange(length - kept, length, device=device), positions])
    sliding = full[:, length - kept :] & (keys[None, :] > positions[:, None] - window)
    return full[None, None], sliding[None, None]
