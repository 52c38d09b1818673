"""The contract of a draft head and the registry of kinds. A kind is one file here and one YAML under configs/head."""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from specdraft.core.errors import ConfigError
from specdraft.core.tree import DraftTree, Proposal, TreeGrowth
from specdraft.core.types import (
    DraftBatch,
    DraftContext,
    DraftStep,
    Embed,
    FeatureRequest,
    LayerWeights,
    TargetSpec,
    Unembedding,
)
from specdraft.heads._config import HeadConfig
from specdraft.heads._vocab import DraftVocab

C = TypeVar("C", bound=type[HeadConfig])

_REGISTRY: dict[str, type[HeadConfig]] = {}


def register_head(kind: str) -> Callable[[C], C]:
    """Class decorator that enters a config class under the name its YAML gives as ``kind``."""

    def enter(config_class: C) -> C:
        if kind in _REGISTRY:
            raise ValueError(f"two head kinds are registered as {kind!r}")
        _REGISTRY[kind] = config_class
        return config_class

    return enter


@cache
def head_kinds() -> dict[str, type[HeadConfig]]:
    """Every registered kind and its config class, found by importing each module of this package."""
    package = importlib.import_module("specdraft.heads")
    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"specdraft.heads.{module.name}")
    return dict(sorted(_REGISTRY.items()))


def head_config(kind: str, settings: dict[str, Any]) -> HeadConfig:
    """The config of ``kind`` with ``settings``.

    Raises:
        ConfigError: no such kind, or a setting that the kind does not have.
    """
    kinds = head_kinds()
    if kind not in kinds:
        raise ConfigError(f"head.kind: no such head, got {kind!r}; use one of {', '.join(kinds)}")
    unknown = sorted(set(settings) - {f for f in kinds[kind].__dataclass_fields__})
    if unknown:
        raise ConfigError(f"head.{unknown[0]}: no such setting of {kind}, got {settings[unknown[0]]!r}; remove it")
    return kinds[kind](**{**settings, "kind": kind})


