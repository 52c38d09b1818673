"""EAGLE-3: drafts from fused hidden states of several target layers, trained on its own unroll, with its own lm_head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdraft.core.errors import ConfigError
from specdraft.core.types import Features, TargetSpec, Unembedding
from specdraft.heads._blocks import DraftLayer, RMSNorm
from specdraft.heads._config import FusedLayersConfig, check_layer_init, check_shares
from specdraft.heads._fused import FusedFeaturesHead
from specdraft.heads._unroll import UnrolledHead
from specdraft.heads.base import register_head


@register_head("eagle3")
@dataclass(slots=True, kw_only=True)
class Eagle3Config(FusedLayersConfig):
    """Settings of an EAGLE-3 head, with the switches of EAGLE-3.1."""

    norm_before_residual: bool = False
    """True: the residual is the normed hidden state (some published heads); False: the hidden state as it is."""

    fc_norm: bool = False
    """True: every fused feature is normed by itself before the projection (EAGLE-3.1)."""
    norm_output: bool = False
    """True: the normed output is fed back, which the lm_head reads too (EAGLE-3.1); False: the output before the norm."""
    unroll_steps: int | None = None
    """Depths trained on the head's own states (training-time test); null = num_draft_tokens."""
    keep_ratio: float = 1.0
    """Depth k (from 0) is trained from a random share of keep_ratio ** k of the anchors, which stand for all of them; 1 =
    all."""
    layer_init: str = "auto"
    """What the layer starts from: target = the target's last layer, random, or auto = the target's where it is built
    like the draft layer (the log says which)."""

    def __post_init__(self) -> None:
        FusedLayersConfig.__post_init__(self)
        check_layer_init(self.layer_init)
        check_shares(keep_ratio=self.keep_ratio)
        if self.keep_ratio < 1.0 and self.trained_depths == 1:
            raise ConfigError(
                f"head.keep_ratio: has no effect where one depth is trained, got {self.keep_ratio}; use 1"
            )
        if self.unroll_steps is not None and not 1 <= self.unroll_steps <= self.num_draft_tokens:
            raise ConfigError(
                f"head.unroll_steps: must lie in 1..head.num_draft_tokens ({self.num_draft_tokens}) or be null, "
                f"got {self.unroll_steps}; use null"
            )

    @property
    def trained_depths(self) -> int:
        """See HeadConfig."""
        return self.unroll_steps or self.num_draft_tokens

    def default_layers(self, count: int) -> list[int]:
        """The middle, four fifths of the way, and what the last layer reads, from which the draft layer starts.

        Measured better than EAGLE-3's own 3, n/2 + 1 and n - 2 (recipes/LOG.md).
        """
        return [min(count // 2 + 1, count - 3), min(round(0.8 * count), count - 2), count - 1]

    @classmethod
    def from_saved(cls, settings: Mapping[str, Any], spec: TargetSpec) -> dict[str, Any]:
        """See HeadConfig: null layers were those of EAGLE-3."""
        if settings.get("aux_layers") is not None:
            return dict(settings)
        own = FusedLayersConfig(kind="eagle3").layers_of(spec)
        return {**settings, "aux_layers": list(own)}

    def build(self, spec: TargetSpec) -> Eagle3Head:
        """A head with random layer weights.

        Raises:
            ConfigError: an aux layer the target does not have.
        """
        return Eagle3Head(self, spec)


class Eagle3Head(FusedFeaturesHead, UnrolledHead):
    """g_t = W [low; mid; high], then Layer([norm(e(x_{t+1})); norm(g_t)]) with residual g_t, its output fed back as g.

    Logits are lm_head(norm(output)) over the draft vocabulary, with lm_head trained from the target's rows. No feature
    loss. Source: Li et al. 2025 (EAGLE-3), section 3 and figure 5.

    With fc_norm, g_t = W [norm_1(low); norm_2(mid); norm_3(high)]; with norm_output, norm(output) is fed back. Both keep
    the state's scale the same however deep the draft. Source: EAGLE-3.1 (the study of attention drift).
    """

    def __init__(self, config: Eagle3Config, spec: TargetSpec) -> None:
        super().__init__(config, spec)
        self.layer_init, self.keep_ratio = config.layer_init, config.keep_ratio
        self.norm_before_residual, self.norm_output = config.norm_before_residual, config.norm_output
        self.aux_layers = config.layers_of(spec)
        size = spec.hidden_size
        self.fc_norm = nn.ModuleList(RMSNorm(size, spec.rms_norm_eps) for _ in self.aux_layers if config.fc_norm)
        self.fc = nn.Linear(len(self.aux_layers) * size, size, bias=False)
        self.input_layernorm = RMSNorm(size, spec.rms_norm_eps)
        self.hidden_norm = RMSNorm(size, spec.rms_norm_eps)
        self.layer = DraftLayer(spec, config, 2 * size)
        self.norm = RMSNorm(size, spec.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size or spec.vocab_size, bias=False)

    def seed(self, features: Features) -> Tensor:
        """The fused features."""
        if features.aux_hidden is None:
            raise ValueError("an EAGLE-3 head was given features without auxiliary layers")
        parts = features.aux_hidden.flatten(0, 1).to(self.dtype)
        if len(self.fc_norm):
            chunks = zip(self.fc_norm, parts.chunk(len(self.fc_norm), -1), strict=True)
            parts = torch.cat([norm(part) for norm, part in chunks], -1)
        fused: Tensor = self.fc(parts)
        return fused

    def mix(self, hidden: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Both normed, side by side; the residual is the hidden state (normed if asked for)."""
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.input_layernorm(embedded).to(normed.dtype), normed], -1)
        return x, normed if self.norm_before_residual else hidden

    def readout(self, output: Tensor) -> Tensor:
        """The normed output."""
        normed: Tensor = self.norm(output)
        return normed

    def feedback(self, output: Tensor) -> Tensor:
        """The output before the norm, or behind it."""
        return self.readout(output) if self.norm_output else output

    def unembedding(self, unembed: Unembedding) -> Unembedding:
        """The head's own lm_head, finished (scaled, soft-capped) as the target's logits are."""
        return Unembedding(self.lm_head.weight, None, unembed.scale, unembed.softcap, self.lm_head)
