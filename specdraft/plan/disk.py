"""What a run leaves on the disk, to the byte where that is decided by its settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specdraft.data.feature_layout import expected_counts, store_bytes
from specdraft.heads.base import DraftHead
from specdraft.plan.job import Job
from specdraft.plan.sizes import BYTES
from specdraft.plan.workload import Schedule
from specdraft.train.optim import ParameterGroups
from specdraft.train.state import rng_state

TOKEN_BYTES = 5
"""Of a token of prepared data: id and mask."""
ROW_BYTES = 8
ANSWER_TOKEN_BYTES = 7
"""Of a token of a written answer in the journal, as JSON text."""
METRICS_LINE_BYTES = 480
ENVIRONMENT_BYTES = 700
STATE_BYTES = 1500
"""Of a checkpoint's state beside the settings."""
CONFIG_BYTES = 2500
"""Of a saved head's config.json beside the settings."""
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.bool: "BOOL"}


@dataclass(frozen=True)
class Disk:
    """Bytes by what they are for.

    data: prepared rows and written answers. features: the store of hidden states. checkpoints: those that are kept. heads:
    best and last. log: settings and metrics. writing: what exists beside them for the time of a save.
    """

    data: float
    features: float
    checkpoints: float
    heads: float
    log: float
    writing: float

    @property
    def total(self) -> float:
        """What is there at the end."""
        return self.data + self.features + self.checkpoints + self.heads + self.log

    @property
    def peak(self) -> float:
        """The most that is there at one time."""
        return self.total + self.writing


def disk(job: Job, head: DraftHead, schedule: Schedule) -> Disk:
    """The bytes of a run. ``head``: may be without storage."""
    trainer = job.trainer
    steps = schedule.steps if schedule.steps is not None else schedule.epoch_steps
    every = trainer.save_every or schedule.epoch_steps
    saves = max(1, -(-steps // every))
    one = checkpoint_bytes(job, head)
    saved = head_bytes(head)
    workload = schedule.workload
    data: float = workload.num_tokens * TOKEN_BYTES + workload.num_rows * ROW_BYTES
    data += workload.num_rows * (workload.answer + workload.prompt * bool(workload.answer)) * ANSWER_TOKEN_BYTES
    return Disk(
        data=data,
        features=float(store_size(job, head, schedule)),
        checkpoints=min(saves, trainer.keep_checkpoints) * one,
        heads=2 * saved,
        log=-(-steps // trainer.log_every) * METRICS_LINE_BYTES + _settings_bytes(job) + ENVIRONMENT_BYTES,
        writing=one + saved,
    )


def store_size(job: Job, head: DraftHead, schedule: Schedule) -> int:
    """The store of hidden states; 0 where there is none. With a budget, hybrid stops there."""
    features, workload = job.features, schedule.workload
    if features.mode == "online":
        return 0
    request = head.features()
    supervised = round(workload.supervised * workload.num_rows)
    counts = expected_counts(workload.num_rows, workload.num_tokens, supervised, request)
    size = store_bytes(counts, request, head.spec.hidden_size, features.precision, features.shard_mib << 20)
    if features.mode == "hybrid" and features.budget_gib is not None:
        return min(size, int(features.budget_gib * 2**30))
    return size


def feature_bytes(job: Job, head: DraftHead, tokens: float) -> float:
    """Hidden states of so many tokens in the target's dtype, the last one and those of the auxiliary layers."""
    return tokens * (1 + len(head.features().aux_layers)) * head.spec.hidden_size * BYTES[job.target.dtype]


def head_bytes(head: DraftHead) -> int:
    """model.safetensors and config.json of a saved head in float32."""
    return safetensors_bytes(_saved(head), {"format": "pt"}) + CONFIG_BYTES


def checkpoint_bytes(job: Job, head: DraftHead) -> int:
    """One step checkpoint: weights, optimizer, average, random states and settings."""
    average = {name: ("F32", tuple(p.shape)) for name, p in head.named_parameters()}
    total = safetensors_bytes(_saved(head)) + safetensors_bytes(_optimizer(job, head))
    if job.trainer.ema_decay is not None:
        total += safetensors_bytes(average)
    total += len(json.dumps([rng_state()])) * job.processes
    return total + _settings_bytes(job) + STATE_BYTES


def _settings_bytes(job: Job) -> int:
    return len(json.dumps(dict(job.settings), indent=2, default=str))


def _saved(head: DraftHead) -> dict[str, tuple[str, tuple[int, ...]]]:
    def kind(value: Tensor) -> str:
        return "F32" if value.is_floating_point() else _DTYPES[value.dtype]

    return {name: (kind(value), tuple(value.shape)) for name, value in head.state_dict().items()}


def _optimizer(job: Job, head: DraftHead) -> dict[str, tuple[str, tuple[int, ...]]]:
    by_muon = {id(p) for p in ParameterGroups(head).matrices} if job.optim.optimizer == "muon" else set()
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, parameter in head.named_parameters():
        shape = tuple(parameter.shape)
        if id(parameter) in by_muon:
            tensors[f"{name}:momentum_buffer"] = ("F32", shape)
        else:
            tensors |= {f"{name}:exp_avg": ("F32", shape), f"{name}:exp_avg_sq": ("F32", shape)}
            tensors[f"{name}:step"] = ("F32", ())
    return tensors


def optimizer_bytes(job: Job, head: DraftHead) -> int:
    """State of the optimizer in memory."""
    return sum(_size(*tensor) for tensor in _optimizer(job, head).values())


def _size(dtype: str, shape: tuple[int, ...]) -> int:
    count = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "BOOL": 1}[dtype]
    for length in shape:
        count *= length
    return count


def safetensors_bytes(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> int:
    """A file of tensors, name -> (dtype, shape): its header, padded to 8 bytes, and their values."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    start = 0
    for name, (dtype, shape) in tensors.items():
        stop = start + _size(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = len(json.dumps(header, separators=(",", ":")))
    return 8 + -(-text // 8) * 8 + start
