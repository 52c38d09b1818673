"""What drafts tokens while decoding: the protocol, and draft heads behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from specdraft.core.errors import ConfigError
from specdraft.core.tree import DraftTree, Proposal, TreeGrowth
from specdraft.core.types import DraftContext, FeatureRequest, Unembedding
from specdraft.decode._config import DYNAMIC_TOP_K, DecodeConfig
from specdraft.decode._sampling_config import SamplingConfig
from specdraft.heads.base import DraftHead
from specdraft.targets.base import Target
from specdraft.targets.packing import pack_linears, pack_unembedding


class Proposer(Protocol):
    """Drafts for rows that a decoder runs. It keeps what belongs to a row in the state that ``begin`` returns."""

    @property
    def tree(self) -> DraftTree:
        """The largest tree it drafts, in nodes and in depth."""
        ...

    @property
    def draws(self) -> bool:
        """Whether its drafts are drawn where ``DraftContext.sampler`` asks for it; else they are its likeliest tokens."""
        ...

    def features(self) -> FeatureRequest:
        """Hidden states the target must capture for it."""
        ...

    def begin(self, max_length: int) -> Any:
        """State of a new row of at most ``max_length`` tokens, prompt included; opaque to the decoder."""
        ...

    def propose(self, state: Any, context: DraftContext, max_depth: int) -> Proposal | None:
        """Takes in what was committed and drafts a tree of depth 1 to ``max_depth`` (at least 1), or None for nothing.

        It is called once a step and sees every committed token exactly once, whether or not it drafts.
        """
        ...


@runtime_checkable
class BatchProposer(Proposer, Protocol):
    """A proposer that drafts for several rows at once."""

    def propose_batch(
        self, states: Sequence[Any], contexts: Sequence[DraftContext], max_depths: Sequence[int]
    ) -> list[Proposal | None]:
        """``propose`` for each row."""
        ...


@runtime_checkable
class AttentiveProposer(Proposer, Protocol):
    """A proposer that wants to know what a row has written once it has ended."""

    def finish(self, state: Any, tokens: Sequence[int]) -> None:
        """``tokens``: the whole answer of the row."""
        ...


class HeadProposer:
    """A draft head as a proposer over a fixed tree, or over a tree grown anew at every step.

    On the CPU a frozen head's weights are packed for products of few rows; make a new proposer when they have changed.

    Args of the constructor: ``min_confidence`` cuts every chain where the head's confidence in it falls below, which is
    read from the device; None = chains as long as the shape.

    Raises:
        ConfigError: the head cannot draft this shape, or has no confidence.
    """

    def __init__(
        self,
        head: DraftHead,
        target: Target,
        shape: DraftTree | TreeGrowth | None = None,
        min_confidence: float | None = None,
    ) -> None:
        self.head = head
        self.target = target
        self.shape = DraftTree.chain(head.config.num_draft_tokens) if shape is None else shape
        self.min_confidence = min_confidence
        check_shape(head, self.shape)
        if min_confidence is not None and not head.config.estimates_acceptance:
            raise ConfigError(
                f"decode.min_confidence: {head.config.kind} heads without a confidence head estimate nothing, "
                f"got {min_confidence}; use null"
            )
        head.prepare_unembedding(target.unembedding, self._prepare)
        if not any(parameter.requires_grad for parameter in head.parameters()):
            pack_linears(head)
        if target.compiles and target.device.type != "cpu":
            # On a CPU a pass is bound by reading its weights, and a graph with its guards and padding is slower.
            head.compile_pass()
        if isinstance(self.shape, TreeGrowth):
            self.tree = self.shape.largest
        else:
            self.tree = self.shape
            self._trees = [self.tree.truncate(depth) for depth in range(1, self.tree.max_depth)] + [self.tree]

    @property
    def draws(self) -> bool:
        """In fixed shapes only: a grown tree is made of the likeliest tokens."""
        return not isinstance(self.shape, TreeGrowth)

    def _prepare(self, unembed: Unembedding) -> Unembedding:
        """The target's rows as the head multiplies by them: in its dtype, packed if the target has not done so."""
        return pack_unembedding(unembed.to(self.head.dtype))

    def features(self) -> FeatureRequest:
        """What the head asks for."""
        return self.head.features()

    def begin(self, max_length: int) -> Any:
        """The head's own state."""
        # Another proposer of the same head, or a measurement, may have used it with other rows meanwhile.
        self.head.prepare_unembedding(self.target.unembedding, self._prepare)
        tree = self.shape.beams if isinstance(self.shape, TreeGrowth) else self.shape
        return self.head.init_state(max_length, tree, self.target.unembedding)

    def propose(self, state: Any, context: DraftContext, max_depth: int) -> Proposal | None:
        """The head's draft of the shape, cut to ``max_depth``."""
        if isinstance(self.shape, TreeGrowth):
            return self.head.grow(state, context, self.target.embed, self.shape.cut(max_depth))
        tree = self._trees[min(max_depth, len(self._trees)) - 1]
        return self._cut(self.head.propose(state, context, self.target.embed, tree))

    def _cut(self, proposal: Proposal) -> Proposal | None:
        """What the head is confident of."""
        return proposal if self.min_confidence is None else proposal.cut(self.min_confidence)

    def propose_batch(
        self, states: Sequence[Any], contexts: Sequence[DraftContext], max_depths: Sequence[int]
    ) -> list[Proposal | None]:
        """The rows whose drafts are cut to the same depth share the head's forwards."""
        groups: dict[int, list[int]] = {}
        for row, max_depth in enumerate(max_depths):
            groups.setdefault(min(max_depth, self.shape.max_depth), []).append(row)
        found: list[Proposal | None] = [None] * len(states)
        for depth, members in groups.items():
            rows = [states[row] for row in members], [contexts[row] for row in members], self.target.embed
            if isinstance(self.shape, TreeGrowth):
                drafts = self.head.grow_batch(*rows, self.shape.cut(depth))
            else:
                drafts = self.head.propose_batch(*rows, self._trees[depth - 1])
            for row, draft in zip(members, drafts, strict=True):
                found[row] = self._cut(draft)
        return found


