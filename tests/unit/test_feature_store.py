"""The feature store: what it keeps, its bytes and precisions, and every fault ends in one clear line and goes on from there."""

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
from torch import Tensor

from specdraft.core.errors import ConfigError, DataError
from specdraft.core.types import FeatureRequest, TokenBatch
from specdraft.data import feature_writer
from specdraft.data._features_config import PRECISIONS, FeaturesConfig
from specdraft.data._quantized import DTYPES, decode, encode
from specdraft.data.batching import collate
from specdraft.data.chat import TokenRow
from specdraft.data.feature_capture import capture_rows, check_producer, fill_store
from specdraft.data.feature_layout import (
    expected_counts,
    kept_counts,
    kept_positions,
    row_counts,
    store_bytes,
)
from specdraft.data.feature_shards import Shard
from specdraft.data.feature_store import STORE_NAME, FeatureStore, StoreIdentity, read_index, store_identity
from specdraft.data.feature_writer import FeatureWriter, check_room, used_bytes
from specdraft.data.features import FeatureMemory, StoredRows
from specdraft.targets.hf import HFTarget
from tests.tiny import tiny_target
from tests.training import make_rows

ROWS = [*make_rows(10), TokenRow([5, 6, 7], [False] * 3), TokenRow([5, 6, 7], [True, True, False])]
"""The last two have nothing to store."""
BATCHES = [[[0], [1], [2]], [[3], [4], [10]], [[5], [6], [11]], [[7], [8], [9]]]
REQUEST = FeatureRequest((1, 3), last="none")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target()


def rows_of(places: Any) -> list[TokenRow]:
    return [ROWS[place] for place in places]


def identity_of(target: HFTarget, request: FeatureRequest = REQUEST, precision: str = "fp32") -> StoreIdentity:
    return store_identity(target.spec, target.dtype, request, precision, {"identity": "x"}, len(ROWS))


def write(folder: Path, target: HFTarget, identity: StoreIdentity | None = None, **settings: Any) -> FeatureStore:
    """The whole store, its shards of about two batches each."""
    identity = identity or identity_of(target)
    writer = FeatureWriter(folder, identity, **{"shard_bytes": 12_000, **settings})
    try:
        store = FeatureStore(folder, identity, target.dtype)
        capture_rows(target, rows_of, BATCHES, writer, store, 0)
    finally:
        writer.release()
    store.refresh()
    return store


def batch(*places: int) -> TokenBatch:
    return collate(rows_of(places), 0, places)


def kept(tokens: TokenBatch, states: Tensor, request: FeatureRequest, which: int) -> Tensor:
    """The states of a batch at the positions that are stored."""
    parts = []
    for b in range(states.shape[0]):
        length = int(tokens.attention_mask[b].sum())
        parts.append(states[b, kept_positions(tokens.loss_mask[b, :length], request)[which]])
    return torch.cat(parts)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))


@pytest.mark.parametrize(
    "request_", [REQUEST, FeatureRequest(), FeatureRequest(last="anchors"), FeatureRequest((2,), "prefix")]
)
def test_what_is_read_is_what_was_captured(tmp_path: Path, target: HFTarget, request_: FeatureRequest) -> None:
    """In the batches it was captured in and in others, zeros elsewhere; rows without supervision take no room."""
    store = write(tmp_path, target, identity_of(target, request_))
    assert store.num_rows == 10 and shards(tmp_path)
    for places in ((3, 4, 10), (9, 0), (11, 10)):
        tokens = batch(*places)
        stored = store.read(tokens)
        assert stored is not None
        found, wanted = stored.features(), target.capture(tokens, request_)
        same = {"rtol": 0.0, "atol": 0.0} if places == (3, 4, 10) else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(
            kept(tokens, found.last_hidden, request_, 0), kept(tokens, wanted.last_hidden, request_, 0), **same
        )
        assert found.last_hidden.count_nonzero() == stored.last.count_nonzero()
        assert (found.aux_hidden is None) == (wanted.aux_hidden is None)
        if found.aux_hidden is not None and wanted.aux_hidden is not None:
            torch.testing.assert_close(
                kept(tokens, found.aux_hidden, request_, 1), kept(tokens, wanted.aux_hidden, request_, 1), **same
            )
    assert not batch(11, 10).loss_mask[:, 2:].any() and not stored.last.numel()


def test_kept_positions_are_those_that_training_reads() -> None:
    mask = torch.tensor([1, 0, 0, 1, 1, 0, 0, 1, 0, 0], dtype=torch.bool)
    wanted = {"none": [2, 3, 6], "anchors": [1, 2, 3, 5, 6], "prefix": list(range(7))}
    for last, positions in wanted.items():
        found, aux = kept_positions(mask, FeatureRequest((1,), last))
        assert (found.tolist(), aux.tolist()) == (positions, list(range(6)))
    assert [part.tolist() for part in kept_positions(mask[:3], REQUEST)] == [[], []]


