"""Where conversations come from: built-in prompts, local files, Hub data sets. Dropped rows are counted."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from specdraft.core.errors import DataError
from specdraft.data.formats import Message, NotAConversationError, UnusableRowError, parse_row

BUILTIN_SPLITS = ("train", "dev", "heldout")
FILE_SUFFIXES = (".jsonl", ".json", ".parquet")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Conversation:
    """One conversation in the normal form of ``formats.parse_row``. ``id``: the row's, else its place."""

    id: str
    category: str
    messages: list[Message]

    @property
    def user_turns(self) -> list[str]:
        """The texts of the user's turns, in order."""
        return [message["content"] or "" for message in self.messages if message["role"] == "user"]


@dataclass
class SourceReport:
    """What became of one source: rows read, conversations kept, rows dropped by reason, the file."""

    source: str
    num_rows: int = 0
    num_conversations: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    size_bytes: int | None = None
    sha256: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON takes them (``dataclasses.asdict`` breaks counters)."""
        return {**vars(self), "dropped": dict(self.dropped.most_common())}


@dataclass(frozen=True)
class LoadedSources:
    """Conversations of all sources, in the order of the sources, and one report for each of them."""

    conversations: list[Conversation]
    reports: list[SourceReport]

    @property
    def dropped(self) -> Counter[str]:
        """Rows dropped by reason, over all sources."""
        return sum((report.dropped for report in self.reports), Counter())


def load_conversations(sources: list[str], limit: int | None = None, seed: int = 0) -> LoadedSources:
    """Reads every source; with ``limit``, keeps that many conversations, drawn by ``seed``, in their order.

    A source is ``builtin`` (``builtin#dev``, ``builtin#heldout`` for the other splits), a .jsonl, .json or .parquet file, or a
    Hub id ``owner/name[:config][#split]``. The draw of a smaller limit is part of the draw of a larger one.

    Raises:
        DataError: a file is missing or torn, a row is no conversation (its line is named), a Hub id cannot be
            reached, or no usable conversation is left.
    """
    conversations: list[Conversation] = []
    reports = []
    for source in sources:
        loaded, report = _load_source(source)
        conversations += loaded
        reports.append(report)
    if not conversations:
        why = ", ".join(f"{reason}: {n}" for report in reports for reason, n in report.dropped.most_common())
        raise DataError(
            f"data.sources: no usable conversation, got {', '.join(sources)} ({why or 'no rows'}); give other sources"
        )
    if limit is not None and limit < len(conversations):
        order = list(range(len(conversations)))
        random.Random(seed).shuffle(order)
        conversations = [conversations[i] for i in sorted(order[:limit])]
    return LoadedSources(conversations, reports)


def _load_source(source: str) -> tuple[list[Conversation], SourceReport]:
    """Every usable conversation of one source."""
    report = SourceReport(source)
    path = _local_path(source)
    if path is not None:
        report.size_bytes = path.stat().st_size
        report.sha256 = file_sha256(path)
    conversations = []
    for place, row in _read_file(path, source) if path is not None else _read_hub(source):
        report.num_rows += 1
        try:
            messages = parse_row(row)
        except UnusableRowError as error:
            report.dropped[str(error)] += 1
            continue
        except NotAConversationError as error:
            raise DataError(f"data.sources: {place} is no conversation, got {error}; mend or remove the row") from error
        report.num_conversations += 1
        conversations.append(_conversation(row, messages, f"{source}:{report.num_rows}"))
    return conversations, report


def _conversation(row: dict[str, Any], messages: list[Message], default_id: str) -> Conversation:
    own = next((row[name] for name in ("id", "question_id") if row.get(name) is not None), default_id)
    category = row.get("category")
    return Conversation(str(own), category if isinstance(category, str) else "", messages)


def builtin_path(split: str = "train") -> Path:
    """The file of built-in prompts of a split: ``train``, ``dev`` (choosing the best head) or ``heldout``."""
    return Path(str(resources.files("specdraft.data") / "builtin" / f"{split}.jsonl"))


def file_sha256(path: Path) -> str:
    """Checksum of a file's bytes, as hexadecimal text."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _local_path(source: str) -> Path | None:
    """The file that a source names, or None for a Hub id."""
    name, _, split = source.partition("#")
    if name == "builtin":
        if split not in ("", *BUILTIN_SPLITS):
            raise DataError(f"data.sources: builtin has the splits {', '.join(BUILTIN_SPLITS)}, got {source}; use one")
        return builtin_path(split or "train")
    path = Path(source).expanduser()
    if path.is_dir():
        raise DataError(f"data.sources: is a folder, got {source}; give one {', '.join(FILE_SUFFIXES)} file")
    if path.is_file():
        if path.suffix.lower() not in FILE_SUFFIXES:
            raise DataError(f"data.sources: unknown kind of file, got {source}; use {', '.join(FILE_SUFFIXES)}")
        return path
    if path.suffix.lower() in FILE_SUFFIXES or source.startswith(("/", ".", "~")):
        raise DataError(f"data.sources: no such file, got {source}; check the path")
    return None


def _read_file(path: Path, source: str) -> Iterator[tuple[str, Any]]:
    """(place, row) of every row of a local file. ``place`` names the line or row in messages."""
    suffix = path.suffix.lower()
    try:
        if suffix == ".parquet":
            yield from _read_parquet(path, source)
        elif suffix == ".json" and (rows := _json_rows(path)) is not None:
            yield from ((f"row {i} of {source}", row) for i, row in enumerate(rows, 1))
        else:
            yield from _read_jsonl(path, source)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.sources: cannot be read, got {source} ({error}); mend or replace the file") from error


def _read_jsonl(path: Path, source: str) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"line {number} of {source}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                torn = "is cut off" if not line.endswith("\n") else "is not JSON"
                raise DataError(
                    f"data.sources: {place} {torn}, got {_shorten(line)!r} ({error.msg}); mend or remove the line"
                ) from error
            yield place, row


def _json_rows(path: Path) -> list[Any] | None:
    """The rows of a JSON array (or of an object's only array); None when the file has a JSON value a line."""
    text = path.read_text(encoding="utf-8")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("{"):
            return None
        raise DataError(
            f"data.sources: line {error.lineno} of {path} is not JSON or is cut off, got {error.msg}; mend the file"
        ) from error
    if isinstance(value, dict):
        arrays = [item for item in value.values() if isinstance(item, list)]
        is_row = bool({"messages", "conversations", "turns", "instruction", "prompt"} & set(value))
        if is_row or len(arrays) != 1:
            return [value]
        value = arrays[0]
    if not isinstance(value, list):
        raise DataError(f"data.sources: holds no rows, got a {type(value).__name__} in {path}; give a list of rows")
    return value


def _read_parquet(path: Path, source: str) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        file = pyarrow.parquet.ParquetFile(path)
        number = 0
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield f"row {number} of {source}", row
    except pyarrow.ArrowException as error:
        raise DataError(
            f"data.sources: not a whole Parquet file, got {source} ({_first_line(error)}); replace the file"
        ) from error


def _read_hub(source: str) -> Iterator[tuple[str, Any]]:
    """(place, row) of a split of a Hub data set."""
    name, _, split = source.partition("#")
    name, _, config = name.partition(":")
    if not _HUB_ID.fullmatch(name):
        raise DataError(
            f"data.sources: neither builtin, a file nor a Hub id, got {source}; use builtin, a path or owner/name#split"
        )
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    try:
        rows = datasets.load_dataset(name, config or None, split=split or "train")
    except (OSError, ValueError, HfHubHTTPError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"data.sources: the Hub data set cannot be loaded, got {source} ({_first_line(error)}); check "
            "the name, the split and the network"
        ) from error
    for number, row in enumerate(rows, 1):
        yield f"row {number} of {source}", row


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _shorten(text: str, size: int = 60) -> str:
    text = text.strip()
    return text if len(text) <= size else f"{text[: size - 1]}…"
