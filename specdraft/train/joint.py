"""Joint training of a head and an adapter on its target (Medusa-2), held to the original target by self-distillation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn
from torch.optim import Optimizer

from specdraft.core.errors import ConfigError
from specdraft.core.types import DraftBatch, DraftStep, FeatureRequest, Features, TokenBatch
from specdraft.data.features import FeatureMemory
from specdraft.losses._config import LossConfig
from specdraft.losses.alignment import anchor_positions
from specdraft.losses.objectives import Objective, Teacher
from specdraft.targets._config import AdapterConfig
from specdraft.targets.hf import HFTarget
from specdraft.targets.lora import LoraAdapter


class Alone:
    """The usual case: the target is frozen."""

    adapter: LoraAdapter | None = None
    parameters: Sequence[nn.Parameter] = ()

    def join(self, optimizer: Optimizer) -> None:
        """Nothing is added."""

    def begin(self, progress: float, window: Sequence[TokenBatch]) -> None:
        """Every step is like every other."""

    def capture(self, tokens: TokenBatch, memory: FeatureMemory) -> Features:
        """The features the head learns from."""
        return memory.capture(tokens)

    def total(self, head_loss: Tensor, tokens: TokenBatch, batch: DraftBatch) -> Tensor:
        """The loss of the head."""
        return head_loss

    def collect(self) -> dict[str, float]:
        """No metrics."""
        return {}


class Joint(Alone):
    """Two stages: first the head learns alone, then head and adapter together.

    With the loss

        loss = KL(p_original || p_adapted) + lambda * loss of the head

    The KL is a mean over the supervised tokens; p_original is the same model with the adapter off. lambda grows linearly
    from zero to ``head_weight`` once the adapter joins. Source: Cai et al. 2024 (Medusa), section 3.2, equation 2 with
    the self-distillation of its section 3.3.2 in the place of the cross-entropy with the text. That the head comes first
    is the authors' correction of the paper's order.
    """

    def __init__(self, target: HFTarget, config: AdapterConfig) -> None:
        """Puts the adapter into ``target``.

        Raises:
            ConfigError: see ``LoraAdapter``.
        """
        self.target = target
        self.config = config
        self.adapter: LoraAdapter = LoraAdapter(target, config)
        self.parameters: Sequence[nn.Parameter] = list(self.adapter.parameters.values())
        self.head_weight: float | None = None
        """lambda at the present step; None while the head learns alone."""
        self._distance = Objective(LossConfig(terms={"forward_kl": 1.0}, step_decay=1.0))
        self._teacher = Teacher(target.unembedding, target.unembedding, None)
        self._tokens, self._sum, self._count = 1, 0.0, 0

    def join(self, optimizer: Optimizer) -> None:
        """Adds the adapter to the optimizer, with its share of the learning rate."""
        share = 1.0 / self.config.head_lr_multiple
        optimizer.add_param_group({"params": list(self.parameters), "weight_decay": 0.0, "lr_share": share})

    def begin(self, progress: float, window: Sequence[TokenBatch]) -> None:
        """Before an optimizer step: how much of the training is done (0 to 1), and its micro-batches."""
        alone, grows = self.config.head_share, self.config.warmup_share
        self.head_weight = None
        if progress >= alone:
            risen = 1.0 if not grows else min(1.0, max(0.01, (progress - alone) / grows))
            self.head_weight = self.config.head_weight * risen
        self._tokens = max(1, sum(anchor_positions(tokens).numel() for tokens in window))

    def capture(self, tokens: TokenBatch, memory: FeatureMemory) -> Features:
        """The features the head learns from, with a graph to the adapter once that has joined; none are kept."""
        if self.head_weight is None:
            return self.target.capture(tokens, memory.request)
        return self.target.capture_with_graph(tokens, memory.request)

    def total(self, head_loss: Tensor, tokens: TokenBatch, batch: DraftBatch) -> Tensor:
        """The loss of a micro-batch. head_loss: 0-d, the head's part of the step's mean."""
        if self.head_weight is None:
            return head_loss
        distance = self.distance(tokens, batch)
        self._sum += float(distance.detach())
        self._count += int(batch.drafting.sum())
        return self.head_weight * head_loss + distance / self._tokens

    def distance(self, tokens: TokenBatch, batch: DraftBatch) -> Tensor:
        """KL from the original to the adapted target, 0-d, summed over the tokens that the batch's anchors draft first.

        batch: with the features of the adapted target. The state at t + 1 is what predicts the token at t + 2.
        """
        with self.adapter.off():
            original = self.target.capture(tokens, FeatureRequest())
        states = batch.features.last_hidden.flatten(0, 1)
        hidden = states.index_select(0, (batch.anchors + 1).clamp(max=states.shape[0] - 1))
        step = DraftStep(hidden, 2, self.target.unembedding)
        return self._distance([step], replace(batch, features=original), self._teacher).loss_sum

    def collect(self) -> dict[str, float]:
        """The mean KL, in nats a token, since the last call; nothing while the head learns alone."""
        found = {"target_kl": self._sum / self._count} if self._count else {}
        self._sum, self._count = 0.0, 0
        return found


def check_processes(world_size: int) -> None:
    """Raises ConfigError under a launcher of several processes, which exchange the gradients of the head only."""
    if world_size > 1:
        raise ConfigError(f"adapter.rank: is trained in one process, got {world_size} processes; launch one")