@pytest.mark.parametrize("last", ["none", "anchors", "prefix"])
def test_counts_of_many_rows_are_those_of_each(last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdraft.data.feature_layout.ROWS_AT_ONCE", 4)
    for layers in ((), (1, 2)):
        request = FeatureRequest(layers, last)
        masks = [torch.tensor(row.loss_mask) for row in ROWS]
        offsets = torch.tensor([0, *(len(mask) for mask in masks)]).cumsum(0)
        found = row_counts(torch.cat(masks), offsets, request)
        assert found.tolist() == [[part.size for part in kept_positions(mask, request)] for mask in masks]
        counts, tokens = kept_counts(found[:10]), sum(len(row.input_ids) for row in ROWS[:10])
        assert counts == expected_counts(10, tokens, int(sum(mask.sum() for mask in masks[:10])), request)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_size_is_known_beforehand(tmp_path: Path, precision: str) -> None:
    """Within 3 %, for rows of the length that training has."""
    target = tiny_target(hidden_size=64)
    rows = [TokenRow([3 + (i + t) % 90 for t in range(150)], [t > 50 for t in range(150)]) for i in range(12)]
    identity = replace(identity_of(target, precision=precision), num_rows=12)
    with_rows = FeatureWriter(tmp_path, identity, shard_bytes=1 << 18)
    store = FeatureStore(tmp_path, identity, target.dtype)
    capture_rows(target, lambda places: [rows[i] for i in places], [[[i]] for i in range(12)], with_rows, store, 0)
    with_rows.release()
    masks = torch.cat([torch.tensor(row.loss_mask) for row in rows])
    counts = kept_counts(row_counts(masks, torch.arange(0, 1801, 150), REQUEST))
    expected = store_bytes(counts, REQUEST, 64, precision, 1 << 18)
    real = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert abs(expected - real) < 0.03 * real


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 4e-3), ("fp8", 4e-2), ("int8", 1.5e-2)])
def test_a_precision_keeps_what_it_promises(precision: str, tolerance: float) -> None:
    """Relative error of whole states, with the large channels and positions that transformers have."""
    torch.manual_seed(0)
    states = torch.randn(200, 128) * torch.logspace(-1, 1.5, 128)
    states[3] *= 300.0
    states[7] = 0.0
    encoded = encode(states, precision, 64)
    assert encoded.codes.dtype == DTYPES[precision]
    found = torch.empty_like(states)
    decode(encoded.codes, encoded.scale, encoded.channel, found)
    error = (found - states).norm(dim=-1) / states.norm(dim=-1).clamp(min=1e-6)
    assert float(error.max()) < tolerance
    assert not found[7].any()


def test_fp8_codes_are_read_as_torch_reads_them() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = codes[codes.float().isfinite()][:, None]
    found = torch.empty(codes.shape)
    decode(codes, torch.ones(codes.shape[0], 1), torch.ones(1), found)
    assert torch.equal(found, codes.float())


def test_bf16_states_of_a_bf16_target_are_exact(tmp_path: Path) -> None:
    target = tiny_target(dtype=torch.bfloat16)
    target = HFTarget.from_model(target.model.to(torch.bfloat16), target.tokenizer)
    store = write(tmp_path, target, identity_of(target, precision="bf16"))
    tokens = batch(0, 1, 2)
    stored, wanted = store.read(tokens), target.capture(tokens, REQUEST)
    assert stored is not None and wanted.aux_hidden is not None and stored.last.dtype == torch.bfloat16
    assert torch.equal(
        kept(tokens, stored.features().last_hidden, REQUEST, 0), kept(tokens, wanted.last_hidden, REQUEST, 0)
    )
    assert torch.equal(stored.aux, kept(tokens, wanted.aux_hidden, REQUEST, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fingerprint": "f" * 16, "target": "other"}, r"for another target \(tiny-llama\), got other"),
        ({"dtype": "bfloat16"}, r"another dtype of the target \(float32\), got bfloat16"),
        ({"aux_layers": (1, 2)}, r"another choice of layers \(\(1, 3\)\), got \(1, 2\)"),
        ({"precision": "int8"}, r"for another precision \(fp32\), got int8"),
        ({"data": "y"}, "for another data"),
        ({"num_rows": 3}, "for another data"),
    ],
)
def test_a_store_of_something_else_is_refused(
    tmp_path: Path, target: HFTarget, changes: dict[str, Any], message: str
) -> None:
    write(tmp_path, target)
    other = replace(identity_of(target), **changes)
    for use in (lambda: FeatureStore(tmp_path, other, target.dtype), lambda: FeatureWriter(tmp_path, other)):
        with pytest.raises(DataError, match=message):
            use()
    renamed = replace(identity_of(target), target="a copy", revision="1234")
    assert FeatureStore(tmp_path, renamed, target.dtype).num_rows == 10


