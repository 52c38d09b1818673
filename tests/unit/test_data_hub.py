"""Data sets on the Hub: which one is read, in what order, and what is said when it cannot be had."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from specdraft.core.errors import DataError
from specdraft.data.sources import load_conversations, open_source


def test_an_unknown_hub_id_offline_is_one_line() -> None:
    with pytest.raises(
        DataError, match=r"^data\.sources: the Hub data set cannot be loaded, got some/set#test"
    ) as caught:
        load_conversations(["some/set#test"])
    assert "\n" not in str(caught.value)


class FakeBuilder:
    """What ``datasets`` knows of a Hub data set with some rows, at one commit; the ``fails_at``-th row cannot be read."""

    def __init__(self, rows: list[dict[str, Any]], fails_at: int | None = None) -> None:
        self.hash = "c0ffee"
        self.rows, self.fails_at = rows, fails_at
        self.asked: list[Any] = []

    def download_and_prepare(self) -> None:
        self.asked.append("download")

    def as_dataset(self, split: str) -> Any:
        self.asked.append(split)
        return self._generate()

    def as_streaming_dataset(self, split: str) -> Any:
        import datasets

        self.asked.append(("stream", split))
        return datasets.IterableDataset.from_generator(self._generate)

    def _generate(self) -> Any:
        for number, row in enumerate(self.rows, 1):
            if number == self.fails_at:
                raise OSError("connection lost")
            yield row


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets ``datasets`` find a fake data set; the names it was asked for are in ``asked``."""
    import datasets

    def install(*args: Any) -> FakeBuilder:
        builder = FakeBuilder(*args)

        def load(*names: Any, **kwargs: Any) -> FakeBuilder:
            builder.asked.append((*names, kwargs))
            return builder

        monkeypatch.setattr(datasets, "load_dataset_builder", load)
        return builder

    return install


def test_a_hub_id_with_config_revision_and_split(hub: Any) -> None:
    builder = hub([{"prompt": "Q"}])
    loaded = load_conversations(["some/set", "some/set:main@v1#test_sft"])
    assert builder.asked == [
        ("some/set", None, {"revision": None}),
        "download",
        "train",
        ("some/set", "main", {"revision": "v1"}),
        "download",
        "test_sft",
    ]
    assert [c.id for c in loaded.conversations] == ["some/set:1", "some/set:main@v1#test_sft:1"]
    assert [report.revision for report in loaded.reports] == ["c0ffee"] * 2
    known = {"hub": "some/set", "config": "main", "split": "test", "revision": "c0ffee"}
    assert open_source("some/set:main#test").fingerprint == known
    asked = len(builder.asked)
    assert open_source(f"some/set@{'1a' * 20}").fingerprint["revision"] == "1a" * 20
    assert len(builder.asked) == asked


def test_a_hub_stream_is_read_in_a_drawn_order_and_may_end_early(hub: Any) -> None:
    builder = hub([{"prompt": f"Q{i}"} for i in range(50)])
    source = open_source("some/set", streaming=True, shuffle_seed=3)
    assert source.may_end_early
    assert source.fingerprint["order"] == 3
    first = [c.user_turns[0] for c in islice(source.conversations(source.report()), 10)]
    assert first != [f"Q{i}" for i in range(10)]
    whole = open_source("some/set", streaming=True)
    assert not whole.may_end_early
    assert [c.user_turns[0] for c in whole.conversations(whole.report())] == [f"Q{i}" for i in range(50)]
    assert ("stream", "train") in builder.asked


@pytest.mark.parametrize("streaming", [True, False])
def test_a_hub_data_set_whose_connection_is_lost(streaming: bool, hub: Any) -> None:
    hub([{"prompt": f"Q{i}"} for i in range(5)], 4)
    source = open_source("some/set", streaming=streaming)
    report = source.report()
    with pytest.raises(
        DataError, match=r"^data\.sources: .* cannot be read to its end, got some/set .*lost.*run again"
    ):
        list(source.conversations(report))
    assert report.num_conversations == 3
