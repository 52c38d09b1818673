"""The configurations of ``accelerate launch``: each is read by Accelerate, and a launch that shards the head is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from specdraft.config.paths import config_dir
from specdraft.core.errors import ConfigError
from specdraft.train._config import TrainerConfig
from specdraft.train.inputs import make_accelerator

FILES = sorted((config_dir() / "accelerate").glob("*.yaml"))


def test_which_there_are() -> None:
    assert [path.stem for path in FILES] == ["ddp", "ddp_cpu", "multi_node", "single"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_accelerate_reads_it(path: Path) -> None:
    """An unknown key is an error there; what the command line adds wins over the file."""
    config = load_config_from_file(str(path))
    written = yaml.safe_load(path.read_text())
    assert {key: getattr(config, key) for key in ("num_processes", "num_machines", "machine_rank")} == {
        key: written[key] for key in ("num_processes", "num_machines", "machine_rank")
    }
    assert config.distributed_type.value == written["distributed_type"]
    words = ["--config_file", str(path), "--num_processes", "1" if path.stem == "single" else "4", "train.py", "name=x"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    assert args.num_processes == int(words[3])
    assert args.training_script == "train.py"


@pytest.mark.parametrize("variable", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_a_launch_that_shards_is_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "true")
    with pytest.raises(
        ConfigError, match=r"^accelerate: heads are small, so every process holds one \(DDP\), got a launch"
    ):
        make_accelerator(TrainerConfig(mixed_precision="no"), "cpu")
