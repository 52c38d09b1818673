"""Hydra heads: Medusa's heads made sequential, each given the tokens drafted before it; Hydra++ with prefix attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdraft.core.errors import ConfigError
from specdraft.core.tree import DraftTree
from specdraft.core.types import DraftBatch, DraftContext, Embed, FeatureRequest, TargetSpec, Unembedding
from specdraft.heads._blocks import DraftLayer, RMSNorm
from specdraft.heads._config import DraftLayerConfig, HeadConfig
from specdraft.heads._sequential import SequentialHead, SequentialState
from specdraft.heads._unroll import AnchorAttention, AnchorLayout
from specdraft.heads.base import register_head


@register_head("hydra_chain")
@dataclass(slots=True, kw_only=True)
class HydraConfig(HeadConfig):
    """Settings of Hydra heads. The defaults are Hydra++ with normed embeddings.

    The paper's Hydra is num_layers=1, prefix_attention=false and norm_embeddings=false.
    """

    num_layers: int = 4
    """Residual blocks per head, the first of which reads the tokens; Hydra has 1, Hydra++ 4."""
    prefix_attention: bool = True
    """True: a decoder layer of the head's own over the target's hidden states goes before the heads (Hydra++)."""
    intermediate_size: int | None = None
    """Width of that layer's MLP; null = the target's."""
    norm_embeddings: bool = True
    """True: embeddings enter with a root mean square of 1, near that of the hidden states; False: as they are (paper),
    which learns slowly where a target's embeddings are small."""
    shared_lm_head: bool = True
    """True: all heads use the target's frozen lm_head. False: each head trains a copy of it (the original layout)."""
    dropout: float = 0.0
    """Share of a block's inputs set to zero in training; the authors use 0.2 over ten epochs."""

    def __post_init__(self) -> None:
        HeadConfig.__post_init__(self)
        if self.num_layers < 1:
            raise ConfigError(f"head.num_layers: must be at least 1, got {self.num_layers}; use 1 or 4")
        if self.intermediate_size is not None and not self.prefix_attention:
            raise ConfigError(
                f"head.intermediate_size: has no effect without prefix attention, got {self.intermediate_size}; use null"
            )
        if self.intermediate_size is not None and self.intermediate_size < 1:
            raise ConfigError(
                f"head.intermediate_size: must be positive or null, got {self.intermediate_size}; use null"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"head.dropout: must lie in [0, 1), got {self.dropout}; use 0")

    @property
    def size_setting(self) -> str | None:
        """The width of the layer before the heads; without it the blocks per head."""
        return "intermediate_size" if self.prefix_attention else "num_layers"

    def build(self, spec: TargetSpec) -> HydraHead:
        """A head that first repeats what the target says at the anchor: the tokens enter with weight zero."""
        return HydraHead(self, spec)


