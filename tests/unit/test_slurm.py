"""The recipe for SLURM, as far as it goes without a cluster: what is submitted, and what tasks of a job are told."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
import yaml

from specdraft.cli.hydra_flags import _join_tasks
from specdraft.cli.main import main
from tests.unit.test_accelerate import launched

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes/slurm"


@pytest.mark.parametrize("name", ["slurm", "trial"])
def test_what_is_submitted(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown key of the launcher is an error of its own; what the command line adds wins."""
    words = ["--cfg", "hydra", "--config-dir", str(RECIPE), f"hydra/launcher={name}", "name=x"]
    assert main(["train", *words, "--package", "hydra.launcher", "hydra.launcher.tasks_per_node=4"]) == 0
    found = yaml.safe_load(capsys.readouterr().out.split("\n", 1)[1])
    assert found["tasks_per_node"] == 4
    assert found["submitit_folder"] == "outputs/slurm/%j"
    assert found["_target_"].endswith("SlurmLauncher" if name == "slurm" else "LocalLauncher")
    written = yaml.safe_load((RECIPE / f"hydra/launcher/{name}.yaml").read_text())
    assert set(written) - {"defaults"} <= set(found)


def test_tasks_of_a_job_are_processes_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in variables:
        monkeypatch.setenv(name, "")  # so that they are put back
        monkeypatch.delenv(name)
    assert not _join_tasks()
    job = {"EXECUTOR": "local", "LOCAL_JOB_ID": "7", "LOCAL_NTASKS": "1", "LOCAL_LOCALID": "0", "LOCAL_GLOBALID": "0"}
    for name, value in job.items():
        monkeypatch.setenv(f"SUBMITIT_{name}", value)
    assert _join_tasks()
    assert "RANK" not in os.environ
    for name, value in {"NTASKS": "2", "LOCALID": "1", "GLOBALID": "1", "NNODES": "1", "NODEID": "0"}.items():
        monkeypatch.setenv(f"SUBMITIT_LOCAL_{name}", value)
    assert _join_tasks()
    assert [os.environ[name] for name in variables[:4]] == ["1", "2", "1", "2"]


def test_the_batch_script_calls_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (RECIPE / "README.md").read_text()
    found = re.search(r"accelerate launch (.+?)train\.py", text.replace("\\\n", " "), re.DOTALL)
    assert found
    words = found[1]
    values = {'"$SLURM_NNODES"': "2", "$((8 * SLURM_NNODES))": "16", '"$SLURM_NODEID"': "1", "'\"$first\"'": "node0"}
    for name, value in values.items():
        assert name in words
        words = words.replace(name, value)
    monkeypatch.chdir(ROOT)
    _, file, *rest = shlex.split(words)
    args = launched(Path(file), *rest)
    assert (args.num_machines, args.num_processes, args.machine_rank) == (2, 16, 1)
    assert (args.main_process_ip, args.main_process_port, args.multi_gpu) == ("node0", 29500, True)
