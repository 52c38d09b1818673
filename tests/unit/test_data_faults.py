"""Preparation that is killed, finds no room, meets torn or foreign files, or another process: a clear line, then it goes on."""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from specdraft.core.errors import DataError
from specdraft.data import assemble, store
from specdraft.data import prepare as module
from specdraft.data._config import DataConfig
from specdraft.data.prepare import prepare
from specdraft.data.prepared import PreparedData, load_prepared
from tests.tiny import tiny_tokenizer
from tests.unit import data_helpers as h

SYNCS = {"conversations": 4, "places and record": 2, "shards": 4, "manifest": 1, "folders": 2}
"""How often a whole run waits for the disk, in this order."""
SYNC_PLACES = [1, 3, 5, 6, 7, 9, 11, 12, 13]


class KilledError(BaseException):
    """Stands for a signal that no code can answer."""


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard for every two conversations."""
    for name in ("FILE_ROWS", "GROUP_ROWS"):
        monkeypatch.setattr(store, name, 2)


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    rows: list[dict[str, Any]] = [
        {"messages": h.talk(f"q{i}", f"answer {i}" * (i + 1)), "category": "c"} for i in range(9)
    ]
    rows[4] = {"messages": []}
    rows[6] = {"prompt": "unanswered"}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(sources=[str(path)], regenerate=False, max_length=100)


def make(config: DataConfig, folder: Path) -> PreparedData:
    return prepare(config, tiny_tokenizer(), folder)


@contextmanager
def failing(at: int, error: BaseException) -> Iterator[Iterator[int]]:
    """The ``at``-th wait for the disk, from 1, and every later one fail. Yields their count."""
    calls = count(1)

    def fsync(_: int) -> None:
        if next(calls) >= at:
            raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", fsync)
        yield calls


def assert_same(found: PreparedData, expected: PreparedData) -> None:
    assert list(found) == list(expected)
    assert found.manifest == expected.manifest


def test_the_parts_of_a_whole_run(config: DataConfig, tmp_path: Path) -> None:
    with failing(10**9, OSError()) as calls:
        data = make(config, tmp_path / "data")
    assert next(calls) - 1 == sum(SYNCS.values()) == SYNC_PLACES[-1]
    assert len(data.manifest["shards"]) == 4
    assert data.manifest["num_conversations"] == 8
    assert data.manifest["dropped"] == {"empty": 1, "no answer (set data.regenerate=true)": 1}
    assert data.manifest["length_histogram"] == assemble.length_histogram(data.lengths)
    assert data.manifest["categories"] == {"": 1, "c": 7}
    assert [path.name for path in (tmp_path / "data").iterdir()] == [data.folder.name]


@pytest.mark.parametrize("at", SYNC_PLACES)
def test_a_run_that_is_killed_is_gone_on_with(at: int, config: DataConfig, tmp_path: Path) -> None:
    whole = make(config, tmp_path / "whole")
    folder = tmp_path / "data"
    with failing(at, KilledError()), pytest.raises(KilledError):
        make(config, folder)
    if at < sum(SYNCS.values()):
        assert not list(folder.glob("*/manifest.json"))
        unfinished = folder / f".{whole.folder.name}"
        # What a signal leaves of a file that was being written.
        (unfinished / "rows" / ".rows-00003.arrow.12345").write_bytes(b"half")
        (unfinished / ".places.npy.12345").write_bytes(b"half")
        done = {path: path.stat().st_ino for path in unfinished.glob("rows/rows-*.arrow")}
    else:
        done = {}
    again = make(config, folder)
    assert_same(again, whole)
    assert [path.name for path in folder.iterdir()] == [again.folder.name]
    assert {(again.folder / path.name).stat().st_ino for path in done} == set(done.values())


@pytest.mark.parametrize("at", SYNC_PLACES)
def test_a_full_disk_is_a_clear_line_and_the_next_run_goes_on(at: int, config: DataConfig, tmp_path: Path) -> None:
    whole = make(config, tmp_path / "whole")
    with (
        failing(at, OSError(28, "No space left on device")),
        pytest.raises(
            DataError, match=r"^data\.cache_dir: the prepared data cannot be saved.*No space left.*free space"
        ),
    ):
        make(config, tmp_path / "data")
    assert not [path for path in (tmp_path / "data").rglob(".*") if path.is_file() and path.suffix != ".lock"]
    assert_same(make(config, tmp_path / "data"), whole)


def test_what_was_begun_with_another_tokenizer_is_not_gone_on_with(config: DataConfig, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with failing(9, KilledError()), pytest.raises(KilledError):
        make(config, folder)
    other = h.chat_tokenizer(h.CHATML)
    assert_same(prepare(config, other, folder), prepare(config, other, tmp_path / "clean"))
    assert_same(make(config, folder), make(config, tmp_path / "clean"))


def test_a_torn_record_of_an_earlier_run_names_the_folder(config: DataConfig, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with failing(9, KilledError()), pytest.raises(KilledError):
        make(config, folder)
    (record,) = folder.glob(".*/collected.json")
    record.write_text('{"num_files": 4, "num_dr')
    with pytest.raises(DataError, match=r"^data\.cache_dir: what an earlier run has read is torn.*remove the folder"):
        make(config, folder)
    shutil.rmtree(record.parent)
    assert len(make(config, folder)) == 7


def test_a_changed_byte_of_a_shard_is_found(config: DataConfig, tmp_path: Path) -> None:
    data = make(config, tmp_path / "data")
    path = data.folder / "rows-00002.arrow"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    for _ in range(2):
        with pytest.raises(
            DataError, match=r"^data\.cache_dir: rows-00002\.arrow is not what was saved \(checksum differs\)"
        ):
            make(config, tmp_path / "data")
    path.unlink()
    with pytest.raises(DataError, match=r"^data\.cache_dir: the prepared data cannot be read.*rows-00002\.arrow"):
        make(config, tmp_path / "data")


def test_a_manifest_of_something_else_is_refused(config: DataConfig, tmp_path: Path) -> None:
    data = make(config, tmp_path / "data")
    config.max_length = 60
    other = make(config, tmp_path / "data")
    assert other.folder != data.folder
    shutil.rmtree(data.folder)
    shutil.copytree(other.folder, data.folder)
    config.max_length = 100
    with pytest.raises(
        DataError, match=r"^data\.cache_dir: the manifest is of another data set \(.*max_length.* differ\)"
    ):
        make(config, tmp_path / "data")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "not prepared data of format 2"),
        ('{"format": 1, "identity": {"x": 1}}', "not prepared data of format 2"),
        ('{"format": 2, "identity": {"x": 1}}', "cannot be read"),
        ('{"format": 2, "identity": {"x": 1}, "shards": {"../rows-00000.arrow": ""}}', "not what was saved"),
        (None, "the folder has no manifest.json"),
    ],
)
def test_a_torn_manifest_is_refused(text: str | None, message: str, config: DataConfig, tmp_path: Path) -> None:
    data = make(config, tmp_path / "data")
    manifest = data.folder / "manifest.json"
    if text is None:
        manifest.unlink()
    else:
        manifest.write_text(text)
    with pytest.raises(
        DataError, match=rf"^data\.cache_dir: .*{message}.*{data.folder.name}.*; .*prepare the data again"
    ):
        make(config, tmp_path / "data")


def test_two_processes_with_the_same_settings_do_the_work_once(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, begun, may_go_on = [], threading.Event(), threading.Event()
    real = module.collect

    def collect(*args: Any) -> Any:
        made.append(threading.get_ident())
        begun.set()
        assert may_go_on.wait(30)
        return real(*args)

    monkeypatch.setattr(module, "collect", collect)
    found: list[PreparedData] = []
    threads = [threading.Thread(target=lambda: found.append(make(config, tmp_path / "data"))) for _ in range(2)]
    threads[0].start()
    assert begun.wait(30)
    threads[1].start()
    for _ in range(3000):
        if "waiting for another process" in caplog.text:
            break
        time.sleep(0.01)
    may_go_on.set()
    for thread in threads:
        thread.join(30)
    assert len(made) == 1
    assert_same(found[0], found[1])
    assert [path.name for path in (tmp_path / "data").iterdir()] == [found[0].folder.name]


def test_a_clock_that_jumps_changes_nothing(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make(config, tmp_path / "whole")
    generator = random.Random(0)
    monkeypatch.setattr(time, "time", lambda: generator.uniform(-1e9, 4e9))
    monkeypatch.setattr(time, "time_ns", lambda: generator.randrange(10**18))
    monkeypatch.setattr(module, "POLL_S", 0.001)
    found: list[PreparedData] = []

    def wait() -> None:
        found.append(prepare(config, tiny_tokenizer(), tmp_path / "data", rank=1, world_size=2))

    waiting = threading.Thread(target=wait)
    waiting.start()
    found.append(prepare(config, tiny_tokenizer(), tmp_path / "data", rank=0, world_size=2))
    waiting.join(30)
    for data in found:
        assert_same(data, whole)


def test_a_row_that_is_torn_is_named_by_file_and_line(config: DataConfig, tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    shutil.copy(config.sources[0], folder / "a.jsonl")
    (folder / "b.jsonl").write_text('{"prompt": "Q"}\n{"prompt": "cut o')
    config.sources = [str(folder)]
    with pytest.raises(DataError, match=r"^data\.sources: line 2 of .*b\.jsonl is cut off"):
        make(config, tmp_path / "data")
    (folder / "b.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}\n'
    )
    assert len(make(config, tmp_path / "data")) == 8


def test_a_file_that_is_written_to_meanwhile_is_refused(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.collect

    def collect(*args: Any) -> Any:
        with Path(config.sources[0]).open("a") as file:
            file.write('{"prompt": "late", "completion": "row"}\n')
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module, "collect", collect)
        with pytest.raises(DataError, match=r"^data\.sources: was written to while it was read, got .*rows\.jsonl"):
            make(config, tmp_path / "data")
    assert not list((tmp_path / "data").glob("*/manifest.json"))
    assert make(config, tmp_path / "data").manifest["num_conversations"] == 9


def test_rows_go_to_as_many_shards_whoever_makes_them(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards made out of order, as by several processes, are the same files."""
    whole = make(config, tmp_path / "whole")
    monkeypatch.setattr(module, "spread", lambda task, jobs, workers: map(task, list(jobs)[::-1]))
    assert_same(make(config, tmp_path / "data"), whole)
    assert load_prepared(tmp_path / "data" / whole.folder.name).manifest == whole.manifest
