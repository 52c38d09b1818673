"""What the kinds share that fuse hidden states of several layers of the target and have an lm_head of their own."""

from __future__ import annotations

from torch import nn

from specdraft.core.types import Embed, FeatureRequest, LayerWeights, Unembedding
from specdraft.heads._blocks import DraftLayer, RMSNorm, start_first_layer
from specdraft.heads.base import DraftHead


class FusedFeaturesHead(DraftHead):
    """The parts of EAGLE-3 around its unroll (Li et al. 2025, section 3); a kind makes the modules and says when they run."""

    aux_layers: tuple[int, ...]
    layer_init: str
    fc: nn.Linear
    layer: DraftLayer
    norm: RMSNorm
    lm_head: nn.Linear

    def features(self) -> FeatureRequest:
        """The fused layers."""
        return FeatureRequest(self.aux_layers, last="none")

    def init_from_target(self, embed: Embed, unembed: Unembedding) -> None:
        """The lm_head starts as the target's rows of the draft vocabulary."""
        self.lm_head.weight.data.copy_(self.draft_unembedding(unembed).weight)

    def vocabulary_parameters(self) -> list[str]:
        """The lm_head."""
        return ["lm_head.weight"]

    def init_layer(self, layer: LayerWeights | None) -> str | None:
        """The target's last layer over the last fused layer: what is predicted first is the target's own next token."""
        return start_first_layer(self.layer_init, self.layer, layer, self.fc, self.norm)