class HydraBlock(nn.Module):
    """``R x + SiLU(W x + b)`` with W = b = 0 and R taking the first of the inputs at the start; R = 1 for a single input."""

    def __init__(self, hidden_size: int, num_inputs: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(num_inputs * hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.residual: nn.Module = nn.Identity()
        if num_inputs > 1:
            residual = nn.Linear(num_inputs * hidden_size, hidden_size)
            nn.init.eye_(residual.weight)  # ones on the main diagonal only: the first input
            nn.init.zeros_(residual.bias)
            self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        """``[M, num_inputs * H]`` -> ``[M, H]``."""
        x = self.dropout(x)
        output: Tensor = self.residual(x) + nn.functional.silu(self.linear(x))
        return output


class HydraHead(SequentialHead):
    """p_k(. | h_t, x_{t+1..t+k+1}) = softmax(U f_k([h_t; e(x_{t+1}); ...; e(x_{t+k+1})])) predicts token t + k + 2.

    k counts from 0, f_k is a stack of blocks whose first one takes the k + 2 vectors to one, e the target's embedding
    (normed unless norm_embeddings is off), U its lm_head or one per head. With prefix attention h_t is replaced by
    a_t = h_t + Attention(norm(h_{<=t})) put through an MLP in the same way, one Llama layer over the target's hidden
    states (after its final norm) that runs once a step; it has no norm of its own behind it, so that a_t keeps the scale
    which the target's lm_head expects.
    Source: Ankner et al. 2024 (Hydra): the definition of Hydra heads, and Hydra++ (deeper heads, prefix attention,
    and the target's distribution as label, which is ``configs/loss/soft_ce.yaml``).
    """

    def __init__(self, config: HydraConfig, spec: TargetSpec) -> None:
        super().__init__(config, spec)
        size, depths = spec.hidden_size, config.num_draft_tokens
        self.norm_embeddings = config.norm_embeddings
        self.blocks = nn.ModuleList(
            nn.Sequential(
                HydraBlock(size, depth + 2, config.dropout),
                *(HydraBlock(size, 1, config.dropout) for _ in range(config.num_layers - 1)),
            )
            for depth in range(depths)
        )
        self.input_layernorm: RMSNorm | None = None
        self.layer: DraftLayer | None = None
        if config.prefix_attention:
            self.input_layernorm = RMSNorm(size, spec.rms_norm_eps)
            self.layer = DraftLayer(spec, DraftLayerConfig(intermediate_size=config.intermediate_size), size)
        rows = config.draft_vocab_size or spec.vocab_size
        count = 0 if config.shared_lm_head else depths
        self.lm_heads = nn.ModuleList(nn.Linear(size, rows, bias=False) for _ in range(count))

    def features(self) -> FeatureRequest:
        """Only the last hidden state; prefix attention reads it before the anchors too."""
        return FeatureRequest(last="anchors" if self.layer is None else "prefix")

    def vocabulary_parameters(self) -> list[str]:
        """The unshared lm_heads."""
        return [f"lm_heads.{k}.weight" for k in range(len(self.lm_heads))]

    def init_from_target(self, embed: Embed, unembed: Unembedding) -> None:
        """Unshared lm_heads start as the target's rows."""
        for lm_head in self.lm_heads:
            lm_head.get_parameter("weight").data.copy_(self.draft_unembedding(unembed).weight)

    def unembedding(self, depth: int, unembed: Unembedding) -> Unembedding:
        """The target's lm_head, or the head's own, finished (scaled, soft-capped) as the target's logits are."""
        if not len(self.lm_heads):
            return unembed
        return Unembedding(self.lm_heads[depth].get_parameter("weight"), unembed.bias, unembed.scale, unembed.softcap)

    def advance(self, depth: int, path: Tensor, tokens: Tensor, embed: Embed) -> tuple[Tensor, Tensor]:
        """The state is all that a head reads: h and the embeddings side by side, ``[M, (depth + 1) H]`` before."""
        embedded = embed(tokens).detach()
        if self.norm_embeddings:
            embedded = nn.functional.rms_norm(embedded.float(), embedded.shape[-1:], eps=self.spec.rms_norm_eps)
        path = torch.cat([path, embedded.to(path.dtype)], -1)
        return path, self.blocks[depth](path)

    def seed(self, batch: DraftBatch) -> Tensor:
        """The target's last hidden states at the anchors, behind the prefix attention if there is one."""
        hidden = batch.features.last_hidden.flatten(0, 1).to(self.dtype)
        chosen = hidden[batch.anchors]
        if self.layer is None or self.input_layernorm is None:
            return chosen
        layout = AnchorLayout.of(batch)
        self.layer.rotary.reserve(batch.input_ids.shape[1])
        positions = batch.position_ids.flatten()
        x = self.input_layernorm(hidden)
        attention = AnchorAttention(*self.layer.keys_values(x, positions), layout)
        query = self.layer.queries(x[batch.anchors], positions[batch.anchors])
        layer = self.layer
        seeded: Tensor = self.recomputed(lambda q, residual: layer.finish(attention(q), residual), query, chosen)
        return seeded

    def init_state(self, max_length: int, tree: DraftTree, unembed: Unembedding) -> SequentialState:
        """With prefix attention, also its keys and values for ``max_length`` positions."""
        state = super().init_state(max_length, tree, unembed)
        if self.layer is None:
            return state
        self.layer.rotary.reserve(max_length)
        shape = (1, self.layer.num_kv_heads, max_length, self.layer.head_dim)
        device = self.layer.qkv_proj.weight.device
        keys, values = (torch.empty(shape, dtype=self.dtype, device=device) for _ in range(2))
        return PrefixState(state.unembeds, keys, values)

    def begin(self, state: SequentialState, context: DraftContext) -> Tensor:
        """The last committed state; the prefix attention keeps the keys and values of all committed ones."""
        hidden = context.features.last_hidden[0].to(self.dtype)
        if self.layer is None or self.input_layernorm is None or not isinstance(state, PrefixState):
            return hidden[-1:]
        stop = context.start + hidden.shape[0]
        positions = torch.arange(context.start, stop, device=hidden.device)
        x = self.input_layernorm(hidden)
        # One product for all three, though only the last row's query is used: it goes through the packed weight.
        query, *kept = self.layer.project(x, positions)
        state.write(context.start, *kept)
        return self.layer.finish(state.attend(query[-1:], stop), hidden[-1:])


class PrefixState(SequentialState):
    """The same with the keys and values of the prefix attention, ``[1, kv_heads, max_length, head_dim]`` each."""

    def __init__(self, unembeds: list[Unembedding], keys: Tensor, values: Tensor) -> None:
        super().__init__(unembeds)
        self.keys, self.values = keys, values

    def write(self, start: int, keys: Tensor, values: Tensor) -> None:
        """Stores ``[n, kv_heads, head_dim]`` at rows ``start .. start + n - 1``."""
        stop = start + keys.shape[0]
        self.keys[0, :, start:stop] = keys.transpose(0, 1)
        self.values[0, :, start:stop] = values.transpose(0, 1)

    def attend(self, query: Tensor, filled: int) -> Tensor:
        """One query ``[1, heads, head_dim]`` over the first ``filled`` rows -> ``[1, heads * head_dim]``."""
        out = nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            self.keys[:, :, :filled],
            self.values[:, :, :filled],
            enable_gqa=self.keys.shape[1] != query.shape[1],
        )
        return out[0].transpose(0, 1).reshape(1, -1)
