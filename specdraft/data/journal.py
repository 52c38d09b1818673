"""Answers on disk while they are being written: an append-only file for each process, safe against a kill."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

from specdraft.core.errors import DataError

AnswerKey = tuple[str, int, int]
"""(conversation, turn, sample)."""

EOS, LENGTH, NO_ROOM, REFUSED, NO_TOKENS = "eos", "length", "no room", "refused", "not its tokens"
"""How an answer ended: with an end-of-text token; cut, without one; never begun, since the prompt left no room or the
server refused it; or as a text that is not that of its tokens."""


@dataclass(frozen=True)
class Answer:
    """One regenerated answer. conversation: key of the conversation; turn: which of its answers, from 0.

    prompt_ids: what the target was given; answer_ids: what it wrote, EOS included where it came. No answer_ids at all
    say that the conversation ends here, and ``finish`` why. sample: which of several answers. temperature: 0 = greedy.
    ids_from: ``target``, ``server`` (it returned them), or how they were made from its text.
    """

    conversation: str
    turn: int
    prompt_ids: list[int]
    answer_ids: list[int]
    sample: int = 0
    finish: str = EOS
    temperature: float = 0.0
    ids_from: str = "target"

    @property
    def key(self) -> AnswerKey:
        """What it is found by."""
        return self.conversation, self.turn, self.sample


class AnswerJournal(Mapping[AnswerKey, Answer]):
    """Answers of all processes in ``folder``; each process appends to the file of its own rank only.

    A line is one answer. What a kill leaves of a last line is dropped, and cut off before this rank appends again. In
    memory are the places of the answers, some 200 bytes each; an answer is read from its file when it is asked for.
    """

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder = folder
        self.path = folder / f"rank-{rank:05d}.jsonl"
        self._places: dict[bytes, tuple[int, int]] = {}
        self._files: list[_File] = []

    def read(self) -> AnswerJournal:
        """This journal with all that is in the files of all ranks by now; what was read before is not read again.

        Raises:
            DataError: a line other than the last of a file is torn.
        """
        known = {file.path for file in self._files}
        self._files += [_File(path) for path in sorted(self.folder.glob("rank-*.jsonl")) if path not in known]
        for number, file in enumerate(self._files):
            for offset, answer in file.new_answers():
                self._places[_digest(answer.key)] = number, offset
        return self

    def append(self, answers: Iterable[Answer]) -> None:
        """Adds answers and returns when they are on the disk.

        Raises:
            DataError: they cannot be written (disk full, no permission).
        """
        lines = "".join(json.dumps(astuple(answer), separators=(",", ":")) + "\n" for answer in answers)
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
        self.read()

    def size_bytes(self) -> int:
        """Bytes of all ranks' files: grows as long as a process is at work."""
        return sum(path.stat().st_size for path in self.folder.glob("rank-*.jsonl"))

    def __getitem__(self, key: AnswerKey) -> Answer:
        number, offset = self._places[_digest(key)]
        return self._files[number].at(offset)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, tuple) and _digest(key) in self._places

    def __iter__(self) -> Iterator[AnswerKey]:
        return (self._files[number].at(offset).key for number, offset in self._places.values())

    def __len__(self) -> int:
        return len(self._places)


class _File:
    """One rank's file, read as far as it has whole lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._end = 0
        self._lines = 0

    def new_answers(self) -> Iterator[tuple[int, Answer]]:
        """(offset, answer) of every whole line that was not read yet."""
        with self.path.open("rb") as file:
            file.seek(self._end)
            for line in file:
                # Behind the last newline stands what a kill, or another process just now, left of a line.
                if not line.endswith(b"\n"):
                    return
                self._lines += 1
                offset, answer = self._end, _parse(line, f"line {self._lines} of {self.path}")
                self._end += len(line)
                yield offset, answer

    def at(self, offset: int) -> Answer:
        """The answer of the line that starts there."""
        with self.path.open("rb") as file:
            file.seek(offset)
            return _parse(file.readline(), f"byte {offset} of {self.path}")


def _digest(key: tuple[object, ...]) -> bytes:
    return hashlib.blake2b(repr(key).encode(), digest_size=12).digest()


def _parse(line: bytes, place: str) -> Answer:
    try:
        answer = Answer(*json.loads(line))
    except (ValueError, TypeError) as error:
        raise DataError(
            f"data.cache_dir: {place} is torn, got {line[:40]!r}; remove the line, its answer will be written again"
        ) from error
    return answer


def _cut_torn_line(descriptor: int) -> None:
    """Cuts the file after its last newline, unless it ends with one already."""
    end = size = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - (1 << 20))
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end != size:
        os.ftruncate(descriptor, end)