def verifier_in_use(sampling: SamplingConfig, proposer: Proposer | None) -> str | None:
    """The rule that accepts the drafts of ``proposer``: drafts that are not drawn are certain, so a point mass each."""
    if proposer is None:
        return None
    return "point_mass" if sampling.samples_drafts and not proposer.draws else sampling.resolved_verifier


def head_dtype(config: DecodeConfig, target: Target) -> torch.dtype:
    """The dtype that the settings want a head in."""
    dtype: torch.dtype = target.dtype if config.head_dtype is None else getattr(torch, config.head_dtype)
    return dtype


def draft_tree(config: DecodeConfig, num_draft_tokens: int) -> DraftTree | TreeGrowth:
    """The shape of the settings; ``num_draft_tokens`` is the depth of the head, taken where the settings name none."""
    if config.tree is not None:
        return DraftTree.from_paths(config.tree)
    if config.dynamic_total_tokens is not None:
        depth = config.dynamic_depth or num_draft_tokens
        return TreeGrowth(depth, config.dynamic_top_k or DYNAMIC_TOP_K, config.dynamic_total_tokens)
    return DraftTree.chain(config.num_draft_tokens or num_draft_tokens)


def check_shape(head: DraftHead, shape: DraftTree | TreeGrowth) -> None:
    """Raises ConfigError when ``head`` cannot draft ``shape``: too deep, ranks beyond its vocabulary, or grown."""
    if isinstance(shape, TreeGrowth) and not head.grows:
        raise ConfigError(
            f"decode.dynamic_total_tokens: {head.config.kind} heads draft fixed trees only, got {shape.total_tokens}; "
            "use decode.tree"
        )
    if isinstance(shape, TreeGrowth):
        head.check_depth(shape.beams, ("decode.dynamic_depth", "decode.dynamic_top_k"))
    else:
        head.check_depth(shape)
