"""How long a run takes, by its parts: from rates of a machine, or from steps that were measured on it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from specdraft.heads.base import DraftHead
from specdraft.plan.disk import feature_bytes
from specdraft.plan.head_cost import HeadCost
from specdraft.plan.job import Job
from specdraft.plan.machines import Machine
from specdraft.plan.sizes import TargetSizes
from specdraft.plan.workload import Schedule, Workload

ACCEPTED = 1.0
"""Tokens that a step of measured decoding emits: a head that is no good yet, so that the time is no less."""


@dataclass(frozen=True)
class Times:
    """Seconds.

    prepare: the target writes the answers. features: its forward over the rows. training: the head's part.
    evaluation: of acceptance while training and, for `run`, of the best head at the end.
    """

    prepare: float
    features: float
    training: float
    evaluation: float

    @property
    def total(self) -> float:
        """Of all parts."""
        return self.prepare + self.features + self.training + self.evaluation

    def as_dict(self) -> dict[str, float]:
        """The parts and their sum."""
        return asdict(self) | {"total": self.total}


@dataclass(frozen=True)
class Measured:
    """Rates of this machine, taken from a short run of the same settings.

    answer_s: seconds for each token written; for writers other than the target alone. answers_factor: what writing the
    answers of the sample took, over ``answering_seconds`` of it; None where that is not what writes them. target_s,
    draft_s: of training, for each token, with all that is not the target's forward in the second. decode_s: for each token
    of a measurement of acceptance, None where none was made. peak_bytes: the most memory that the process held. steps:
    optimizer steps that were measured.
    """

    answer_s: float
    target_s: float
    draft_s: float
    decode_s: float | None
    peak_bytes: float
    steps: int
    answers_factor: float | None = None


def estimated_times(
    job: Job, sizes: TargetSizes, head: DraftHead, cost: HeadCost, schedule: Schedule, machine: Machine
) -> Times:
    """From the operations and bytes of the work and the rates of ``machine``; answers of servers take no time of its."""
    workload, processes = schedule.workload, job.processes
    rate = machine.flops * processes
    passes = _passes(schedule)
    mean = workload.mean_length
    target = schedule.epoch_tokens * sizes.forward_flops(mean / 2, lm_head=False) / rate / (1.0 - schedule.padding)
    row = cost.row_flops(mean) + _loss_flops(job, head, sizes, workload.supervised)
    training = workload.num_rows * row / rate + schedule.epoch_steps * _optimizer_s(head, machine)
    prepare = answering_seconds(job, sizes, workload, machine) / processes
    once = step_seconds(job, sizes, machine, 1, mean)
    return Times(
        prepare=prepare,
        features=target * _target_passes(job, head, schedule, passes),
        training=training * passes,
        evaluation=evaluation_tokens(job, schedule) / ACCEPTED * once,
    )


def measured_times(job: Job, head: DraftHead, schedule: Schedule, found: Measured, fallback: Times) -> Times:
    """From rates that were measured; ``fallback``: what stands for a part that was not."""
    passes, tokens = _passes(schedule), schedule.epoch_tokens
    limit = job.trainer.max_minutes
    if schedule.steps is None and limit is not None:
        passes = 60.0 * limit / max(1e-9, tokens * (found.target_s + found.draft_s))
    evaluated = evaluation_tokens(job, schedule)
    return Times(
        prepare=_measured_answering(schedule.workload, found, fallback),
        features=tokens * found.target_s * _target_passes(job, head, schedule, passes),
        training=tokens * found.draft_s * passes,
        evaluation=fallback.evaluation if found.decode_s is None else evaluated * found.decode_s,
    )


def answering_seconds(job: Job, sizes: TargetSizes, workload: Workload, machine: Machine) -> float:
    """One device reads the prompts one by one and writes the answers of a batch at a time, no place of which stays empty.

    0 where the target does not write them, or not on this machine.
    """
    if not workload.answer or job.data.answers.by != "target":
        return 0.0
    weights = sizes.step_bytes(job.target) / machine.bandwidth
    read = 0.0
    for length in workload.lengths:
        prompt = max(1.0, length - workload.answer)
        arithmetic = prompt * sizes.forward_flops(prompt / 2, lm_head=False) / machine.flops
        read += max(weights, arithmetic) + machine.step_s
    batch = min(job.data.generate_batch_size, workload.num_rows)
    steps = workload.num_rows * workload.answer / batch
    written = steps * step_seconds(job, sizes, machine, batch, workload.mean_length)
    return read * workload.num_rows / len(workload.lengths) + written


def _measured_answering(workload: Workload, found: Measured, fallback: Times) -> float:
    """``fallback``: whose estimate is brought to what was measured."""
    if found.answers_factor is None:
        return workload.num_rows * workload.answer * found.answer_s
    return fallback.prepare * found.answers_factor


def step_seconds(job: Job, sizes: TargetSizes, machine: Machine, rows: float, context: float) -> float:
    """One decoding step of ``rows`` texts: bound by reading weights and caches, or by arithmetic."""
    read = sizes.step_bytes(job.target) + sizes.cache_bytes(job.target, rows * context)
    arithmetic = rows * sizes.forward_flops(context, lm_head=True) / machine.flops
    return max(read / machine.bandwidth, arithmetic) + machine.step_s


def evaluation_tokens(job: Job, schedule: Schedule) -> float:
    """Tokens decoded while training, to choose the best head."""
    trainer = job.trainer
    if not trainer.eval_prompts:
        return 0.0
    steps = schedule.steps if schedule.steps is not None else schedule.epoch_steps
    every = trainer.eval_every or schedule.epoch_steps
    return max(1, -(-steps // every)) * trainer.eval_prompts * float(trainer.eval_max_new_tokens)


def _passes(schedule: Schedule) -> float:
    return 1.0 if schedule.passes is None else schedule.passes


def _target_passes(job: Job, head: DraftHead, schedule: Schedule, passes: float) -> float:
    """Passes in which the target runs: rows whose features are kept or stored need it once."""
    if job.features.mode != "online":
        return min(1.0, passes) if job.features.mode == "hybrid" else 1.0
    limit = job.trainer.feature_memory_gib * 2**30
    if not limit or passes <= 1.0:
        return passes
    kept = min(1.0, limit * job.processes / feature_bytes(job, head, schedule.epoch_tokens))
    return 1.0 + (passes - 1.0) * (1.0 - kept)


def _loss_flops(job: Job, head: DraftHead, sizes: TargetSizes, anchors: float) -> float:
    """Of a row: products with the lm_head, the draft's and the target's, and their gradients."""
    spec = sizes.spec
    product = 2.0 * anchors * spec.hidden_size * (job.head.draft_vocab_size or spec.vocab_size)
    trained = 1 if head.vocabulary_parameters() else 0
    teacher = (2.0 + trained) * product if job.loss.needs_teacher else 0.0
    whole = 2.0 * anchors * spec.hidden_size * spec.vocab_size if job.loss.measures_acceptance else 0.0
    return job.head.num_draft_tokens * product * (2 + trained) + teacher + whole


def _optimizer_s(head: DraftHead, machine: Machine) -> float:
    """A step of AdamW reads weight, gradient and two moments and writes three of them."""
    return 28.0 * head.num_parameters / machine.bandwidth
