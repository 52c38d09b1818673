"""Feature stores that go wrong: every fault ends in one clear line, and the next run goes on from there."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdraft.core.errors import ConfigError, DataError
from specdraft.data import feature_writer
from specdraft.data.feature_shards import Shard
from specdraft.data.feature_store import STORE_NAME, FeatureStore, read_index
from specdraft.data.feature_writer import FeatureWriter, check_room, used_bytes
from specdraft.targets.hf import HFTarget
from tests.feature_stores import BATCHES, REQUEST, batch, identity_of, shards, write
from tests.tiny import tiny_target

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target()


def damage(path: Path, name: str) -> None:
    """Turns over a bit of the tensor ``name`` of a shard."""
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    data[8 + size + json.loads(data[8 : 8 + size])[name]["data_offsets"][0]] ^= 1
    path.write_bytes(data)


def test_a_corrupt_row_is_found_when_it_is_read_and_made_anew(tmp_path: Path, target: HFTarget) -> None:
    store = write(tmp_path, target)
    whole = store.read(batch(0, 1, 2))
    damage(shards(tmp_path)[0], "aux")
    torn = FeatureStore(tmp_path, store.identity, target.dtype)
    with pytest.raises(DataError, match=r"shard-0000-000000\.safetensors holds row 0 otherwise.*run specdraft prepare"):
        torn.read(batch(0, 1, 2))
    assert torn.read(batch(9)) is not None
    again = write(tmp_path, target, verify=True)
    assert again.num_rows == 10
    found = again.read(batch(0, 1, 2))
    assert found is not None and whole is not None and torch.equal(found.last, whole.last)


@pytest.mark.parametrize("fault", ["missing", "cut off", "rows", "last_channel", "header"])
def test_a_shard_that_is_gone_or_torn_is_named_and_made_anew(tmp_path: Path, target: HFTarget, fault: str) -> None:
    identity = identity_of(target, precision="int8")
    store = write(tmp_path, target, identity)
    path = shards(tmp_path)[0]
    if fault == "missing":
        path.unlink()
    elif fault == "cut off":
        path.write_bytes(path.read_bytes()[:-10])
    elif fault == "header":
        path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
    else:
        damage(path, fault)
    words = {"missing": "is missing", "cut off": "has [0-9,]+ bytes", "header": "cannot be read"}
    with pytest.raises(DataError, match=f"{path.name} {words.get(fault, 'has a table')}.*run specdraft prepare"):
        FeatureStore(tmp_path, store.identity, target.dtype)
    others = {p: p.stat().st_mtime_ns for p in shards(tmp_path)[1:]}
    again = write(tmp_path, target, identity)
    assert again.num_rows == 10 and again.read(batch(*range(10))) is not None
    assert all(p.stat().st_mtime_ns == at for p, at in others.items() if p != path)


def test_a_torn_index_is_named_and_made_anew_from_the_shards(tmp_path: Path, target: HFTarget) -> None:
    store = write(tmp_path, target)
    before = [(p.name, p.stat().st_mtime_ns) for p in shards(tmp_path)]
    index = tmp_path / "index-0000.json"
    listed = read_index(index)
    index.write_text(index.read_text()[:40])
    with pytest.raises(DataError, match=r"index-0000\.json cannot be read.*run specdraft prepare"):
        FeatureStore(tmp_path, store.identity, target.dtype)
    write(tmp_path, target)
    assert read_index(index) == listed
    assert [(p.name, p.stat().st_mtime_ns) for p in shards(tmp_path)] == before


def test_a_torn_description_is_named(tmp_path: Path, target: HFTarget) -> None:
    store = write(tmp_path, target)
    (tmp_path / STORE_NAME).write_text('{"format": 1')
    with pytest.raises(DataError, match=r"store\.json cannot be read"):
        FeatureStore(tmp_path, store.identity, target.dtype)


def test_a_shard_of_another_store_is_refused(tmp_path: Path, target: HFTarget) -> None:
    write(tmp_path / "a", target)
    write(tmp_path / "b", target, replace(identity_of(target), data="y"))
    shards(tmp_path / "b")[0].replace(shards(tmp_path / "a")[0])
    with pytest.raises(DataError, match="belongs to another store"):
        Shard(shards(tmp_path / "a")[0], identity_of(target).digest)


def test_a_full_disk_ends_in_one_line_and_the_next_run_goes_on(
    tmp_path: Path, target: HFTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = feature_writer.write_shard, []

    def full(temporary: Path, *rest: Any) -> None:
        calls.append(temporary)
        if len(calls) > 1:
            temporary.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(temporary, *rest)

    monkeypatch.setattr(feature_writer, "write_shard", full)
    with pytest.raises(DataError, match=r"^features\.dir: cannot be written .*No space left.*goes on from here$"):
        write(tmp_path, target)
    assert len(shards(tmp_path)) == 1 and not list(tmp_path.glob(".*"))
    monkeypatch.undo()
    seen: list[int] = []
    capture = HFTarget.capture
    monkeypatch.setattr(
        HFTarget, "capture", lambda self, tokens, request: (seen.append(1), capture(self, tokens, request))[1]
    )
    assert write(tmp_path, target).num_rows == 10
    assert len(seen) < len(BATCHES)


def test_the_budget_holds_before_and_while_writing(tmp_path: Path, target: HFTarget) -> None:
    with pytest.raises(
        ConfigError, match=r"^features\.budget_gib: the store needs 2\.00 GiB, got 1\.00; raise it, or use"
    ):
        check_room(tmp_path, 2 << 30, 1 << 30)
    with pytest.raises(ConfigError, match=r"^features\.dir: the store needs [0-9.]+ GiB more, got a disk with"):
        check_room(tmp_path / "new", 1 << 60, None)
    check_room(tmp_path, 1 << 20, 1 << 21)
    with pytest.raises(DataError, match=r"^features\.budget_gib: the store has .* raise it and start again"):
        write(tmp_path, target, budget_bytes=30_000)
    assert 0 < used_bytes(tmp_path) <= 30_000 and shards(tmp_path)
    assert write(tmp_path, target).num_rows == 10


def test_states_that_are_not_finite_are_refused(tmp_path: Path, target: HFTarget) -> None:
    writer = FeatureWriter(tmp_path, identity_of(target))
    store = FeatureStore(tmp_path, writer.identity, target.dtype)
    tokens = batch(0, 1)
    features = target.capture(tokens, REQUEST)
    assert features.aux_hidden is not None
    for value in ("nan", "inf", "-inf"):
        features.aux_hidden[1, 3, 40] = float(value)
        with pytest.raises(DataError, match=r"^target\.dtype: the hidden states of row 1 are not finite"):
            writer.add_batch(tokens, features, store)
    features.aux_hidden[1, 3, 40] = 0.0
    features.last_hidden[0, 0] = float("inf")  # not kept: nothing reads it
    writer.add_batch(tokens, features, store)
    writer.close()
    assert FeatureStore(tmp_path, writer.identity, target.dtype).num_rows == 2


def test_two_runs_do_not_write_one_store(tmp_path: Path, target: HFTarget) -> None:
    writer = FeatureWriter(tmp_path, identity_of(target))
    with pytest.raises(DataError, match=r"^features\.dir: another run is writing the store"):
        FeatureWriter(tmp_path, identity_of(target))
    other = FeatureWriter(tmp_path, identity_of(target), rank=1, world_size=2)
    for own in (writer, other):
        own.close()
    FeatureWriter(tmp_path, identity_of(target)).close()


WORKER = """
import sys, time, torch
from pathlib import Path
from specdraft.data import feature_writer
from tests.feature_stores import BATCHES, FeatureStore, FeatureWriter, capture_rows, identity_of, rows_of
from tests.tiny import tiny_target
folder, rank, world, pause = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
if pause:
    original = feature_writer.write_shard
    def slow(temporary, path, tensors, store):
        original(temporary, path, tensors, store)
        # The shard is whole and no index lists it yet: a kill may fall here.
        print(path.name, flush=True)
        time.sleep(pause)
    feature_writer.write_shard = slow
