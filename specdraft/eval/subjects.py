"""What is measured against plain decoding: a trained head or another proposer, and how results.json names it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from specdraft.core.tree import DraftTree, TreeGrowth
from specdraft.decode._config import DecodeConfig
from specdraft.decode._proposer_config import DraftModelConfig, ProposerConfig
from specdraft.decode.draft_model import DraftModelProposer
from specdraft.decode.methods import make_proposer
from specdraft.decode.proposers import HeadProposer, Proposer, draft_tree
from specdraft.decode.row import NO_TREE
from specdraft.heads.base import DraftHead
from specdraft.targets.hf import HFTarget


@dataclass(frozen=True)
class Subject:
    """What is measured against plain decoding.

    proposer: None = plain decoding once more. shape: the largest draft. kind, settings: of the proposer. head: identity
    of the trained head behind it, as results.json records it, or None. model: weights of its own, or None.
    """

    proposer: Proposer | None
    shape: DraftTree | TreeGrowth
    kind: str
    settings: dict[str, Any]
    head: dict[str, Any] | None = None
    model: nn.Module | None = None


def head_subject(target: HFTarget, head: DraftHead, decode: DecodeConfig, head_sha256: str | None = None) -> Subject:
    """``head`` in the dtype of ``decode.head_dtype``, on the target's device; put in eval mode and frozen.

    Raises:
        ConfigError: the head cannot draft the tree of ``decode``.
    """
    head.eval().requires_grad_(False)
    shape = draft_tree(decode, head.config.num_draft_tokens)
    return Subject(
        HeadProposer(head, target, shape, decode.min_confidence),
        shape,
        "head",
        {},
        _head_identity(head, head_sha256),
        head,
    )


def method_subject(target: HFTarget, config: ProposerConfig) -> Subject:
    """A proposer without a trained head; of a draft model with weights of its own these are counted.

    Raises:
        ConfigError, CheckpointError, UnsupportedTargetError: the proposer cannot be built for the target.
    """
    proposer = make_proposer(config, target)
    settings = {key: value for key, value in asdict(config).items() if key != "kind"}
    model = None
    if isinstance(config, DraftModelConfig) and isinstance(proposer, DraftModelProposer):
        settings["layers"] = proposer.model.spec.num_hidden_layers
        model = proposer.weights if config.name is not None else None
    return Subject(proposer, NO_TREE if proposer is None else proposer.tree, config.kind, settings, None, model)


def _head_identity(head: DraftHead, sha256: str | None) -> dict[str, Any]:
    return {
        "kind": head.config.kind,
        "settings": {key: value for key, value in asdict(head.config).items() if key != "kind"},
        "num_parameters": head.num_parameters,
        "dtype": str(head.dtype).removeprefix("torch."),
        "sha256": sha256,
    }


def memory_bytes(target: HFTarget, subject: Subject, num_tokens: int) -> dict[str, int]:
    """Bytes of weights and of the keys and values of ``num_tokens``; on CUDA also the peak of all."""
    spec = target.spec
    row = 2 * spec.num_hidden_layers * spec.num_key_value_heads * spec.head_dim * target.dtype.itemsize
    drafts = 0 if subject.model is None else _num_bytes(subject.model)
    memory = {"target": _num_bytes(target.model), "head": drafts, "kv_cache": row * num_tokens}
    if target.device.type == "cuda":
        memory["peak"] = torch.cuda.max_memory_allocated(target.device)
    return memory


def _num_bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
