"""What is planned: the settings of a run, as every estimate takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdraft.data._config import DataConfig
from specdraft.data._features_config import FeaturesConfig
from specdraft.decode._config import DecodeConfig
from specdraft.eval._config import EvalConfig
from specdraft.heads._config import HeadConfig
from specdraft.losses._config import LossConfig
from specdraft.targets._config import TargetConfig
from specdraft.train._config import OptimConfig, TrainerConfig


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run of ``processes`` devices in ``folder``, with its prepared data under ``data_dir``.

    settings: of the whole run, which its checkpoints repeat. is_sharded: the layers of the target are spread over the
    processes.
    """

    target: TargetConfig
    head: HeadConfig
    data: DataConfig
    features: FeaturesConfig
    loss: LossConfig
    optim: OptimConfig
    trainer: TrainerConfig
    decode: DecodeConfig
    eval: EvalConfig
    folder: Path
    data_dir: Path
    settings: Mapping[str, Any]
    processes: int = 1
    is_sharded: bool = False
