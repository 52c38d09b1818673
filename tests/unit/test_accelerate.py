"""The configurations of ``accelerate launch``: each is read by Accelerate, and launches that cannot be used are refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from specdraft.cli.main import main
from specdraft.cli.plan import job_of
from specdraft.config.paths import config_dir
from specdraft.config.store import compose_config, to_run
from specdraft.core.errors import ConfigError
from specdraft.plan.forecast import forecast
from specdraft.plan.sizes import target_sizes
from specdraft.targets._config import TargetConfig
from specdraft.train._config import TrainerConfig
from specdraft.train.inputs import make_accelerator
from specdraft.train.sharding import asks_to_shard, check_shardable
from tests.cli import experiment_words, make_workspace
from tests.training import reset_accelerator

FILES = sorted((config_dir() / "accelerate").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """What a launch asks for is read once in the life of a process."""
    asks_to_shard.cache_clear()
    reset_accelerator()
    yield
    asks_to_shard.cache_clear()


def launched(path: Path, *words: str) -> Any:
    """The arguments of ``accelerate launch`` with the file ``path``."""
    words = ("--config_file", str(path), *words, "train.py", "name=x")
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    return args


def test_which_there_are() -> None:
    assert [path.stem for path in FILES] == ["ddp", "ddp_cpu", "fsdp2", "multi_node", "single"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_accelerate_reads_it(path: Path) -> None:
    """An unknown key is an error there; what the command line adds wins over the file."""
    config = load_config_from_file(str(path))
    written = yaml.safe_load(path.read_text())
    assert {key: getattr(config, key) for key in ("num_processes", "num_machines", "machine_rank")} == {
        key: written[key] for key in ("num_processes", "num_machines", "machine_rank")
    }
    assert config.distributed_type.value == written["distributed_type"]
    number = "1" if path.stem == "single" else "4"
    args = launched(path, "--num_processes", number)
    assert args.num_processes == int(number)
    assert args.training_script == "train.py"
    # Accelerate starts torchrun for these two, and else one process.
    assert (args.multi_gpu or args.use_fsdp) == (path.stem != "single")


def test_the_launch_with_fsdp_is_taken_as_one_that_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the launcher sets is what is asked for here, and Accelerate sees a launch of plain processes."""
    found = prepare_multi_gpu_env(launched(config_dir() / "accelerate/fsdp2.yaml"))
    for name in ("ACCELERATE_USE_FSDP", *(name for name in found if name.startswith("FSDP_"))):
        monkeypatch.setenv(name, found[name])
    assert asks_to_shard()
    assert "ACCELERATE_USE_FSDP" not in os.environ
    assert asks_to_shard()
    accelerator = make_accelerator(TrainerConfig(mixed_precision="no"), "cpu")
    assert accelerator.distributed_type.value == "NO"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, ""),
        ({"ACCELERATE_USE_FSDP": "false", "FSDP_VERSION": "1"}, ""),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"},
            r"^accelerate: a launch with FSDP needs fsdp_version: 2, got 1; use --config_file configs/accelerate/fsdp2",
        ),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "true"},
            r"^accelerate: a launch with FSDP needs fsdp_offload_params: false, got true; use",
        ),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_RESHARD_AFTER_FORWARD": "false"},
            r"^accelerate: a launch with FSDP needs fsdp_reshard_after_forward: true, got false; use",
        ),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true"},
            r"^accelerate: .* got a launch with DeepSpeed; use --config_file configs/accelerate/fsdp2.yaml, .*ddp.yaml$",
        ),
    ],
)
def test_other_launches(variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if not message:
        assert not asks_to_shard()
        return
    with pytest.raises(ConfigError, match=message):
        make_accelerator(TrainerConfig(mixed_precision="no"), "cpu")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization": "int8"}, r"^target.quantization: .* \(FSDP\), got int8; use none$"),
        ({"device_map": "auto"}, r"^target.device_map: .* \(FSDP\), got auto; use null$"),
        ({"compile": True}, r"^target.compile: .* \(FSDP\), got True; use false$"),
    ],
)
def test_settings_of_the_target_that_cannot_be_sharded(settings: dict[str, Any], message: str) -> None:
    check_shardable(TargetConfig())
    with pytest.raises(ConfigError, match=message):
        check_shardable(TargetConfig(**settings))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("prepare", "accelerate: preparing takes the whole target, got a launch with FSDP; use one process with"),
        ("run", "accelerate: measuring takes the whole target, got a launch with FSDP; launch train.py, then"),
    ],
)
def test_commands_that_do_not_shard(
    command: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main([command, "name=x", f"output_dir={tmp_path}"]) == 2
    assert f"specdraft: error: {message}" in capsys.readouterr().err


def test_the_plan_counts_a_part_of_the_layers(tmp_path: Path) -> None:
    """A target is refused where its part does not fit, not where the whole of it does not."""
    overrides = ["name=x", f"output_dir={tmp_path}", *experiment_words(make_workspace(tmp_path))]
    job = job_of(to_run("train", compose_config("train", overrides)))
    sizes = target_sizes(job.target)
    assert not job.is_sharded
    assert forecast(job).here.memory.target == 4 * sizes.num_parameters
    sharded = forecast(replace(job, processes=8, is_sharded=True)).here.memory
    assert sharded.target == 4 * (sizes.outer_parameters + sizes.layer_parameters * (1 / 8 + 2 / 4))
