"""Where conversations come from: built-in prompts, local files, Hub data sets. Dropped rows are counted."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from specdraft.core.errors import DataError
from specdraft.core.files import file_sha256
from specdraft.data.files import find_files, first_line, read_rows
from specdraft.data.formats import Message, NotAConversationError, UnusableRowError, parse_row
from specdraft.data.mixture import draw

BUILTIN_SPLITS = ("train", "dev", "heldout")
SHUFFLE_ROWS = 10_000
"""Rows of a stream among which the next one is drawn."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
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

    @property
    def num_characters(self) -> int:
        """Of all its texts."""
        return sum(len(message["content"] or "") for message in self.messages)


@dataclass
class SourceReport:
    """What became of one source: its files or its commit on the Hub, rows read, conversations kept, rows dropped by reason.

    sha256: of its file, or of the checksums of its files.
    """

    source: str
    num_rows: int = 0
    num_conversations: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    num_files: int = 0
    size_bytes: int | None = None
    sha256: str | None = None
    revision: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON takes them (``dataclasses.asdict`` breaks counters)."""
        return {**vars(self), "dropped": dict(self.dropped.most_common())}


class RowSource(ABC):
    """One entry of ``data.sources``, whose rows can be read again and again, one after the other."""

    def __init__(self, name: str) -> None:
        self.name = name

    may_end_early = False
    """Whether it is in an order in which its first rows are a fair part of it."""

    @property
    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """What its rows depend on, known before they are read."""

    @abstractmethod
    def rows(self) -> Iterator[tuple[str, Any]]:
        """(place, row) of every row. ``place`` names it in messages."""

    def report(self) -> SourceReport:
        """A report without rows yet."""
        return SourceReport(self.name)

    @abstractmethod
    def verify(self) -> None:
        """Raises DataError where the rows are no longer those of ``fingerprint``."""

    def conversations(self, report: SourceReport) -> Iterator[Conversation]:
        """The usable conversations; ``report`` counts them and the others.

        Raises:
            DataError: the source cannot be read, or a row is no conversation (its line is named).
        """
        for place, row in self.rows():
            report.num_rows += 1
            try:
                messages = parse_row(row)
            except UnusableRowError as error:
                report.dropped[str(error)] += 1
                continue
            except NotAConversationError as error:
                raise DataError(
                    f"data.sources: {place} is no conversation, got {error}; mend or remove the row"
                ) from error
            report.num_conversations += 1
            yield _conversation(row, messages, f"{self.name}:{report.num_rows}")


class FileSource(RowSource):
    """Local files, read in the order of their names."""

    def __init__(self, name: str, files: list[Path]) -> None:
        super().__init__(name)
        self.files = files

    @cached_property
    def checksums(self) -> list[str]:
        """Of the files. Names do not matter: a file that was moved holds the same rows."""
        return self._hash()

    def _hash(self) -> list[str]:
        try:
            return [file_sha256(path) for path in self.files]
        except OSError as error:
            raise DataError(f"data.sources: cannot be read, got {self.name} ({error}); check the file") from error

    def verify(self) -> None:
        """See RowSource: reads the files again."""
        if self._hash() != self.checksums:
            raise DataError(
                f"data.sources: was written to while it was read, got {self.name}; run again when it is whole"
            )

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The checksums."""
        return {"sha256": self.checksums}

    def rows(self) -> Iterator[tuple[str, Any]]:
        """See RowSource."""
        for path in self.files:
            yield from read_rows(path)

    def report(self) -> SourceReport:
        """See RowSource."""
        digest = self.checksums[0] if len(self.files) == 1 else _digest_of(self.checksums)
        size = sum(path.stat().st_size for path in self.files)
        return SourceReport(self.name, num_files=len(self.files), size_bytes=size, sha256=digest)


