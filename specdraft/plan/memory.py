"""What a run holds in the memory of a device at most, by what it is for."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from specdraft.core.types import TargetSpec
from specdraft.heads.base import DraftHead
from specdraft.plan.disk import feature_bytes, optimizer_bytes
from specdraft.plan.head_cost import PEAK, HeadCost
from specdraft.plan.job import Job
from specdraft.plan.machines import Machine
from specdraft.plan.sizes import BYTES, TargetSizes
from specdraft.plan.workload import Schedule

CHUNK_COPIES = 4
"""Arrays of a chunk of logits that exist together: draft and target, as products and as distributions."""


@dataclass(frozen=True)
class Memory:
    """Bytes. target, head, gradients, optimizer, average: what stays. kept_features: of trainer.feature_memory_gib.

    target_in_training: less than target where hidden states come from a store and no acceptance is measured.
    activations: of the head, for one batch, and copies of weights in lower precision. features: of one batch, and what the
    target's forward needs for the time of it, where that is more. loss: chunks of logits and their gradients. generation:
    cache and logits while the target writes answers, before training. process: Python and libraries, or CUDA's own.
    """

    target: float
    target_in_training: float
    head: float
    gradients: float
    optimizer: float
    average: float
    kept_features: float
    activations: float
    features: float
    loss: float
    generation: float
    process: float

    @property
    def least(self) -> float:
        """What is certain: weights, gradients and optimizer."""
        own = self.head + self.gradients + self.optimizer + self.average
        return max(self.target, self.target_in_training + own)

    @property
    def training(self) -> float:
        """The most while training."""
        parts = self.kept_features + self.activations + self.features + self.loss
        own = self.head + self.gradients + self.optimizer + self.average
        return self.target_in_training + own + parts + self.process

    @property
    def peak(self) -> float:
        """The most of the whole run."""
        return max(self.training, self.target + self.generation + self.process)

    def as_dict(self) -> dict[str, float]:
        """The parts and their sums."""
        return asdict(self) | {"least": self.least, "training": self.training, "peak": self.peak}


def memory(
    job: Job, sizes: TargetSizes, head: DraftHead, cost: HeadCost, schedule: Schedule, machine: Machine
) -> Memory:
    """Of one process on ``machine``. ``head``: may be without storage."""
    spec, trainer = sizes.spec, job.trainer
    rows, length = job.data.batch_size, schedule.longest
    weights = 4.0 * head.num_parameters
    width = BYTES[job.target.dtype]
    states = feature_bytes(job, head, rows * length)
    forward = rows * length * (3 * spec.intermediate_size + 6 * spec.hidden_size) * width
    activations = PEAK * cost.memory_bytes(rows, length)
    kept = feature_bytes(job, head, schedule.epoch_tokens)
    target = _share_bytes(job, sizes) if job.is_sharded else sizes.weight_bytes(job.target, machine.device)
    has_layers = job.features.mode != "offline" or trainer.eval_prompts > 0
    return Memory(
        target=target,
        target_in_training=target if has_layers else float(sizes.outer_parameters * width),
        head=weights,
        gradients=weights,
        optimizer=float(optimizer_bytes(job, head)),
        average=weights if trainer.ema_decay is not None else 0.0,
        kept_features=min(trainer.feature_memory_gib * 2**30, kept),
        activations=activations,
        features=states + max(0.0, forward - activations),
        loss=_loss_bytes(job, head, spec, rows * length * schedule.workload.supervised_share),
        generation=_generation_bytes(job, sizes, schedule),
        process=machine.reserved_bytes,
    )


def _share_bytes(job: Job, sizes: TargetSizes) -> float:
    """What a process holds of a sharded target: its part of the layers, two whole ones for the time of a forward, the rest."""
    layers = sizes.layer_parameters / job.processes + 2 * sizes.layer_parameters / sizes.spec.num_hidden_layers
    return (sizes.outer_parameters + layers) * BYTES[job.target.dtype]


def _loss_bytes(job: Job, head: DraftHead, spec: TargetSpec, anchors: float) -> float:
    size = job.head.draft_vocab_size or spec.vocab_size
    depth = job.head.num_draft_tokens
    chunk = job.loss.chunk_size * size * (2 if job.trainer.mixed_precision != "no" else 4) * CHUNK_COPIES
    states = 4.0 * anchors * depth * spec.hidden_size
    # Rows of the target's lm_head for the draft vocabulary, as they are and as the loss multiplies by them.
    selected = size * spec.hidden_size * BYTES[job.target.dtype] * (2 if job.head.draft_vocab_size else 1)
    own = 4.0 * sum(head.get_parameter(name).numel() for name in head.vocabulary_parameters())
    return min(chunk, anchors * depth * size * 4 * CHUNK_COPIES) + states + selected + own


def _generation_bytes(job: Job, sizes: TargetSizes, schedule: Schedule) -> float:
    workload = schedule.workload
    if not workload.answer or job.data.answers.by != "target":
        return 0.0
    rows = min(job.data.generate_batch_size, workload.num_rows)
    cache = sizes.cache_bytes(job.target, rows * schedule.longest)
    return cache + rows * sizes.spec.vocab_size * (4 + BYTES[job.target.dtype])
