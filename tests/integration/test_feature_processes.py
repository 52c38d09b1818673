"""Two real processes write a feature store and train from it; killed in the middle, they go on without losing a shard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specdraft.data.feature_store import read_index
from tests.cli import experiment_words, make_workspace

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("features"))


def start(workspace: Path, folder: Path, command: str, *words: str, processes: int = 2) -> subprocess.Popen[str]:
    code = "import sys; from specdraft.cli.main import main; sys.exit(main(sys.argv[1:]))"
    (folder / "command.py").write_text(code)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    settings = [*experiment_words(workspace), "features=offline", "head=eagle3", *words]
    return subprocess.Popen(
        [sys.executable, *launcher, str(folder / "command.py"), command, *settings],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=180)
    assert process.returncode == 0, out
    return out


def rows_of(folder: Path) -> list[int]:
    """Rows that each process has listed."""
    return [sum(entry.num_rows for entry in read_index(path)) for path in sorted(folder.glob("index-*.json"))]


def test_two_processes_prepare_and_train(workspace: Path, tmp_path: Path) -> None:
    assert "of 6 rows to capture" in finish(start(workspace, tmp_path, "prepare"))
    (store,) = (tmp_path / "outputs" / "data").glob("features-*")
    assert rows_of(store) == [4, 2]  # micro-batches of two rows
    assert "to capture" not in finish(start(workspace, tmp_path, "prepare"))
    out = finish(start(workspace, tmp_path, "train", "name=two"))
    assert "trained: 2 steps" in out and "to capture" not in out
    out = finish(start(workspace, tmp_path, "train", "name=one", processes=1))
    assert "trained: 3 steps" in out


def test_a_kill_of_all_processes_loses_no_whole_shard(workspace: Path, tmp_path: Path) -> None:
    """Killed as soon as a shard is there, which is before the end: every shard holds one row."""
    process = start(
        workspace, tmp_path, "prepare", "features.precision=fp32", "features.shard_mib=1", "data.batch_size=1"
    )
    data = tmp_path / "outputs" / "data"
    deadline = time.monotonic() + 120
    while not list(data.glob("features-*/store.json")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    finish(
        start(workspace, tmp_path, "prepare", "features.precision=fp32", "features.shard_mib=1", "data.batch_size=1")
    )
    (store,) = data.glob("features-*")
    assert sum(rows_of(store)) == 6 and not list(store.glob(".shard*"))
