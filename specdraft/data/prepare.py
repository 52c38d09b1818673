"""Sources -> answers -> rows -> disk: all that comes before training, done once for the same settings."""

from __future__ import annotations

import logging
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerBase

from specdraft.core.errors import ConfigError, DataError
from specdraft.data._config import DataConfig
from specdraft.data.answering import MakeWriter, writer_identity
from specdraft.data.assemble import Job, Rendering, open_jobs, regenerated, totals
from specdraft.data.chat import ChatRenderer
from specdraft.data.collect import (
    COLLECTED_NAME,
    Collected,
    collect,
    load_collected,
    open_sources,
)
from specdraft.data.identity import data_identity, digest
from specdraft.data.journal import AnswerJournal
from specdraft.data.local_answers import choose_writer
from specdraft.data.own_answers import check_rows
from specdraft.data.prepared import (
    MANIFEST_NAME,
    PreparedData,
    load_prepared,
    not_saved,
    publish,
    shard_name,
)
from specdraft.data.progress import progress
from specdraft.data.regenerate import answered_turns, regenerate
from specdraft.data.shards import TokenShard
from specdraft.data.sources import Conversation
from specdraft.data.workers import spread

if TYPE_CHECKING:
    from specdraft.targets.hf import HFTarget

POLL_S = 1.0
"""Seconds between two looks at what the other processes wrote."""
IDLE_LIMIT_S = 3600.0
"""Seconds without any progress of the other processes before waiting for them is given up."""
logger = logging.getLogger(__name__)


def prepare(
    config: DataConfig,
    source: HFTarget | PreTrainedTokenizerBase,
    folder: Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    make_writer: MakeWriter | None = None,
) -> PreparedData:
    """The data set that ``config`` describes, from ``folder`` if it was prepared before, else made now.

    ``source`` is the target, or its tokenizer alone where ``config.regenerate`` is false or ``make_writer`` needs no
    loaded target. ``make_writer``: see ``answering``; None = the target writes by itself. Every process calls
    this; the processes must share ``folder``. A data set lives in ``folder/<hash>``, so other sources,
    targets or settings never mix with it; regenerated answers live beside it and serve data sets that differ
    in limit, max_length or loss_on. What is unfinished lies in ``folder/.<hash>``: a run that was killed is gone on with,
    and a second run with the same settings waits for the first.

    manifest.json holds: identity (what the hash is of: sources by checksum or commit, tokenizer, template, target,
    settings), sources (rows, files and their checksums, commits, rows dropped), responses (who wrote the answers), dropped
    (rows by reason), mask_sources (turns by how their answer was found), answers (how they ended), num_conversations,
    num_rows, num_tokens, num_supervised_tokens, supervised_share, length_histogram (rows by tokens, "<=64" and so on),
    categories (conversations by category), shards (checksums).

    Raises:
        ConfigError: regeneration without a target, a setting the chat template does not know, or a package is missing.
        DataError: a source cannot be read, nothing would be supervised, or the files cannot be written or
        read.
    """
    tokenizer, target = _parts(source)
    if config.regenerate and target is None and config.answers.by == "target":
        raise ConfigError("data.regenerate: the target must be loaded to write answers, got a tokenizer; use false")
    renderer = ChatRenderer(tokenizer, system=config.system, enable_thinking=config.enable_thinking)
    work = _Work(config, renderer, target, folder, make_writer)
    found = work.found()
    if found is not None:
        work.remove_rest(rank)
        return found
    if rank != 0:
        return work.help(rank, world_size)
    with work.locked():
        return work.found() or work.make(world_size)


def _parts(
    source: HFTarget | PreTrainedTokenizerBase,
) -> tuple[PreTrainedTokenizerBase, HFTarget | None]:
    """(tokenizer, target or None)."""
    if isinstance(source, PreTrainedTokenizerBase):
        return source, None
    if source.tokenizer is None:
        raise DataError(f"target.name: has no tokenizer, got {source.spec.name}; load it with its tokenizer")
    return source.tokenizer, source