def test_other_tokens_or_masks_of_a_row_are_refused(tmp_path: Path, target: HFTarget) -> None:
    store = write(tmp_path, target)
    tokens = batch(0, 1)
    changed = tokens.input_ids.clone()
    changed[1, 2] += 1
    with pytest.raises(DataError, match="holds row 1 of other data"):
        store.read(replace(tokens, input_ids=changed))
    mask = tokens.loss_mask.clone()
    mask[0, 4:6] = ~mask[0, 4:6]
    with pytest.raises(DataError, match="holds row 0 of other data"):
        store.read(replace(tokens, loss_mask=mask))


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
    features.aux_hidden[1, 3, 40] = float("nan")
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
from tests.unit.test_feature_store import BATCHES, FeatureStore, FeatureWriter, capture_rows, identity_of, rows_of
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


class Echo:
    """A producer that gives the target's own states, changed in one way."""

    def __init__(self, target: HFTarget, fault: str = "") -> None:
        self.target, self.fault = target, fault

    def states(self, input_ids: Any, aux_layers: Any) -> tuple[Tensor, Tensor | None]:
        layers = [k + 1 for k in aux_layers] if self.fault == "shifted" else list(aux_layers)
        row = collate([TokenRow(list(input_ids), [True] * len(input_ids))], 0)
        found = self.target.capture(row, FeatureRequest(tuple(layers)))
        assert found.aux_hidden is not None
        last = found.last_hidden[0]
        if self.fault == "before the norm":
            norm = self.target.layout.final_norm.get_parameter("weight")
            last = last / norm * 7.0
        if self.fault == "short":
            last = last[:-1]
        return last, found.aux_hidden[0]


def test_another_producer_fills_a_store(tmp_path: Path, target: HFTarget) -> None:
    writer = FeatureWriter(tmp_path / "b", identity_of(target))
    store = FeatureStore(tmp_path / "b", writer.identity, target.dtype)
    producer = Echo(target)
    check_producer(producer, target, ROWS[:3], REQUEST)
    fill_store(producer, rows_of, range(len(ROWS)), writer, store)
    writer.close()
    store.refresh()
    ours = write(tmp_path / "a", target)
    tokens = batch(4, 2, 7)
    found, wanted = store.read(tokens), ours.read(tokens)
    assert found is not None and wanted is not None
    torch.testing.assert_close(found.last, wanted.last, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("shifted", r"gives as hidden_states\[1\] is hidden_states\[2\]"),
        ("before the norm", "the last hidden state is not"),
        ("short", "must give a state for each of"),
    ],
)
def test_a_producer_of_other_states_is_refused(target: HFTarget, fault: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_producer(Echo(target, fault), target, ROWS[:2], REQUEST)


def test_rows_join_while_they_are_used_until_the_budget_is_spent(
    tmp_path: Path, target: HFTarget, caplog: pytest.LogCaptureFixture
) -> None:
    identity = identity_of(target)
    writer = FeatureWriter(tmp_path, identity, shard_bytes=8_000, budget_bytes=22_000)
    rows = StoredRows(FeatureStore(tmp_path, identity, target.dtype), writer)
    memory = FeatureMemory(target, REQUEST, 0, rows)
    for micro in BATCHES:
        memory.capture(rows.attach(batch(*(place for row in micro for place in row))))
    rows.close()
    assert "the other rows are captured in every epoch" in caplog.text
    rows.store.refresh()
    assert 0 < rows.store.num_rows < 10 and used_bytes(tmp_path) <= 22_000
    rows.attach(batch(*range(10)))  # those that are not stored are captured
    with pytest.raises(DataError, match=r"the store lacks row .* use features=hybrid"):
        StoredRows(rows.store).attach(batch(*range(10)))


def test_settings_without_effect_are_refused() -> None:
    for name, value in (("precision", "int8"), ("dir", "x"), ("budget_gib", 1.0), ("shard_mib", 8)):
        with pytest.raises(ConfigError, match=rf"^features\.{name}: has no effect with features\.mode=online"):
            FeaturesConfig(**{name: value})
        FeaturesConfig(mode="hybrid", **{name: value})
    for name, value in (("mode", "cached"), ("precision", "int4"), ("dir", ""), ("budget_gib", 0.0), ("shard_mib", 0)):
        with pytest.raises(ConfigError, match=rf"^features\.{name}: .*, got"):
            FeaturesConfig(**{"mode": "offline", name: value})
