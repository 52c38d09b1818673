"""What the rest of the package may ask of a target."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from specdraft.core.types import FeatureRequest, Features, TargetSpec, TokenBatch, Unembedding


class Target(Protocol):
    """A frozen causal LM seen as an embedding, a body that gives hidden states, and an unembedding.

    ``last_hidden`` of every ``Features`` is after the final norm: ``unembedding(last_hidden)`` are the model's logits.
    """

    @property
    def spec(self) -> TargetSpec:
        """Sizes and identity."""
        ...

    @property
    def device(self) -> torch.device:
        """Where inputs must lie."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights and of the hidden states."""
        ...

    @property
    def unembedding(self) -> Unembedding:
        """Hidden state -> logits, as data that a loss can slice."""
        ...

    @property
    def layer_types(self) -> tuple[str, ...]:
        """``full_attention`` or ``sliding_attention``, one a layer."""
        ...

    @property
    def sliding_window(self) -> int | None:
        """Keys that a query of a sliding layer sees, itself included; None without sliding layers."""
        ...

    @property
    def compiles(self) -> bool:
        """Whether the passes of decoding are compiled, those of heads too."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """Processes that share a target enter it together; inside, each may make another number of forwards."""
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids ``[...]`` int64 -> embeddings ``[..., H]`` with the scale that the target applies."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., H]`` -> ``[..., V]`` for decoding: as ``unembedding``, through the fastest kernel at hand."""
        ...

    def capture(self, tokens: TokenBatch, request: FeatureRequest) -> Features:
        """Hidden states ``[B, T, H]`` of a padded batch, without gradients and without the lm_head."""
        ...

    def forward_cached(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        sliding_mask: Tensor | None,
        cache: Any,
        request: FeatureRequest,
    ) -> Features:
        """Hidden states ``[1, n, H]`` of n new tokens of one row, whose keys and values join ``cache``."""
        ...
