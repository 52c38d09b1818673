"""The MLP speculator: a recurrent state that every drafted token updates, each depth predicting from the state alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdraft.core.errors import ConfigError
from specdraft.core.types import DraftBatch, DraftContext, Embed, TargetSpec, Unembedding
from specdraft.heads._config import HeadConfig
from specdraft.heads._sequential import SequentialHead, SequentialState
from specdraft.heads.base import register_head


@register_head("mlp")
@dataclass(slots=True, kw_only=True)
class MLPConfig(HeadConfig):
    """Settings of an MLP speculator. The published ones: own embeddings and own lm_head, 3 to 5 tokens."""

    inner_size: int | None = None
    """Width of the state; null = the target's hidden size."""
    tie_weights: bool = True
    """True: all depths share embeddings, lm_head, norm and, from the second on, the transition of the state."""
    scale_input: bool = True
    """True: the target's hidden state is normed to a root mean square of 1 / sqrt(2) first, as the embeddings are."""
    own_embeddings: bool = False
    """True: a trained table over the target's whole vocabulary; False: the target's frozen embeddings, normed and
    projected, which need no training data per token and no V * inner_size weights."""
    own_lm_head: bool = False
    """True: a trained lm_head on the state; False: a projection of the state under the target's frozen lm_head."""

    def __post_init__(self) -> None:
        HeadConfig.__post_init__(self)
        if self.inner_size is not None and self.inner_size < 1:
            raise ConfigError(f"head.inner_size: must be positive or null, got {self.inner_size}; use null")

    @property
    def size_setting(self) -> str | None:
        """The width of the state."""
        return "inner_size"

    def build(self, spec: TargetSpec) -> MLPHead:
        """A head with random weights."""
        return MLPHead(self, spec)


class ShiftedRMSNorm(nn.Module):
    """``x / rms(x) * weight + bias`` over the last axis, in the input's dtype; the statistics are float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``[..., I]`` -> ``[..., I]``."""
        normed = nn.functional.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)
        return (normed + self.bias.float()).to(x.dtype)


class MLPHead(SequentialHead):
    """s_{k+1} = GELU(norm_k(a W_k s_k + b E_k(x_{t+k+1}))), p(x_{t+k+2}) = softmax(U_k s_{k+1}), k from 0.

    s_0 = h_t / (rms(h_t) sqrt(2)), h_t the target's last hidden state after its final norm. With K depths the scale
    factors are a = 0.5^(1 / 2K) and b = sqrt(1 - a^2), so that s_0 still makes up half of the state's power at the last
    depth, and embeddings come in with a root mean square of 1 / sqrt(2). U_k is trained, or the target's lm_head behind
    a projection P_k. Source: Wertheimer et al. 2024 (Combined token/embedding speculators), its section on the
    architecture; the scale factors, norms and ties are those of the authors' code (fms-extras).
    """

    def __init__(self, config: MLPConfig, spec: TargetSpec) -> None:
        super().__init__(config, spec)
        size, depths = spec.hidden_size, config.num_draft_tokens
        inner = config.inner_size or size
        self.inner_size, self.eps, self.scale_input = inner, spec.rms_norm_eps, config.scale_input
        self.state_weight = 0.5 ** (0.5 / depths)
        self.embedding_weight = math.sqrt(1 - self.state_weight**2)
        copies = 1 if config.tie_weights else depths
        # The first transition reads the target's state, so it is one of its own.
        transitions = min(depths, 2) if config.tie_weights else depths
        self.transitions = nn.ModuleList(
            nn.Linear(inner if depth else size, inner, bias=False) for depth in range(transitions)
        )
        self.norms = nn.ModuleList(ShiftedRMSNorm(inner, self.eps) for _ in range(copies))
        self.embeddings = nn.ModuleList(
            nn.Embedding(spec.vocab_size, inner) if config.own_embeddings else nn.Linear(size, inner, bias=False)
            for _ in range(copies)
        )
        rows = config.draft_vocab_size or spec.vocab_size
        self.own_lm_head = config.own_lm_head
        self.outputs = nn.ModuleList(
            nn.Linear(inner, rows if config.own_lm_head else size, bias=False) for _ in range(copies)
        )
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.trunc_normal_(module.weight, std=module.weight.shape[1] ** -0.5)

    def unembedding(self, depth: int, unembed: Unembedding) -> Unembedding:
        """The target's lm_head, or the head's own, finished (scaled, soft-capped) as the target's logits are."""
        if not self.own_lm_head:
            return unembed
        weight = _of(self.outputs, depth).get_parameter("weight")
        return Unembedding(weight, None, unembed.scale, unembed.softcap)

    def vocabulary_parameters(self) -> list[str]:
        """The lm_heads, if they are the head's own."""
        return [f"outputs.{k}.weight" for k in range(len(self.outputs))] if self.own_lm_head else []

    def seed(self, batch: DraftBatch) -> Tensor:
        """The target's last hidden states at the anchors."""
        return self._scaled(batch.features.last_hidden.flatten(0, 1).index_select(0, batch.anchors))

    def begin(self, state: SequentialState, context: DraftContext) -> Tensor:
        """The last committed hidden state."""
        return self._scaled(context.features.last_hidden[0, -1:])

    def _scaled(self, hidden: Tensor) -> Tensor:
        """Hidden states ``[M, H]`` -> first states ``[M, H]``."""
        hidden = hidden.to(self.dtype)
        return self._normed(hidden) if self.scale_input else hidden

    def _normed(self, x: Tensor) -> Tensor:
        """The last axis with a root mean square of 1 / sqrt(2)."""
        normed: Tensor = nn.functional.rms_norm(x, x.shape[-1:], eps=self.eps)
        return normed * math.sqrt(0.5)

    def advance(self, depth: int, path: Tensor, tokens: Tensor, embed: Embed) -> tuple[Tensor, Tensor]:
        """One update of the state; what is unembedded is the state, or its projection."""
        embedding = _of(self.embeddings, depth)
        if isinstance(embedding, nn.Embedding):
            # Rows of standard deviation 1 / sqrt(I), as the lm_head's, so that one weight decay suits both.
            embedded = embedding(tokens) * math.sqrt(self.inner_size / 2)
        else:
            embedded = embedding(self._normed(embed(tokens).detach().to(self.dtype)))
        mixed = _of(self.transitions, depth)(path) * self.state_weight + embedded * self.embedding_weight
        path = nn.functional.gelu(_of(self.norms, depth)(mixed))
        return path, path if self.own_lm_head else _of(self.outputs, depth)(path)


def _of(modules: nn.ModuleList, depth: int) -> nn.Module:
    """The module of ``depth``: the last one serves all depths beyond the list."""
    return modules[min(depth, len(modules) - 1)]
