"""Answers on disk while they are being written: an append-only file for each process, safe against a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from specdraft.core.errors import DataError


@dataclass(frozen=True)
class Answer:
    """One regenerated answer. conversation: key of the conversation; turn: which of its answers, from 0.

    prompt_ids: what the target was given; answer_ids: what it wrote, EOS included where it came. No
    answer_ids at all say that the conversation ends here because the prompt left no room.
    """

    conversation: str
    turn: int
    prompt_ids: list[int]
    answer_ids: list[int]


class AnswerJournal:
    """Answers of all processes in ``folder``; each process appends to the file of its own rank only.

    A line is one answer. What a kill leaves of a last line is dropped, and cut off before this rank appends
    again.
    """

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder = folder
        self.path = folder / f"rank-{rank:05d}.jsonl"

    def read(self) -> dict[tuple[str, int], Answer]:
        """(conversation, turn) -> answer, over the files of all ranks.

        Raises:
            DataError: a line other than the last of a file is torn.
        """
        answers = {}
        for path in sorted(self.folder.glob("rank-*.jsonl")):
            for answer in _read(path):
                answers[answer.conversation, answer.turn] = answer
        return answers

    def append(self, answers: Iterable[Answer]) -> None:
        """Adds answers and returns when they are on the disk.

        Raises:
            DataError: they cannot be written (disk full, no permission).
        """
        lines = "".join(
            json.dumps([a.conversation, a.turn, a.prompt_ids, a.answer_ids], separators=(",", ":")) + "\n"
            for a in answers
        )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as file:
                _cut_torn_line(file.fileno())
                file.write(lines.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise DataError(
                f"data.cache_dir: answers cannot be saved, got {self.path} ({error}); free space and run "
                "again, what was answered so far is kept"
            ) from error

    def size_bytes(self) -> int:
        """Bytes of all ranks' files: grows as long as a process is at work."""
        return sum(path.stat().st_size for path in self.folder.glob("rank-*.jsonl"))


def _cut_torn_line(descriptor: int) -> None:
    """Cuts the file after its last newline, unless it ends with one already."""
    size = os.fstat(descriptor).st_size
    if not size or os.pread(descriptor, 1, size - 1) == b"\n":
        return
    os.ftruncate(descriptor, os.pread(descriptor, size, 0).rfind(b"\n") + 1)


def _read(path: Path) -> Iterator[Answer]:
    lines = path.read_bytes().split(b"\n")
    # After the last newline stands nothing, or what a kill (or another process just now) left of a line.
    for number, line in enumerate(lines[:-1], 1):
        try:
            conversation, turn, prompt_ids, answer_ids = json.loads(line)
        except (ValueError, TypeError) as error:
            raise DataError(
                f"data.cache_dir: line {number} of {path} is torn, got {line[:40]!r}; remove the line, its "
                "answer will be written again"
            ) from error
        yield Answer(conversation, turn, prompt_ids, answer_ids)