class HubSource(RowSource):
    """A split of a Hub data set, at one commit.

    ``streaming``: rows are read while they are downloaded. ``shuffle_seed``: the order of a stream, which may then be left
    before its end; None = as it is stored.
    """

    def __init__(self, name: str, *, streaming: bool = False, shuffle_seed: int | None = None) -> None:
        super().__init__(name)
        rest, _, split = name.partition("#")
        rest, _, revision = rest.partition("@")
        self.repo, _, config = rest.partition(":")
        if not _HUB_ID.fullmatch(self.repo):
            raise DataError(
                f"data.sources: neither builtin, a file nor a Hub id, got {name}; use builtin, a path or owner/name#split"
            )
        self.config, self.split, self.asked_revision = config or None, split or "train", revision or None
        self.streaming, self.shuffle_seed = streaming, shuffle_seed
        self.may_end_early = streaming and shuffle_seed is not None

    @cached_property
    def _builder(self) -> Any:
        """What ``datasets`` knows of the data set: its files at one commit, the newest known one unless another is asked."""
        import datasets

        with self._reported("cannot be loaded", "check the name, the split and the network"):
            return datasets.load_dataset_builder(self.repo, self.config, revision=self.asked_revision)

    @property
    def revision(self) -> str:
        """The commit. One that is asked for by its whole hash is known without the network."""
        asked = self.asked_revision or ""
        return asked if _COMMIT.fullmatch(asked) else str(self._builder.hash)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Repository, part and commit; how much of a stream is read depends on its order too."""
        known = {"hub": self.repo, "config": self.config, "split": self.split, "revision": self.revision}
        return known | ({"order": self.shuffle_seed} if self.streaming else {})

    def rows(self) -> Iterator[tuple[str, Any]]:
        """See RowSource."""
        with self._reported("cannot be loaded", "check the name, the split and the network"):
            if self.streaming:
                rows = self._builder.as_streaming_dataset(split=self.split)
                if self.shuffle_seed is not None:
                    rows = rows.shuffle(seed=self.shuffle_seed, buffer_size=SHUFFLE_ROWS)
            else:
                self._builder.download_and_prepare()
                rows = self._builder.as_dataset(split=self.split)
        following = enumerate(rows, 1)
        while True:
            with self._reported("cannot be read to its end", "check the network and run again"):
                number, row = next(following, (0, None))
            if not number:
                return
            yield f"row {number} of {self.name}", row

    def report(self) -> SourceReport:
        """See RowSource."""
        return SourceReport(self.name, revision=self.revision)

    def verify(self) -> None:
        """See RowSource: a commit does not change."""

    def _reported(self, what: str, remedy: str) -> _Reported:
        return _Reported(f"data.sources: the Hub data set {what}, got {self.name}", remedy)


class _Reported:
    """A context in which what ``datasets`` raises becomes a DataError."""

    def __init__(self, fault: str, remedy: str) -> None:
        self.fault, self.remedy = fault, remedy

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        import datasets
        from huggingface_hub.errors import HfHubHTTPError

        if isinstance(error, (OSError, ValueError, HfHubHTTPError, datasets.exceptions.DatasetsError)):
            raise DataError(f"{self.fault} ({first_line(error)}); {self.remedy}") from error


@dataclass(frozen=True)
class LoadedSources:
    """Conversations of all sources, in the order of the sources, and one report for each of them."""

    conversations: list[Conversation]
    reports: list[SourceReport]

    @property
    def dropped(self) -> Counter[str]:
        """Rows dropped by reason, over all sources."""
        return sum((report.dropped for report in self.reports), Counter())


def open_source(name: str, *, streaming: bool = False, shuffle_seed: int | None = None) -> RowSource:
    """The source that ``name`` means; nothing is read yet.

    It is ``builtin`` (``builtin#dev``, ``builtin#heldout`` for the other splits), a .jsonl, .json or .parquet file, a folder
    or a glob of such files, or a Hub id ``owner/name[:config][@revision][#split]``.

    Raises:
        DataError: there is no such file or split, or the name is none of these.
    """
    known, _, split = name.partition("#")
    if known == "builtin":
        if split not in ("", *BUILTIN_SPLITS):
            raise DataError(f"data.sources: builtin has the splits {', '.join(BUILTIN_SPLITS)}, got {name}; use one")
        return FileSource(name, [builtin_path(split or "train")])
    files = find_files(name)
    if files is not None:
        return FileSource(name, files)
    return HubSource(name, streaming=streaming, shuffle_seed=shuffle_seed)


def load_conversations(sources: list[str], limit: int | None = None, seed: int = 0) -> LoadedSources:
    """Every source in memory, for sets of prompts; with ``limit``, that many conversations drawn by ``seed``, in their order.

    The draw of a smaller limit is part of the draw of a larger one.

    Raises:
        DataError: a file is missing or torn, a row is no conversation (its line is named), a Hub id cannot be
            reached, or no usable conversation is left.
    """
    conversations: list[Conversation] = []
    reports = []
    for name in sources:
        source = open_source(name)
        reports.append(source.report())
        conversations += source.conversations(reports[-1])
    if not conversations:
        raise no_conversation(sources, reports)
    if limit is not None and limit < len(conversations):
        conversations = [conversations[i] for i in draw(len(conversations), limit, seed)]
    return LoadedSources(conversations, reports)


def no_conversation(sources: list[str], reports: list[SourceReport]) -> DataError:
    """The error that says why nothing is left."""
    why = ", ".join(f"{reason}: {n}" for report in reports for reason, n in report.dropped.most_common())
    return DataError(
        f"data.sources: no usable conversation, got {', '.join(sources)} ({why or 'no rows'}); give other sources"
    )


def _conversation(row: dict[str, Any], messages: list[Message], default_id: str) -> Conversation:
    own = next((row[name] for name in ("id", "question_id") if row.get(name) is not None), default_id)
    category = row.get("category")
    return Conversation(str(own), category if isinstance(category, str) else "", messages)


def builtin_path(split: str = "train") -> Path:
    """The file of built-in prompts of a split: ``train``, ``dev`` (choosing the best head) or ``heldout``."""
    return Path(str(resources.files("specdraft.data") / "builtin" / f"{split}.jsonl"))


def _digest_of(checksums: list[str]) -> str:
    return hashlib.sha256("".join(checksums).encode()).hexdigest()
