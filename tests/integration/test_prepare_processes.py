"""Preparation in real processes: killed at any moment and gone on with, rendered by several, and one that dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from specdraft.core.errors import DataError
from specdraft.data import store, workers
from specdraft.data._config import DataConfig
from specdraft.data.prepare import prepare
from specdraft.data.prepared import PreparedData
from specdraft.data.workers import spread
from tests.tiny import tiny_tokenizer

ROOT = Path(__file__).parents[2]
ROWS = 600
LIMIT_S = 300
"""For a process on a busy machine."""
JOB = """
import sys
from pathlib import Path
from specdraft.data import store, workers
from specdraft.data._config import DataConfig
from specdraft.data.prepare import prepare
from tests.tiny import tiny_tokenizer

if __name__ == "__main__":
    store.FILE_ROWS = store.GROUP_ROWS = 8
    workers.MIN_JOBS = 2
    source, folder, num_workers = sys.argv[1:]
    config = DataConfig(sources=[source], regenerate=False, num_workers=int(num_workers))
    print("begin", flush=True)
    print(len(prepare(config, tiny_tokenizer(), Path(folder))), flush=True)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for i in range(ROWS):
            file.write(json.dumps({"prompt": f"what is {i}?", "completion": f"it is {i} " * (i % 17 + 1)}) + "\n")
    return path


@pytest.fixture
def whole(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PreparedData:
    """Made by this process without an interruption, in as many shards."""
    for name in ("FILE_ROWS", "GROUP_ROWS"):
        monkeypatch.setattr(store, name, 8)
    return prepare(DataConfig(sources=[str(source)], regenerate=False), tiny_tokenizer(), tmp_path / "whole")


def start(source: Path, folder: Path, num_workers: int) -> subprocess.Popen[str]:
    script = folder.parent / "job.py"
    script.write_text(JOB)
    return subprocess.Popen(
        [sys.executable, str(script), str(source), str(folder), str(num_workers)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(process: subprocess.Popen[str]) -> None:
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, out
    assert out.split() == ["begin", str(ROWS)], out


def assert_same(folder: Path, whole: PreparedData) -> None:
    (place,) = folder.iterdir()  # nothing is left beside it
    assert place.name == whole.folder.name
    manifests = [json.loads((path / "manifest.json").read_text()) for path in (place, whole.folder)]
    for manifest in manifests:
        manifest["settings"]["num_workers"] = None
    assert manifests[0] == manifests[1]


def test_a_run_that_is_killed_is_gone_on_with(source: Path, whole: PreparedData, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    for pattern in (".*/conversations-00003.arrow", ".*/rows/rows-00001.arrow", ".*/rows/rows-00030.arrow"):
        process = start(source, folder, 1)
        deadline = time.monotonic() + LIMIT_S
        while not list(folder.glob(pattern)) and process.poll() is None:
            assert time.monotonic() < deadline, pattern
        process.send_signal(signal.SIGKILL)
        process.communicate()
    finish(start(source, folder, 1))
    assert_same(folder, whole)


def test_several_processes_make_the_same_files(source: Path, whole: PreparedData, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    for process in [start(source, folder, 2), start(source, folder, 2)]:
        out, _ = process.communicate(timeout=LIMIT_S)
        # One of the two, whichever comes second, also says that it waits.
        assert process.returncode == 0, out
        assert out.split()[-1] == str(ROWS), out
    assert_same(folder, whole)


def ends(job: int) -> int:
    """Pickled into other processes: ends the second job's one."""
    if job == 1:
        os._exit(9)
    return job


def test_a_process_that_dies_is_a_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "MIN_JOBS", 2)
    made: list[Any] = []
    with pytest.raises(
        DataError, match=r"^data\.num_workers: a process ended without a result, got 2 processes.*run again"
    ):
        made.extend(spread(ends, range(6), 2))