target = tiny_target()
identity = identity_of(target)
writer = FeatureWriter(folder, identity, rank=rank, world_size=world, shard_bytes=1)
store = FeatureStore(folder, identity, target.dtype)
capture_rows(target, rows_of, BATCHES[rank::world], writer, store, 0)
writer.close()
"""


def start(folder: Path, *words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(folder), *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
    )


def test_a_killed_writer_leaves_whole_shards_and_the_next_goes_on(tmp_path: Path, target: HFTarget) -> None:
    process = start(tmp_path, 0, 1, 60)
    assert process.stdout is not None
    assert process.stdout.readline() == "shard-0000-000000.safetensors\n"
    (tmp_path / ".shard-0000-000001.100.tmp").write_bytes(b"half")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    first = shards(tmp_path)[0].stat().st_mtime_ns
    store = write(tmp_path, target)
    assert store.num_rows == 10 and not list(tmp_path.glob(".shard*"))
    assert shards(tmp_path)[0].stat().st_mtime_ns == first
    listed = read_index(tmp_path / "index-0000.json")
    assert [entry.file for entry in listed] == [path.name for path in shards(tmp_path)]
    assert sum(entry.num_rows for entry in listed) == 10


def test_two_processes_store_every_row_once(tmp_path: Path, target: HFTarget) -> None:
    workers = [start(tmp_path, rank, 2, 0) for rank in range(2)]
    for worker in workers:
        worker.communicate(timeout=300)
        assert worker.returncode == 0
    listed = [read_index(tmp_path / f"index-{rank:04d}.json") for rank in range(2)]
    assert all(listed) and sum(entry.num_rows for part in listed for entry in part) == 10
    store = FeatureStore(tmp_path, identity_of(target), target.dtype)
    assert store.num_rows == 10 and store.read(batch(*range(10))) is not None
    # One process goes on where two were: it keeps the other's shards, torn ones too.
    (lost,) = [path for path in shards(tmp_path) if path.name == listed[1][0].file]
    lost.write_bytes(lost.read_bytes()[:-1])
    again = write(tmp_path, target)
    assert again.num_rows == 10 and again.read(batch(*range(10))) is not None
