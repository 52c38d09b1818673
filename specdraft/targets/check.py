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
QUANTIZED_TOLERANCE = 1e-1
"""The same for weights in fewer bits: kernels that round activations turn the least difference into a step of theirs."""
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


def _tolerance(target: HFTarget) -> float:
    is_quantized = getattr(target.model, "is_quantized", False)
    return max(TOLERANCE[target.dtype], QUANTIZED_TOLERANCE if is_quantized else 0.0)


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
    """Captured states have the shape of a residual stream that starts at the embedding and ends in the logits.

    The model is not asked for its own ``hidden_states``: that would leave hooks on every layer.
    """
    kind, num_layers = target.spec.model_type, target.spec.num_hidden_layers
    tolerance = _tolerance(target)
    ids, others = _tokens(target, 8), _tokens(target, 8, offset=31)
    wanted = target.model(input_ids=ids, use_cache=False).logits
    features = target.capture(token_batch(ids), FeatureRequest((0, num_layers // 2)))
    hidden, aux = features.last_hidden, features.aux_hidden
    size = target.spec.hidden_size
    if hidden.shape != (1, 8, size) or aux is None or aux.shape != (1, 8, 2 * size):
        raise refuse(kind, "its layers do not pass on one hidden state a token")
    if _distance(target.unembedding(hidden), wanted).max() > tolerance:
        raise refuse(kind, "logits do not follow from the last hidden state and the lm_head")
    if _distance(target.logits(hidden), wanted).max() > tolerance:
        raise refuse(kind, "the lm_head gives other logits than the model")
    # Learned absolute positions (GPT-2) are added after the embedding: then the rest must not depend on the token.
    first = aux[..., :size].float()
    other = target.capture(token_batch(others), FeatureRequest((0,))).aux_hidden
    assert other is not None
    rest = (first - target.embed(ids).float()) - (other.float() - target.embed(others).float())
    if (rest.norm(dim=-1) / first.norm(dim=-1).clamp_min(1e-6)).max() > tolerance:
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
    if torch.stack(distances).median() > _tolerance(target):
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
