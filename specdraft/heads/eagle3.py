"""EAGLE-3: drafts from fused hidden states of several target layers, trained on its own unroll, with its own lm_head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdraft.core.errors import ConfigError
from specdraft.core.types import Embed, FeatureRequest, Features, LayerWeights, TargetSpec, Unembedding
from specdraft.heads._blocks import DraftLayer, RMSNorm
from specdraft.heads._config import DraftLayerConfig
from specdraft.heads._unroll import UnrolledHead
from specdraft.heads.base import register_head


@register_head("eagle3")
@dataclass(slots=True, kw_only=True)
class Eagle3Config(DraftLayerConfig):
    """Settings of an EAGLE-3 head. Its unroll in training (training-time test) has num_draft_tokens steps."""

    aux_layers: list[int] | None = None
    """Fused layers, as indices into Hugging Face hidden_states (0 = embeddings); null = 3, n/2 + 1 and n - 2 of n layers,
    the outputs of blocks {2, n/2, n-3} counted from 0."""
    norm_before_residual: bool = False
    """True: the residual is the normed hidden state (some published heads); False: the hidden state as it is."""

    def __post_init__(self) -> None:
        DraftLayerConfig.__post_init__(self)
        layers = self.aux_layers
        if layers is not None and (not layers or len(set(layers)) != len(layers) or min(layers) < 0):
            raise ConfigError(
                f"head.aux_layers: must be distinct indices from 0, got {layers}; use e.g. [3, 16, 28] or null"
            )

    def build(self, spec: TargetSpec) -> Eagle3Head:
        """A head with random layer weights.

        Raises:
            ConfigError: an aux layer the target does not have.
        """
        return Eagle3Head(self, spec)

    def layers_of(self, spec: TargetSpec) -> tuple[int, ...]:
        """The fused layers for a target; the defaults are clamped and made distinct on shallow ones."""
        count = spec.num_hidden_layers
        if self.aux_layers is None:
            wanted = (3, count // 2 + 1, count - 2)
            return tuple(sorted({min(max(layer, 1), max(count - 1, 1)) for layer in wanted}))
        if max(self.aux_layers) > count:
            raise ConfigError(
                f"head.aux_layers: the target has hidden_states[0..{count}], got {self.aux_layers}; use smaller indices"
            )
        return tuple(self.aux_layers)


class Eagle3Head(UnrolledHead):
    """g_t = W [low; mid; high], then Layer([norm(e(x_{t+1})); norm(g_t)]) with residual g_t, its output fed back as g.

    Logits are lm_head(norm(output)) over the draft vocabulary, with lm_head trained from the target's rows. No feature
    loss. Source: Li et al. 2025 (EAGLE-3), section 3 and figure 5.
    """

    def __init__(self, config: Eagle3Config, spec: TargetSpec) -> None:
        super().__init__(config, spec, config.num_draft_tokens)
        self.norm_before_residual = config.norm_before_residual
        self.aux_layers = config.layers_of(spec)
        size = spec.hidden_size
        self.fc = nn.Linear(len(self.aux_layers) * size, size, bias=False)
        self.input_layernorm = RMSNorm(size, spec.rms_norm_eps)
        self.hidden_norm = RMSNorm(size, spec.rms_norm_eps)
        self.layer = DraftLayer(spec, config, 2 * size)
        self.norm = RMSNorm(size, spec.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size or spec.vocab_size, bias=False)

    def features(self) -> FeatureRequest:
        """The fused layers."""
        return FeatureRequest(self.aux_layers)

    def init_from_target(self, embed: Embed, unembed: Unembedding) -> None:
        """The lm_head starts as the target's rows of the draft vocabulary."""
        self.lm_head.weight.data.copy_(self.draft_unembedding(unembed).weight)

    @torch.no_grad()
    def start_layer(self, layer: LayerWeights) -> bool:
        """The target's last layer over the last fused layer's hidden state: what is drafted first is x_{t+1} again."""
        if not self.layer.start_from(layer, layer.attention_norm):
            return False
        size = self.spec.hidden_size
        self.fc.weight.zero_()
        self.fc.weight[:, -size:].fill_diagonal_(1.0)
        self.norm.weight.copy_(layer.final_norm)
        return True

    def seed(self, features: Features) -> Tensor:
        """The fused features."""
        if features.aux_hidden is None:
            raise ValueError("an EAGLE-3 head was given features without auxiliary layers")
        fused: Tensor = self.fc(features.aux_hidden.flatten(0, 1).to(self.dtype))
        return fused

    def mix(self, hidden: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Both normed, side by side; the residual is the hidden state (normed if asked for)."""
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.input_layernorm(embedded).to(normed.dtype), normed], -1)
        return x, normed if self.norm_before_residual else hidden

    def readout(self, output: Tensor) -> Tensor:
        """The normed output; the output before the norm is what the next step sees."""
        normed: Tensor = self.norm(output)
        return normed

    def unembedding(self, unembed: Unembedding) -> Unembedding:
        """The head's own lm_head, finished (scaled, soft-capped) as the target's logits are."""
        return Unembedding(self.lm_head.weight, None, unembed.scale, unembed.softcap, self.lm_head)
