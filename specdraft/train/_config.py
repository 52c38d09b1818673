"""Settings of the optimizer, the training loop and the metrics. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdraft.core.errors import ConfigError

OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("cosine", "linear", "constant", "wsd")
PRECISIONS = ("no", "bf16", "fp16")
TRACKERS = ("none", "jsonl", "wandb", "tensorboard", "trackio")


@dataclass(slots=True, kw_only=True)
class OptimConfig:
    """The optimizer and its learning-rate schedule; every count is in optimizer steps."""

    optimizer: str = "adamw"
    """adamw; or muon for the matrices between hidden states (Jordan et al. 2024, with the update's size matched to AdamW's
    so that ``lr`` means the same), AdamW for embeddings, lm_heads, norms and biases."""
    lr: float = 1e-3
    """Peak learning rate, reached after the warm-up."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay of AdamW's running mean of the gradient and of its square."""
    momentum: float = 0.95
    """Decay of Muon's running mean of the gradient; of no effect, so to be left alone, with adamw."""
    weight_decay: float = 0.0
    """Decoupled decay of matrices; norms, biases and embeddings are not decayed."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    schedule: str = "cosine"
    """How the rate falls from the peak after the warm-up: cosine, linear, constant (it does not), or wsd (constant, then
    linear over the last steps)."""
    warmup_ratio: float = 0.05
    """Share of all optimizer steps in which the rate rises linearly from zero."""
    min_lr_ratio: float = 0.0
    """The rate at the end, as a share of ``lr``; must stay 0 with a constant schedule."""
    decay_ratio: float = 0.2
    """Share of all optimizer steps in which wsd lets the rate fall; of no effect with the other schedules."""
    max_grad_norm: float | None = 1.0
    """The gradient is scaled down to this norm; null = never."""

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(f"optim.optimizer: unknown, got {self.optimizer!r}; use {' or '.join(OPTIMIZERS)}")
        if not 0.0 < self.lr < float("inf"):
            raise ConfigError(f"optim.lr: must be positive, got {self.lr}; use e.g. 1e-3")
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ConfigError(f"optim.betas: two numbers in [0, 1) are needed, got {self.betas}; use [0.9, 0.95]")
        if self.weight_decay < 0.0:
            raise ConfigError(f"optim.weight_decay: must not be negative, got {self.weight_decay}; use 0")
        if self.eps <= 0.0:
            raise ConfigError(f"optim.eps: must be positive, got {self.eps}; use 1e-8")
        if not 0.0 <= self.momentum < 1.0:
            raise ConfigError(f"optim.momentum: must lie in [0, 1), got {self.momentum}; use 0.95")
        if self.optimizer != "muon" and self.momentum != 0.95:
            raise ConfigError(
                f"optim.momentum: has no effect without optim.optimizer=muon, got {self.momentum}; use 0.95 or optim.betas"
            )
        self._check_schedule()
        if self.max_grad_norm is not None and self.max_grad_norm <= 0.0:
            raise ConfigError(f"optim.max_grad_norm: must be positive or null, got {self.max_grad_norm}; use null")

    def _check_schedule(self) -> None:
        """Rules of the schedule; a number other than its default needs the schedule that reads it."""
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"optim.schedule: unknown, got {self.schedule!r}; use {', '.join(SCHEDULES)}")
        for name in ("warmup_ratio", "min_lr_ratio", "decay_ratio"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"optim.{name}: must lie in 0..1, got {getattr(self, name)}; use e.g. 0.05")
        if self.schedule == "constant" and self.min_lr_ratio:
            raise ConfigError(
                f"optim.min_lr_ratio: has no effect on a constant rate, got {self.min_lr_ratio}; "
                "use 0 or optim.schedule=cosine"
            )
        if self.schedule != "wsd" and self.decay_ratio != 0.2:
            raise ConfigError(
                f"optim.decay_ratio: has no effect without optim.schedule=wsd, got {self.decay_ratio}; use 0.2"
            )
        if self.schedule == "wsd" and self.warmup_ratio + self.decay_ratio > 1.0:
            raise ConfigError(
                f"optim.decay_ratio: leaves no room for optim.warmup_ratio ({self.warmup_ratio}), "
                f"got {self.decay_ratio}; use at most {1.0 - self.warmup_ratio:g}"
            )


@dataclass(slots=True, kw_only=True)
class TrainerConfig:
    """How long, how often and in which precision a head is trained."""

    epochs: int = 1
    """Passes over the training rows, where neither max_tokens nor max_minutes says how long to train."""
    max_steps: int | None = None
    """Optimizer steps after which training ends though epochs remain; null = no such limit."""
    max_tokens: int | None = None
    """Tokens (of all processes, prompts included) after which training ends, over as many epochs as that takes; null = no
    such limit."""
    max_minutes: float | None = None
    """Minutes of training, without measuring and saving, after which it ends, over as many epochs as that takes; the learning
    rate then follows the time. Null = no such limit."""
    accumulation_steps: int = 1
    """Micro-batches per process that make one optimizer step; the loss is normalised over all of them."""
    mixed_precision: str = "bf16"
    """Arithmetic of head and loss (weights stay fp32): no = fp32, bf16, or fp16 (GPU only, loss scaled)."""
    log_every: int = 10
    """Optimizer steps between two lines of metrics."""
    eval_every: int | None = None
    """Optimizer steps between two measurements of acceptance; null = at the end of every epoch."""
    save_every: int | None = None
    """Optimizer steps between two checkpoints; null = at the end of every epoch."""
    keep_checkpoints: int = 2
    """Checkpoints kept; older ones are removed once a newer one is complete."""
    feature_memory_gib: float = 0.0
    """Memory for the target's features of rows seen before, per process: later epochs then need no target forward for
    them. Exact up to rounding, so a resumed run equals an uninterrupted one bit by bit only with 0 (nothing is kept)."""
    eval_prompts: int = 16
    """Prompts (of 32 built-in ones, used for nothing else) on which acceptance is measured to choose the best head; 0 = the
    best is the last."""
    eval_max_new_tokens: int = 64
    """Tokens decoded per held-out prompt in that measurement."""
    early_stop: int | None = None
    """Measurements of acceptance in a row without a new best one after which training ends; null = never."""
    ema_decay: float | None = None
    """Share of the average that stays at each step when the weights are averaged (EMA): then the average is measured and
    saved, and checkpoints hold both; null = the weights themselves."""
    gradient_checkpointing: bool = False
    """The head's layers keep their inputs only and run again in the backward pass: less memory for more time."""
    compile: bool = False
    """The head's forward and backward are compiled by torch.compile; the first steps take a minute or more."""
    prefetch: int = 2
    """Optimizer steps whose rows a thread puts into batches while earlier ones train; 0 = none."""
    warm_start: str | None = None
    """Folder or Hub id of a head of the same kind whose weights training starts from; its draft vocabulary may be another.
    Null = the head's own start."""
    skip_nonfinite: bool = False
    """A step whose loss or gradient is not finite is skipped and counted; false = training stops there."""

    def __post_init__(self) -> None:
        for name in ("epochs", "accumulation_steps", "log_every", "keep_checkpoints", "eval_max_new_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"trainer.{name}: must be at least 1, got {getattr(self, name)}; use 1 or more")
        for name in ("max_steps", "max_tokens", "eval_every", "save_every", "early_stop"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"trainer.{name}: must be at least 1 or null, got {value}; use null or e.g. 100")
        if not 0.0 <= self.feature_memory_gib < float("inf"):
            raise ConfigError(
                f"trainer.feature_memory_gib: must not be negative, got {self.feature_memory_gib}; use 0 to keep nothing"
            )
        if self.ema_decay is not None and not 0.0 < self.ema_decay < 1.0:
            raise ConfigError(
                f"trainer.ema_decay: must lie between 0 and 1 or be null, got {self.ema_decay}; use e.g. 0.999"
            )
        if self.compile and self.gradient_checkpointing:
            raise ConfigError(
                "trainer.gradient_checkpointing: torch.compile chooses itself what is computed again, got true with "
                "trainer.compile; use one of them"
            )
        if self.warm_start is not None and not self.warm_start:
            raise ConfigError("trainer.warm_start: must not be empty, got ''; give a folder or a Hub id, or null")
        if self.prefetch < 0:
            raise ConfigError(f"trainer.prefetch: must not be negative, got {self.prefetch}; use 0 for none")
        if self.max_minutes is not None and not 0.0 < self.max_minutes < float("inf"):
            raise ConfigError(f"trainer.max_minutes: must be positive or null, got {self.max_minutes}; use e.g. 20")
        self._check_measurements()
        if self.mixed_precision not in PRECISIONS:
            raise ConfigError(
                f"trainer.mixed_precision: unknown, got {self.mixed_precision!r}; use {', '.join(PRECISIONS)}"
            )

    def _check_measurements(self) -> None:
        """Rules of what is measured on held-out prompts."""
        if self.eval_prompts < 0:
            raise ConfigError(f"trainer.eval_prompts: must not be negative, got {self.eval_prompts}; use 0 for none")
        if self.early_stop is not None and not self.eval_prompts:
            raise ConfigError(
                f"trainer.early_stop: has no effect without trainer.eval_prompts, got {self.early_stop}; "
                "use null or set trainer.eval_prompts"
            )


@dataclass(slots=True, kw_only=True)
class TrackerConfig:
    """Where metrics go besides the terminal."""

    kind: str = "jsonl"
    """none, jsonl (metrics.jsonl in the run's folder), wandb (Weights & Biases, online or offline), tensorboard (event files
    in the run's folder) or trackio (a local dashboard)."""
    project: str = "specdraft"
    """Project under which wandb or trackio file the run."""

    def __post_init__(self) -> None:
        if self.kind not in TRACKERS:
            raise ConfigError(f"tracker.kind: unknown, got {self.kind!r}; use {', '.join(TRACKERS)}")
        if not self.project:
            raise ConfigError("tracker.project: must not be empty, got ''; use e.g. specdraft")
