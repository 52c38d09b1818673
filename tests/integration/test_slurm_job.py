"""A job of several tasks by the recipe for SLURM, on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cli import experiment_words, make_workspace

ROOT = Path(__file__).parents[2]


def test_a_job_of_two_tasks(tmp_path: Path) -> None:
    """Hydra's launcher, submitit's local executor, two processes of one run."""
    words = [*experiment_words(make_workspace(tmp_path)), "head=medusa", "name=x_${seed}", "seed=1"]
    launch = ["--multirun", "--config-dir", str(ROOT / "recipes/slurm"), "hydra/launcher=trial"]
    command = [sys.executable, str(ROOT / "train.py"), *launch, "hydra.launcher.tasks_per_node=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    done = subprocess.run(
        [*command, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "outputs").glob("x_*")
    assert folder.name == "x_1"
    assert '"processes": 2' in (folder / "environment.json").read_text()
    assert (folder / "best/model.safetensors").is_file()
