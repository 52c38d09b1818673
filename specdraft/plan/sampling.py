"""A few conversations from all over the sources, and how many there are, without reading large sources whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from specdraft.core.errors import DataError
from specdraft.data._config import DataConfig
from specdraft.data.files import read_rows
from specdraft.data.mixture import shares
from specdraft.data.sources import Conversation, FileSource, RowSource, SourceReport, open_source

READ = 2000
"""Conversations that are read of each source; a sample is spread over them."""
BLOCK = 1 << 20


@dataclass(frozen=True)
class SourceSample:
    """Some of the conversations, and how many there are.

    total: conversations that the settings keep, nearly (what overlaps or repeats is not looked for). is_exact: False where
    a source does not say how many rows it has, so that there may be more.
    """

    conversations: list[Conversation]
    total: int
    is_exact: bool


def source_sample(data: DataConfig, count: int) -> SourceSample:
    """At most ``count`` conversations, from every source as many as its share.

    Raises:
        DataError: a source cannot be read, or none has a conversation.
    """
    counts, read, exact = [], [], True
    for name in data.sources:
        source = open_source(name, streaming=data.streaming, shuffle_seed=data.seed if data.streaming else None)
        report = SourceReport(name)
        own = list(islice(source.conversations(report), READ))
        total = len(own)
        if total == READ:
            rows = num_rows(source)
            exact = exact and rows is not None
            total = max(total, round((rows or 0) * READ / report.num_rows))
        counts.append(total)
        read.append(own)
    kept = shares(counts, data.weights, data.limit) if data.weights is not None else counts
    total = sum(kept) if data.limit is None else min(sum(kept), data.limit)
    if not total:
        raise DataError(f"data.sources: no usable conversation, got {', '.join(data.sources)}; give other sources")
    chosen = [
        conversation
        for own, share in zip(read, kept, strict=True)
        for conversation in spread(own, max(1, round(count * share / max(1, sum(kept)))))
    ]
    return SourceSample(chosen[: max(1, min(count, total))], total, exact)


def spread(conversations: Sequence[Conversation], count: int) -> list[Conversation]:
    """At most ``count`` from all over the list."""
    size = len(conversations)
    return [conversations[i * size // min(count, size)] for i in range(min(count, size))]


def num_rows(source: RowSource) -> int | None:
    """Rows of a source of files; None of one that does not say before it is read."""
    return sum(map(_rows_of, source.files)) if isinstance(source, FileSource) else None


def _rows_of(path: Path) -> int:
    suffix = path.suffix.lower()
    try:
        if suffix == ".parquet":
            import pyarrow.parquet  # type: ignore[import-untyped]

            return int(pyarrow.parquet.ParquetFile(path).metadata.num_rows)
        if suffix == ".jsonl":
            with path.open("rb") as file:
                return sum(block.count(b"\n") for block in iter(lambda: file.read(BLOCK), b""))
    except (OSError, ValueError) as error:
        raise DataError(f"data.sources: cannot be read, got {path} ({error}); mend or replace the file") from error
    return sum(1 for _ in read_rows(path))