class DraftHead(nn.Module, ABC):
    """A trainable predictor of the tokens after the target's own next token.

    ``state_dict()`` holds the trained weights and the draft-vocabulary map only: the target's embedding and lm_head
    are passed in. ``forward`` is the training entry (the only one that DDP and FSDP see), ``propose`` the decoding one,
    and both must give the same tokens for the same prefix. ``grows``: the kind has ``grow``. ``recompute``: training keeps
    less and computes it again in the backward pass (see ``recomputed``).
    """

    grows: ClassVar[bool] = False

    def __init__(self, config: HeadConfig, spec: TargetSpec) -> None:
        super().__init__()
        self.config = config.for_target(spec)
        self.spec = spec
        self.vocab = DraftVocab(spec.vocab_size, config.draft_vocab_size) if config.draft_vocab_size else None
        self.recompute = False
        self._selected: tuple[Tensor, Unembedding] | None = None
        self._prepared: tuple[torch.dtype, int] | None = None

    @abstractmethod
    def features(self) -> FeatureRequest:
        """Hidden states the target must capture for this head."""

    @abstractmethod
    def forward(self, batch: DraftBatch, embed: Embed, unembed: Unembedding) -> list[DraftStep]:
        """Every draft depth at every anchor: K steps of hidden ``[N, H']`` with offsets 2, 3, ..., K + 1."""

    def recomputed(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, whose intermediate results are computed again in the backward pass if ``recompute`` is set.

        A kind calls it around what takes most memory in ``forward``; the result and its gradients are the same.
        """
        if not self.recompute or not torch.is_grad_enabled():
            return function(*args)
        return checkpoint(function, *args, use_reentrant=False)

    def draft_steps(self, batch: DraftBatch, embed: Embed, unembed: Unembedding) -> list[DraftStep]:
        """All K depths that decoding drafts, each given the text's own tokens before it; ``forward`` may train fewer."""
        steps: list[DraftStep] = self(batch, embed, unembed)
        return steps

    @abstractmethod
    def init_state(self, max_length: int, tree: DraftTree, unembed: Unembedding) -> Any:
        """State of one decoded row of at most ``max_length`` positions that drafts ``tree``; opaque to the decoder.

        Raises:
            ConfigError: the head cannot draft a tree of this depth or rank.
        """

    @abstractmethod
    def propose(self, state: Any, context: DraftContext, embed: Embed, tree: DraftTree) -> Proposal:
        """Takes in what the target committed and drafts the tokens of ``tree``.

        ``tree`` is the tree of ``init_state`` or that tree truncated to a smaller depth of at least 1. Nothing is copied
        to the host. What an earlier call drafted and the target rejected leaves no trace.
        """

    def propose_batch(
        self, states: Sequence[Any], contexts: Sequence[DraftContext], embed: Embed, tree: DraftTree
    ) -> list[Proposal]:
        """``propose`` for several rows, each with its own state and context; all draft ``tree``.

        A kind that shares the products with its weights between the rows overrides this.
        """
        return [self.propose(state, own, embed, tree) for state, own in zip(states, contexts, strict=True)]

    def grow(self, state: Any, context: DraftContext, embed: Embed, growth: TreeGrowth) -> Proposal:
        """Like ``propose``, with a tree that this step's probabilities shape; of kinds that set ``grows``.

        The state was made for ``growth.beams``; ``growth`` may be that growth cut to a smaller depth. Nothing is copied
        to the host: the proposal's tree is a ``GrownTree``.

        Raises:
            ConfigError: the kind drafts fixed trees only.
        """
        raise ConfigError(
            f"decode.dynamic_total_tokens: this kind of head drafts fixed trees only, got {self.config.kind}; "
            "use decode.tree"
        )

    def grow_batch(
        self, states: Sequence[Any], contexts: Sequence[DraftContext], embed: Embed, growth: TreeGrowth
    ) -> list[Proposal]:
        """``grow`` for several rows, each with its own state and context; as ``propose_batch``.

        Raises:
            ConfigError: the kind drafts fixed trees only.
        """
        return [self.grow(state, own, embed, growth) for state, own in zip(states, contexts, strict=True)]

    def compile_pass(self) -> None:
        """Called by a decoder on a device whose target is compiled: what is repeated in every draft may become one graph.

        Drafts stay the same. Kinds of many small or no such passes leave it.

        Raises:
            ConfigError: there is no compiler.
        """

    def draft_unembedding(self, unembed: Unembedding) -> Unembedding:
        """The target's unembedding over the draft vocabulary; selected once per target weight, then kept."""
        if self._selected is not None and self._selected[0] is unembed.weight:
            return self._selected[1]
        if self.vocab is None:
            return unembed
        self._prepared = None
        self._selected = (unembed.weight, unembed.select(self.vocab.draft_token_ids()))
        return self._selected[1]

    def prepare_unembedding(self, unembed: Unembedding, prepare: Callable[[Unembedding], Unembedding]) -> None:
        """Makes ``draft_unembedding`` of this ``unembed`` give what ``prepare`` makes of it: a faster one of the same map.

        Nothing is done where that stands already, for the head's present dtype and draft vocabulary.
        """
        offsets = None if self.vocab is None else self.vocab.d2t
        present = self.dtype, 0 if offsets is None or offsets.is_inference() else offsets._version
        if self._prepared == present and self._selected is not None and self._selected[0] is unembed.weight:
            return
        self._selected = None
        self._selected = (unembed.weight, prepare(self.draft_unembedding(unembed)))
        self._prepared = present

    def init_from_target(self, embed: Embed, unembed: Unembedding) -> None:
        """Called once before training, after the draft vocabulary is set: copy what starts from the target's weights."""

    def init_layer(self, layer: LayerWeights | None) -> str | None:
        """Called after ``init_from_target``, with the target's last layer or None where that is no plain one.

        A kind with a decoder layer of its own may start from it.

        Returns:
            A line for the log that says where the layer starts; None for kinds without one.

        Raises:
            ConfigError: the settings ask for the target's layer and it does not fit.
        """
        return None

    def vocabulary_parameters(self) -> list[str]:
        """Names of the parameters with one row for every token of the draft vocabulary, in its order."""
        return []

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft-vocabulary ids -> target token ids, any shape, int64."""
        return draft_ids if self.vocab is None else self.vocab.to_target(draft_ids)

    def label_map(self) -> Tensor | None:
        """``[V]`` int64: target id -> draft id, -1 outside the draft vocabulary; None when it is not reduced."""
        if self.vocab is None:
            return None
        return self.vocab.to_draft(torch.arange(self.spec.vocab_size, device=self.vocab.t2d.device))

    def check_depth(self, tree: DraftTree, keys: tuple[str, str] | None = None) -> None:
        """Raises ConfigError when ``tree`` is deeper than the head was trained for or ranks beyond its vocabulary.

        keys: the settings of depth and ranks that the error names; None = those of a fixed tree or chain.
        """
        if keys is None:
            keys = ("decode.num_draft_tokens" if tree == DraftTree.chain(len(tree)) else "decode.tree", "decode.tree")
        if tree.max_depth > self.config.num_draft_tokens:
            raise ConfigError(
                f"{keys[0]}: deeper than the head drafts ({self.config.num_draft_tokens}), got depth {tree.max_depth}; "
                f"use at most {self.config.num_draft_tokens}"
            )
        size = self.config.draft_vocab_size or self.spec.vocab_size
        if tree.max_rank >= size:
            raise ConfigError(f"{keys[1]}: rank beyond the draft vocabulary of {size}, got {tree.max_rank}; lower it")

    def to_target_probs(self, probs: Tensor) -> Tensor:
        """Probabilities ``[m, D]`` over the draft vocabulary -> ``[m, V]`` over the target's, 0 outside the former."""
        if self.vocab is None:
            return probs
        full = probs.new_zeros(probs.shape[0], self.spec.vocab_size)
        return full.index_copy_(1, self.vocab.draft_token_ids(), probs)

    @property
    def num_parameters(self) -> int:
        """Parameters, all of them trained."""
        return sum(p.numel() for p in self.parameters())

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the head's weights."""
        return next(self.parameters()).dtype


class DraftVocabulary(Protocol):
    """What turns ids and probabilities over a draft vocabulary into those over the target's; see ``DraftHead``."""

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Any shape, int64."""
        ...

    def to_target_probs(self, probs: Tensor) -> Tensor:
        """``[m, D]`` -> ``[m, V]``."""
        ...


class TokenPicker:
    """Turns logits into one draft's tokens: the likeliest by rank, or drawn where the decoder asks for it."""

    def __init__(self, vocabulary: DraftVocabulary, context: DraftContext) -> None:
        self._vocabulary = vocabulary
        self._sampler = context.sampler
        self._best: list[Tensor] = []
        self._probs: list[Tensor] = []

    def ranked(self, logits: Tensor, count: int) -> Tensor:
        """``[m, D]`` -> target ids ``[m, count]``: column r is the r-th likeliest token, or the r-th that was drawn."""
        if self._sampler is not None:
            ids, probs = self._sampler(logits, count)
            self._probs.append(self._vocabulary.to_target_probs(probs))
            best = logits.amax(dim=-1)
        elif count == 1:
            # The fastest kernel, several times as fast as argmax, and a chain needs no more.
            best, ids = logits.max(dim=-1)
            ids = ids[:, None]
        else:
            values, ids = logits.topk(count, dim=-1)
            best = values[:, 0]
        self._best.append(best)
        return self._vocabulary.to_target_ids(ids)

    def proposal(self, tokens: Tensor, tree: DraftTree, queries: Tensor | None = None) -> Proposal:
        """The draft of target ids ``tokens`` (``[N]``).

        queries: ``[Q]`` int64, which of the rows given to ``ranked`` each row with children was drawn from; None where
        these are the same rows in the same order.
        """
        best = torch.cat(self._best) if len(self._best) > 1 else self._best[0]
        probs = torch.cat(self._probs) if self._probs else None
        if probs is not None and queries is not None:
            probs = probs.index_select(0, queries)
        return Proposal(tokens[None], tree, probs, best.isfinite().all())
