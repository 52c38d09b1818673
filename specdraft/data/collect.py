"""Sources -> the conversations of a data set, on disk: read one by one, dropped with a count, drawn."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdraft.core.errors import DataError
from specdraft.core.files import replacing
from specdraft.data._config import DataConfig
from specdraft.data.batch_render import BatchRenderer
from specdraft.data.chat import ChatRenderer
from specdraft.data.mixture import select
from specdraft.data.near_duplicates import NUM_HASHES, check_datasketch, find_duplicates, signature
from specdraft.data.overlap import HeldOut, held_out_texts, load_held_out, open_held_out
from specdraft.data.progress import progress
from specdraft.data.sources import Conversation, RowSource, SourceReport, no_conversation, open_source
from specdraft.data.store import ConversationStore, StoreWriter
from specdraft.data.workers import spread

COLLECTED_NAME = "collected.json"
PLACES_NAME = "places.npy"
RENDER_BATCH = 1024
"""Conversations that are rendered by one call of the tokenizer."""
REFUSED = "refused by the chat template"
LONG_PROMPT = "prompt longer than data.max_length"
_REPORT_ROWS = 1000


@dataclass(frozen=True)
class Collected:
    """The conversations of a data set that is being prepared.

    num_drawn: before those were left out that cannot be answered. reports: of the sources, as manifests hold them.
    dropped: conversations by reason, beside those that ``reports`` count.
    """

    conversations: ConversationStore
    num_drawn: int
    reports: list[dict[str, Any]]
    dropped: Counter[str]


def open_sources(config: DataConfig) -> list[RowSource]:
    """The sources of ``config``; nothing is read yet."""
    seed = None if config.limit is None else config.seed
    return [open_source(name, streaming=config.streaming, shuffle_seed=seed) for name in config.sources]


def selection_identity(config: DataConfig, sources: Sequence[RowSource]) -> dict[str, Any]:
    """All that decides which conversations are collected. The sources are hashed, not parsed.

    Raises:
        ConfigError: datasketch is needed and not installed.
        DataError: a source does not exist or cannot be read.
    """
    check_datasketch(config)
    held_out = open_held_out(config.held_out) if config.overlap_words else []
    is_drawn = config.limit is not None or config.weights is not None
    return {
        "sources": [source.fingerprint for source in sources],
        "weights": config.weights,
        "limit": config.limit,
        "seed": config.seed if is_drawn else None,
        "max_characters": config.max_characters,
        "overlap_words": config.overlap_words,
        "held_out": [source.fingerprint for source in held_out],
        "near_duplicates": config.near_duplicates,
    }


def collect(config: DataConfig, sources: Sequence[RowSource], renderer: ChatRenderer, folder: Path) -> Collected:
    """Reads the sources into ``folder``, or finds there what an earlier run has read.

    With ``config.regenerate``, conversations whose prompt the template refuses or a row cannot hold are left out.

    Raises:
        DataError: a source cannot be read, a row is no conversation, or none is left.
        OSError: the files cannot be written.
    """
    if (folder / COLLECTED_NAME).exists():
        return load_collected(folder)
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()  # of a run that was killed
    store, reports, counts = _read(config, sources, folder)
    for source in sources:
        source.verify()
    kept = np.arange(len(store))
    if config.near_duplicates is not None and len(store):
        gone = _near_duplicates(config, config.near_duplicates, store)
        for report, start, end in zip(reports, [0, *accumulate(counts)], accumulate(counts), strict=False):
            report.dropped.update({"near duplicate": int(gone[start:end].sum())} if gone[start:end].any() else {})
        kept = kept[~gone]
        counts = [int((~gone[end - count : end]).sum()) for count, end in zip(counts, accumulate(counts), strict=True)]
    if not len(kept):
        raise no_conversation(config.sources, reports)
    for report, count in zip(reports, counts, strict=True):
        report.num_conversations = count
    drawn = kept[np.asarray(select(counts, config.weights, config.limit, config.seed), dtype=np.int64)]
    dropped: Counter[str] = Counter()
    answered = drawn
    if config.regenerate:
        usable = _renderable(store.subset(drawn), renderer, config.max_length, dropped)
        answered = drawn[usable]
    with replacing(folder / PLACES_NAME) as file:
        np.save(file, answered)
    record = {
        "num_files": store.num_files,
        "num_drawn": len(drawn),
        "sources": [report.as_dict() for report in reports],
        "dropped": dict(dropped),
    }
    with replacing(folder / COLLECTED_NAME) as file:
        file.write(json.dumps(record).encode())
    return load_collected(folder)


def load_collected(folder: Path) -> Collected:
    """What ``collect`` has written.

    Raises:
        DataError: a file is missing or torn.
    """
    try:
        record = json.loads((folder / COLLECTED_NAME).read_text())
        store = ConversationStore(folder, record["num_files"], np.load(folder / PLACES_NAME))
        return Collected(store, record["num_drawn"], record["sources"], Counter(record["dropped"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"data.cache_dir: what an earlier run has read is torn, got {folder} ({error}); remove the folder and run again"
        ) from error


def _read(
    config: DataConfig, sources: Sequence[RowSource], folder: Path
) -> tuple[ConversationStore, list[SourceReport], list[int]]:
    """The wanted conversations of all sources, a report of each, and how many each gave."""
    held_out = load_held_out(config.overlap_words, open_held_out(config.held_out)) if config.overlap_words else None
    writer, reports, counts = StoreWriter(folder), [], []
    with progress("reading conversations") as advance:
        for source in sources:
            report, before, told = source.report(), writer.num_conversations, 0
            reports.append(report)
            for conversation in source.conversations(report):
                if report.num_rows - told >= _REPORT_ROWS:
                    advance(report.num_rows - told)
                    told = report.num_rows
                reason = _unwanted(conversation, config, held_out)
                if reason is not None:
                    report.dropped[reason] += 1
                    continue
                writer.add(conversation)
                if source.may_end_early and writer.num_conversations - before == config.limit:
                    break
            counts.append(writer.num_conversations - before)
    writer.flush()
    return ConversationStore(folder, writer.num_files), reports, counts


def _unwanted(conversation: Conversation, config: DataConfig, held_out: HeldOut | None) -> str | None:
    """Why a conversation is dropped; None if it is not."""
    if config.max_characters is not None and conversation.num_characters > config.max_characters:
        return "longer than data.max_characters"
    if held_out is not None and held_out.overlaps(held_out_texts(conversation, not config.regenerate)):
        return "overlaps a held-out prompt"
    return None


@dataclass
class _Signing:
    """Signatures of a part of a store, for ``spread``."""

    folder: Path
    num_files: int
    with_answers: bool

    @cached_property
    def _store(self) -> ConversationStore:
        return ConversationStore(self.folder, self.num_files)

    def __call__(self, part: tuple[int, int]) -> NDArray[np.uint32]:
        rows = (self._store[i] for i in range(*part))
        return np.stack([signature(held_out_texts(row, self.with_answers)) for row in rows])


def _near_duplicates(config: DataConfig, threshold: float, store: ConversationStore) -> NDArray[np.bool_]:
    """``[R]``: True = like an earlier conversation."""
    path = store.folder / "signatures"
    task, parts = _Signing(store.folder, store.num_files, not config.regenerate), store.groups()
    with replacing(path) as file, progress("signatures of conversations", len(parts)) as advance:
        for values in spread(task, parts, config.num_workers):
            file.write(values.tobytes())
            advance(1)
    signatures = np.memmap(path, dtype=np.uint32, mode="r").reshape(-1, NUM_HASHES)
    gone = find_duplicates(signatures, threshold)
    path.unlink()
    return gone


def _renderable(
    conversations: ConversationStore, renderer: ChatRenderer, max_length: int, dropped: Counter[str]
) -> NDArray[np.bool_]:
    """``[R]``: True = the template takes the first prompt, and a row can hold it; the others are counted."""
    batch = BatchRenderer(renderer)
    usable = np.zeros(len(conversations), dtype=np.bool_)
    with progress("rendering prompts", len(conversations)) as advance:
        for start in range(0, len(conversations), RENDER_BATCH):
            part = conversations[start : start + RENDER_BATCH]
            for i, length in enumerate(batch.prompt_lengths([row.messages for row in part])):
                reason = unusable_prompt(length, max_length)
                usable[start + i] = reason is None
                dropped.update([] if reason is None else [reason])
            advance(len(part))
    return usable


def unusable_prompt(length: int | None, max_length: int) -> str | None:
    """Why a conversation with a first prompt of so many tokens (None = refused) is dropped; None if it is not."""
    if length is None:
        return REFUSED
    return LONG_PROMPT if length >= max_length else None
