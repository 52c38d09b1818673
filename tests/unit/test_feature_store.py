"""The feature store: what it keeps, its bytes and precisions, other producers, and rows that join while they are used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specdraft.core.errors import ConfigError, DataError
from specdraft.core.types import FeatureRequest
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
from specdraft.data.feature_store import FeatureStore
from specdraft.data.feature_writer import FeatureWriter, used_bytes
from specdraft.data.features import FeatureMemory, StoredRows
from specdraft.targets.hf import HFTarget
from tests.feature_stores import BATCHES, REQUEST, ROWS, batch, identity_of, kept, rows_of, shards, write
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target()


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


def test_a_shard_is_a_file_of_safetensors(tmp_path: Path, target: HFTarget) -> None:
    """Other programs may read it by the format's own library: no holes, and rows one after the other."""
    identity = identity_of(target, precision="int8")
    store = write(tmp_path, target, identity)
    names = {"rows", "keys", "sums", "last_counts", "aux_counts", "last", "aux"}
    names |= {f"{kind}_{part}" for kind in ("last", "aux") for part in ("scale", "channel")}
    seen = []
    for path in shards(tmp_path):
        tensors = load_file(path)
        assert tensors.keys() == names and tensors["last"].dtype == torch.int8
        assert tensors["last"].shape == (int(tensors["last_counts"].sum()), identity.hidden_size)
        assert tensors["aux_scale"].shape == (int(tensors["aux_counts"].sum()), 2)
        seen += tensors["rows"].tolist()
        count = int(tensors["last_counts"][0])
        states = torch.empty(count, identity.hidden_size)
        decode(tensors["last"][:count], tensors["last_scale"][:count], tensors["last_channel"], states)
        stored = store.read(batch(seen[-len(tensors["rows"])]))
        assert stored is not None and torch.equal(stored.last, states)
    assert sorted(seen) == list(range(10))


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
    encoded = encode([states[:50], states[50:]], precision, 64)
    assert [codes.shape[0] for codes in encoded.codes] == [50, 150] and encoded.codes[0].dtype == DTYPES[precision]
    found = torch.empty_like(states)
    decode(torch.cat(encoded.codes), encoded.scale, encoded.channel, found)
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