class _Work:
    """One data set on its way from the sources to its folder."""

    def __init__(
        self,
        config: DataConfig,
        renderer: ChatRenderer,
        target: HFTarget | None,
        folder: Path,
        make_writer: MakeWriter | None,
    ) -> None:
        self.config, self.renderer, self.target, self.make_writer = config, renderer, target, make_writer
        self.sources = open_sources(config)
        self.identity = data_identity(config, renderer, self.sources, writer_identity(config, target))
        self.folder = folder
        self.place = folder / digest(self.identity)
        self.unfinished = folder / f".{self.place.name}"
        self.rows = self.unfinished / "rows"

    def found(self) -> PreparedData | None:
        """The data set where it is prepared.

        Raises:
            DataError: its files are not what was saved, or of something else.
        """
        if not (self.place / MANIFEST_NAME).exists():
            return None
        return load_prepared(self.place, self.renderer, self.identity)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other run makes the data set meanwhile; the system ends the lock of a process that was killed."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.folder / f".{self.place.name}.lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                logger.warning("data: waiting for another process that prepares %s", self.place)
                lock.acquire()
        except OSError as error:
            raise not_saved(self.place, error) from error
        try:
            yield
        finally:
            if (self.place / MANIFEST_NAME).exists():
                Path(lock.lock_file).unlink(missing_ok=True)  # whoever waits for it finds the data set
            lock.release()

    def make(self, world_size: int) -> PreparedData:
        """Does what is not done yet, as the first process."""
        if self.place.exists():
            raise DataError(
                f"data.cache_dir: the folder has no {MANIFEST_NAME}, got {self.place}; remove it and prepare the data again"
            )
        try:
            self.rows.mkdir(parents=True, exist_ok=True)
            _remove_partial(self.rows)
            collected = collect(self.config, self.sources, self.renderer, self.unfinished)
            num_shards = self._make_shards(collected, self._answers(collected.conversations, 0, world_size))
            publish(self.rows, self.place, num_shards, self._manifest(collected, num_shards))
        except OSError as error:
            raise not_saved(self.place, error) from error
        self.remove_rest(0)
        return load_prepared(self.place)

    def remove_rest(self, rank: int) -> None:
        """Removes what the finished data set no longer needs, as the first process."""
        if rank == 0:
            shutil.rmtree(self.unfinished, ignore_errors=True)

    def help(self, rank: int, world_size: int) -> PreparedData:
        """Answers this process's share, and waits for the first one to do the rest."""
        collected = self.unfinished / COLLECTED_NAME
        manifest = self.place / MANIFEST_NAME
        what = f"the first process to write {self.place}"
        journal = None
        if self.config.regenerate:
            self._wait(lambda: collected.exists() or manifest.exists(), None, what)
            if not manifest.exists():
                journal = self._share(rank, world_size)
        self._wait(manifest.exists, journal, what)
        return load_prepared(self.place, self.renderer, self.identity)

    def _share(self, rank: int, world_size: int) -> AnswerJournal | None:
        """This process's share of the answers; None if the data set was finished meanwhile."""
        try:
            conversations = load_collected(self.unfinished).conversations
        except DataError:
            if (self.place / MANIFEST_NAME).exists():
                return None
            raise
        return self._answers(conversations, rank, world_size)

    def _answers(self, conversations: Sequence[Conversation], rank: int, world_size: int) -> AnswerJournal | None:
        """The target's answers, this process's share of them written now; None where the sources' answers are used."""
        config = self.config
        if not config.regenerate:
            return None
        journal = AnswerJournal(self.folder / f"answers-{digest(self.identity['answers'])}", rank)
        writer = choose_writer(config, self.renderer, self.target, self.make_writer)
        regenerate(conversations, self.renderer, writer, journal, config, rank=rank, world_size=world_size)
        if rank == 0 and world_size > 1:
            answered = _all_answered(conversations, journal, config.answers.samples)
            self._wait(answered, journal, f"the answers of {world_size} processes in {self.folder}")
        return journal

    def _make_shards(self, collected: Collected, journal: AnswerJournal | None) -> int:
        """Writes the shards that an earlier run has not; their number."""
        config = self.config
        groups = collected.conversations.groups()
        task: Callable[[Job], None]
        if journal is None:
            task = Rendering(
                folder=self.unfinished,
                out=self.rows,
                tokenizer=self.renderer.tokenizer,
                system=config.system,
                enable_thinking=config.enable_thinking,
                max_length=config.max_length,
                loss_on=config.loss_on,
            )
        else:
            task = regenerated(
                self.rows,
                collected.conversations,
                journal.read(),
                config.answers.samples,
                max_length=config.max_length,
                loss_on=config.loss_on,
            )
        # A journal is read by one process: its answers are tokens already.
        workers = config.num_workers if journal is None else 1
        with progress("rows of conversations", len(groups)) as advance:
            jobs = open_jobs(self.rows, groups)
            advance(len(groups) - len(jobs))
            for _ in spread(task, jobs, workers):
                advance(1)
        return len(groups)

    def _manifest(self, collected: Collected, num_shards: int) -> dict[str, Any]:
        """See ``prepare``.

        Raises:
            DataError: no row is left, or the answers are not the target's own.
        """
        found = totals(self.rows, num_shards)
        dropped = collected.dropped + Counter(found.get("dropped", {}))
        for report in collected.reports:
            dropped.update(report["dropped"])
        if not found.get("num_rows"):
            why = ", ".join(f"{reason}: {n}" for reason, n in dropped.most_common())
            shutil.rmtree(self.unfinished, ignore_errors=True)
            raise DataError(f"data.sources: nothing would be supervised, got 0 rows ({why}); change what drops them")
        rows = PreparedData(self.rows, {}, [TokenShard(self.rows / shard_name(i)) for i in range(num_shards)])
        histogram = found["length_histogram"]
        return {
            "identity": self.identity,
            "settings": asdict(self.config),
            "sources": collected.reports,
            "responses": self.identity["answers"]["by"],
            "answers": found["answers"] | check_rows(self.target, rows, self.config),
            "dropped": dict(dropped.most_common()),
            "mask_sources": found["mask_sources"],
            "num_conversations": collected.num_drawn,
            "num_rows": found["num_rows"],
            "num_tokens": found["num_tokens"],
            "num_supervised_tokens": found["num_supervised_tokens"],
            "supervised_share": found["num_supervised_tokens"] / found["num_tokens"],
            "length_histogram": {name: histogram[name] for name in sorted(histogram, key=lambda name: int(name[2:]))},
            "categories": dict(sorted(found["categories"].items())),
        }

    def _wait(self, ready: Callable[[], bool], journal: AnswerJournal | None, what: str) -> None:
        """Returns when ``ready`` is true. No collective call: those time out long before a slow share is done.

        Raises:
            DataError: nothing was written for ``IDLE_LIMIT_S`` seconds, e.g. because the folder is not shared.
        """
        size, since = -1, time.monotonic()
        while not ready():
            now = _size_bytes(self.unfinished) + (0 if journal is None else journal.size_bytes())
            if now != size:
                size, since = now, time.monotonic()
            if time.monotonic() - since > IDLE_LIMIT_S:
                raise DataError(
                    f"data.cache_dir: waited {IDLE_LIMIT_S:.0f} s in vain, got nothing new from {what}; all "
                    "processes must share the folder"
                )
            time.sleep(POLL_S)


def _remove_partial(folder: Path) -> None:
    """Removes what a process that was killed left of files it was writing."""
    for path in folder.glob(".*"):
        path.unlink(missing_ok=True)


def _size_bytes(folder: Path) -> int:
    """Of all files below a folder, which others may remove meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def _all_answered(conversations: Sequence[Conversation], journal: AnswerJournal, samples: int) -> Callable[[], bool]:
    """A question: have all processes together answered every conversation?"""

    def ready() -> bool:
        answers = journal.read()
        return all(
            answered_turns(conversation, answers, sample) is not None
            for conversation in conversations
            for sample in range(samples)
        )

    return ready
