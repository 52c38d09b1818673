"""The settings of everything that trains: one experiment, and the sub-commands that take one as it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from specdraft.config.paths import check_name
from specdraft.core.errors import ConfigError
from specdraft.data._config import DataConfig
from specdraft.data._features_config import FeaturesConfig
from specdraft.decode._config import DecodeConfig
from specdraft.eval._config import EvalConfig
from specdraft.heads._config import HeadConfig
from specdraft.losses._config import LossConfig
from specdraft.targets._config import AdapterConfig, TargetConfig
from specdraft.train._config import OptimConfig, TrackerConfig, TrainerConfig

RESUME = ("never", "auto", "must")
FROM_HEAD = "from_head"
"""``target.name`` that stands for the target a head was trained for."""
MISSING = "???"
"""A value the user has to give (OmegaConf's mark)."""


@dataclass(slots=True, kw_only=True)
class ExperimentRun:
    """What plan, doctor, prepare, train and run share: one experiment file configures them all."""

    name: str = MISSING
    """Folder of the run under output_dir."""
    seed: int = 0
    """Of the head's first weights, the noise of training and every draw that has no seed of its own."""
    output_dir: str = "outputs"
    """Folder that holds the runs and the prepared data."""
    resume: str = "never"
    """never = the run's folder must be empty; auto = continue if there is a checkpoint; must = continue."""
    target: TargetConfig = field(default_factory=TargetConfig)
    """The frozen model that is made faster."""
    head: HeadConfig = field(default_factory=HeadConfig)
    """The draft head."""
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    """An adapter on the target that is trained with the head; by default none."""
    data: DataConfig = field(default_factory=DataConfig)
    """The training conversations."""
    features: FeaturesConfig = field(default_factory=FeaturesConfig)
    """Where the target's hidden states come from."""
    loss: LossConfig = field(default_factory=LossConfig)
    """The training loss."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer and its schedule."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Length, precision and rhythm of training."""
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    """Where metrics go."""
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    """How the head drafts when its acceptance is measured."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """What `run` measures at the end."""

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.name == "data" and self.data.cache_dir is None:
            raise ConfigError("name: is the folder of the prepared data, got 'data'; use another name")
        if self.resume not in RESUME:
            raise ConfigError(f"resume: unknown, got {self.resume!r}; use {', '.join(RESUME)}")
        if not self.output_dir:
            raise ConfigError("output_dir: must not be empty, got ''; use e.g. outputs")
        if self.target.name == FROM_HEAD:
            raise ConfigError(
                f"target.name: there is no trained head yet, got {FROM_HEAD!r}; name a model, e.g. smollm2"
            )
        self.head.check_terms(self.loss.terms)
        if self.decode.min_confidence is not None and not self.head.estimates_acceptance:
            raise ConfigError(
                f"decode.min_confidence: needs a head with a confidence head, got {self.decode.min_confidence}; use null"
            )
        self._check_adapter()
        self._check_lengths()
        if self.trainer.eval_every is not None and not self.trainer.eval_prompts:
            raise ConfigError(
                f"trainer.eval_every: has no effect without trainer.eval_prompts, got {self.trainer.eval_every}; "
                "use null or set trainer.eval_prompts"
            )

    def _check_adapter(self) -> None:
        """Rules of an adapter on the target with everything else."""
        rank = self.adapter.rank
        if rank is None:
            return
        if not self.head.trains_target:
            raise ConfigError(
                f"adapter.rank: heads of kind {self.head.kind} are trained for the target as it is, got {rank}; "
                "use adapter=none or head=medusa"
            )
        if self.trainer.feature_memory_gib:
            raise ConfigError(
                "trainer.feature_memory_gib: the features change with the adapter, got "
                f"{self.trainer.feature_memory_gib} with adapter.rank={rank}; use 0"
            )
        if self.features.mode != "online":
            raise ConfigError(
                f"features.mode: the features change with the adapter, got {self.features.mode} with adapter.rank={rank}; "
                "use features=online"
            )
        if self.trainer.ema_decay is not None:
            raise ConfigError(
                f"trainer.ema_decay: the adapter is not averaged, got {self.trainer.ema_decay} with adapter.rank={rank}; "
                "use null"
            )
        if self.optim.optimizer != "adamw":
            raise ConfigError(
                f"optim.optimizer: the adapter takes adamw, got {self.optim.optimizer} with adapter.rank={rank}; use adamw"
            )
        if self.target.quantization != "none" or self.target.device_map is not None or self.target.compile:
            raise ConfigError(
                f"adapter.rank: needs a target with plain weights on one device, got {rank}; use "
                "target.quantization=none target.device_map=null target.compile=false"
            )

    def _check_lengths(self) -> None:
        """Rules between the depth of the head, the drafts of decoding and the rows of the data."""
        depth = self.head.num_draft_tokens
        trained = self.head.trained_depths
        if self.loss.step_weights is not None and len(self.loss.step_weights) != trained:
            raise ConfigError(
                f"loss.step_weights: must be one for each of the {trained} depths that the head trains, "
                f"got {self.loss.step_weights}; give {trained} or null"
            )
        if self.data.max_length < depth + 2:
            raise ConfigError(
                f"data.max_length: must be at least head.num_draft_tokens + 2 ({depth + 2}), "
                f"got {self.data.max_length}; use longer rows"
            )
        if self.data.regenerate and self.data.max_new_tokens >= self.data.max_length:
            raise ConfigError(
                f"data.max_new_tokens: leaves no room for a prompt in data.max_length ({self.data.max_length}), "
                f"got {self.data.max_new_tokens}; use fewer"
            )
        if self.decode.num_draft_tokens is not None and self.decode.num_draft_tokens > depth:
            raise ConfigError(
                f"decode.num_draft_tokens: must not exceed head.num_draft_tokens ({depth}), "
                f"got {self.decode.num_draft_tokens}; use at most {depth} or null"
            )
        if self.decode.dynamic_depth is not None and self.decode.dynamic_depth > depth:
            raise ConfigError(
                f"decode.dynamic_depth: must not exceed head.num_draft_tokens ({depth}), "
                f"got {self.decode.dynamic_depth}; use at most {depth} or null"
            )
        deepest = max((len(path) for path in self.decode.tree or []), default=0)
        if deepest > depth:
            raise ConfigError(
                f"decode.tree: must not be deeper than head.num_draft_tokens ({depth}), got a path of {deepest}; "
                "shorten it"
            )

    @property
    def folder(self) -> Path:
        """The run's folder, the same on every rank."""
        return Path(self.output_dir) / self.name

    @property
    def data_dir(self) -> Path:
        """The folder of prepared data sets."""
        return Path(self.data.cache_dir) if self.data.cache_dir is not None else Path(self.output_dir) / "data"


@dataclass(slots=True, kw_only=True)
class PrepareRun(ExperimentRun):
    """Renders the training conversations and lets the target answer them; reads target, data and output_dir."""


@dataclass(slots=True, kw_only=True)
class TrainRun(ExperimentRun):
    """Trains a head, preparing the data first where that was not done."""


@dataclass(slots=True, kw_only=True)
class PipelineRun(ExperimentRun):
    """Prepares, trains, measures the best head and prints the result."""
