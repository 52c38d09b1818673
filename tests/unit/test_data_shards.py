"""Arrow shards and the store of conversations: what is written is read, a part at a time, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from specdraft.core.errors import DataError
from specdraft.data import prepared, store
from specdraft.data.chat import TokenRow
from specdraft.data.prepared import PreparedData, save_prepared
from specdraft.data.shards import MappedBatch, TokenRows, TokenShard, write_batch
from specdraft.data.sources import Conversation
from specdraft.data.store import ConversationStore, StoreWriter
from tests.unit import data_helpers as h

ROWS = [TokenRow(list(range(n, 2 * n + 3)), [(i * n) % 3 == 1 for i in range(n + 3)]) for n in range(30)]


def several(folder: Path, monkeypatch: pytest.MonkeyPatch) -> PreparedData:
    """The rows in three shards."""
    monkeypatch.setattr(prepared, "RELEASE_READS", 3)
    shards = []
    for number, rows in enumerate((ROWS[:7], [], ROWS[7:])):
        write_batch(folder / f"{number}.arrow", TokenRows(rows).batch(), {"number": number})
        shards.append(TokenShard(folder / f"{number}.arrow"))
    return PreparedData(folder, {}, shards)


def test_rows_in_several_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = several(tmp_path, monkeypatch)
    assert len(data) == 30
    assert list(data) == ROWS
    assert data.rows([29, 0, 7, 6]) == [ROWS[29], ROWS[0], ROWS[7], ROWS[6]]
    assert data[-1] == ROWS[-1] and data[5:9] == ROWS[5:9]
    assert list(data.lengths) == [len(row.input_ids) for row in ROWS]
    with pytest.raises(IndexError):
        data.row(30)


def test_blocks_hold_every_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = several(tmp_path, monkeypatch)
    found = []
    for block in data.blocks():
        assert (block.input_ids.dtype, block.loss_mask.dtype) == (torch.int32, torch.bool)
        assert block.first_row == len(found)
        for start, stop in zip(block.offsets[:-1].tolist(), block.offsets[1:].tolist(), strict=True):
            found.append(TokenRow(block.input_ids[start:stop].tolist(), block.loss_mask[start:stop].tolist()))
    assert found == ROWS


def test_shards_open_as_a_data_set_of_datasets(tmp_path: Path) -> None:
    data = save_prepared(tmp_path / "data", ROWS, {"identity": {"x": 1}})
    (name,) = data.manifest["shards"]
    opened = datasets.Dataset.from_file(str(tmp_path / "data" / name))
    assert opened[4] == {"input_ids": ROWS[4].input_ids, "loss_mask": ROWS[4].loss_mask}


@pytest.mark.parametrize("damage", ["empty", "cut", "garbage", "other columns"])
def test_a_torn_shard_is_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    write_batch(path, TokenRows(ROWS).batch(), {})
    whole = path.read_bytes()
    if damage == "other columns":
        import pyarrow

        write_batch(path, pyarrow.record_batch({"input_ids": [1]}), {})
    else:
        path.write_bytes({"empty": b"", "cut": whole[: len(whole) // 2], "garbage": b"x" * 500}[damage])
    with pytest.raises(DataError, match=r"^data\.cache_dir: (not a whole file|holds no token rows).*a\.arrow"):
        TokenShard(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.arrow"
    write_batch(path, TokenRows(ROWS).batch(), {"number": 1})

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_batch(path, TokenRows().batch(), {"number": 2})
    assert MappedBatch(path).metadata == {"number": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.arrow"]


def conversations(count: int) -> list[Conversation]:
    return [Conversation(f"id {i}", "ü" if i % 2 else "", h.talk("س" * i + "?", "👍", f"{i}")) for i in range(count)]


def test_a_store_gives_back_what_was_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "FILE_ROWS", 4)
    monkeypatch.setattr(store, "RELEASE_READS", 2)
    added = [*conversations(10), Conversation("half \ud800", "", h.talk("a"))]
    writer = StoreWriter(tmp_path)
    for conversation in added:
        writer.add(conversation)
    writer.flush()
    assert (writer.num_files, writer.num_conversations) == (3, 11)
    found = ConversationStore(tmp_path, writer.num_files)
    assert list(found)[:10] == added[:10]
    assert found[10] == Conversation("half ?", "", h.talk("a"))
    assert found[2:5] == added[2:5]
    chosen = found.subset(np.array([9, 1, 4]))
    assert list(chosen) == [added[9], added[1], added[4]]
    assert list(chosen.subset(np.array([2]))) == [added[4]]


def test_groups_are_bounded_by_rows_and_by_characters(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    for length in (10, 10, 10, 5000, 10, 10):
        writer.add(Conversation("", "", h.talk("x" * length)))
    writer.flush()
    found = ConversationStore(tmp_path, writer.num_files)
    assert found.groups(max_rows=2) == [(0, 2), (2, 4), (4, 6)]
    assert found.groups(max_characters=1000) == [(0, 3), (3, 4), (4, 6)]
    assert found.groups() == [(0, 6)]
    assert found.subset(np.array([], dtype=np.int64)).groups() == []
