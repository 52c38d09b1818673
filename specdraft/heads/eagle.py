"""EAGLE-1: predicts the target's next last hidden state from the present one and the next token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdraft.core.errors import ConfigError
from specdraft.core.types import Embed, FeatureRequest, Features, TargetSpec, Unembedding
from specdraft.heads._blocks import DraftLayer
from specdraft.heads._config import DraftLayerConfig
from specdraft.heads._unroll import UnrolledHead
from specdraft.heads.base import register_head


@register_head("eagle")
@dataclass(slots=True, kw_only=True)
class EagleConfig(DraftLayerConfig):
    """Settings of an EAGLE-1 head."""

    unroll_steps: int = 1
    """Depths trained on the head's own hidden states: 1 is EAGLE-1's paper, HASS aligns 3, num_draft_tokens trains
    what is decoded."""
    detach_steps: bool = False
    """True: a step's loss does not reach back into the steps before it, whose states it takes as given (HASS)."""
    input_noise: float = 0.1
    """Training adds uniform noise of [-input_noise, input_noise] to the target's features (paper, section 4.2)."""
    fusion_bias: bool = False
    """True: W has a bias, as many published heads have. SGLang adds it, vLLM does not."""

    def __post_init__(self) -> None:
        DraftLayerConfig.__post_init__(self)
        if not 1 <= self.unroll_steps <= self.num_draft_tokens:
            raise ConfigError(
                f"head.unroll_steps: must lie in 1..head.num_draft_tokens ({self.num_draft_tokens}), "
                f"got {self.unroll_steps}; use 1 or {self.num_draft_tokens}"
            )
        if self.detach_steps and self.unroll_steps == 1:
            raise ConfigError(
                "head.detach_steps: has no effect with head.unroll_steps=1, got true; use false or more steps"
            )
        if self.input_noise < 0:
            raise ConfigError(f"head.input_noise: must not be negative, got {self.input_noise}; use 0 for none")

    @property
    def trained_depths(self) -> int:
        """See HeadConfig."""
        return self.unroll_steps

    def build(self, spec: TargetSpec) -> EagleHead:
        """A head with random layer weights."""
        return EagleHead(self, spec)


class EagleHead(UnrolledHead):
    """f^_{t+1} = Layer(W [c e(x_{t+1}); f_t]), p(x_{t+2}) = softmax(U f^_{t+1}), U the target's frozen lm_head.

    f is the target's last hidden state after its final norm; the layer has no input norm. The constant c (1 in the paper)
    is no more than a scale of W's columns, which training would take long to find. Source: Li et al. 2024
    (EAGLE), section 4.1 and figure 5; the loss is SmoothL1(f^, f) + 0.1 CE (``configs/loss/feature.yaml``).

    HASS is the same head with unroll_steps 3 and detach_steps: at aligned step j the query is the prediction of step
    j - 1, and of the keys only those of the steps before at the same anchor are the head's own. Its loss adds the
    cross-entropy over the target's 10 likeliest tokens (``configs/loss/hass.yaml``). Source: Zhang et al. 2024 (HASS),
    sections 3.1 and 3.2.
    """

    embedding_scale: Tensor

    def __init__(self, config: EagleConfig, spec: TargetSpec) -> None:
        super().__init__(config, spec)
        self.input_noise, self.detach_steps = config.input_noise, config.detach_steps
        self.fc = nn.Linear(2 * spec.hidden_size, spec.hidden_size, bias=config.fusion_bias)
        self.layer = DraftLayer(spec, config, spec.hidden_size)
        self.register_buffer("embedding_scale", torch.ones(()))

    def features(self) -> FeatureRequest:
        """Only the last hidden state, of the anchors and all before them."""
        return FeatureRequest()

    def init_from_target(self, embed: Embed, unembed: Unembedding) -> None:
        """Embeddings are brought to the root mean square 1, since some targets' are tiny beside their features."""
        total, count = 0.0, 0
        for ids in torch.arange(self.spec.vocab_size, device=unembed.weight.device).split(4096):
            rows = embed(ids).double()
            total, count = total + float(rows.square().sum()), count + rows.numel()
        self.embedding_scale.fill_((count / total) ** 0.5 if total else 1.0)

    def seed(self, features: Features) -> Tensor:
        """The target's last hidden states, with noise in training so that the head bears its own errors."""
        hidden = features.last_hidden.flatten(0, 1).to(self.dtype)
        if self.training and self.input_noise:
            hidden = hidden + (torch.rand_like(hidden) * 2 - 1) * self.input_noise
        return hidden

    def mix(self, hidden: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """One fused vector, projected and carried on as the residual."""
        fused = self.fc(torch.cat([embedded * self.embedding_scale, hidden.to(embedded.dtype)], -1))
        return fused, fused

    def readout(self, output: Tensor) -> Tensor:
        """The predicted feature itself."""
        return output

    def unembedding(self, unembed: Unembedding) -> Unembedding:
        """The target's lm_head over the draft vocabulary."""
        return self.draft_unembedding(unembed)
