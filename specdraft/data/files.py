"""Local files of rows: which ones a path, folder or glob names, and their rows one after the other."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from specdraft.core.errors import DataError
from specdraft.data.formats import COLUMNS

FILE_SUFFIXES = (".jsonl", ".json", ".parquet")
BLOCK_CHARS = 1 << 20
"""What is read of a JSON array at a time."""
_SPACE = re.compile(r"[ \t\n\r]*")
_BOM = b"\xef\xbb\xbf"


def find_files(source: str) -> list[Path] | None:
    """The files that a path, a folder (all below it but hidden ones) or a glob names, by name; None where it is none of these.

    Raises:
        DataError: there is no such file, or none of a known kind.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return [_of_known_kind(path, source)]
    if path.is_dir():
        below = (p for p in path.rglob("*") if p.suffix.lower() in FILE_SUFFIXES and p.is_file())
        found = sorted(p for p in below if not any(part.startswith(".") for part in p.relative_to(path).parts))
        if not found:
            raise DataError(
                f"data.sources: the folder has no {', '.join(FILE_SUFFIXES)} file, got {source}; name another"
            )
        return found
    if glob.has_magic(source):
        matched = sorted(Path(path.anchor or ".").glob(str(path.relative_to(path.anchor))))
        files = [_of_known_kind(name, source) for name in matched if name.is_file()]
        if not files:
            raise DataError(f"data.sources: no file matches, got {source}; check the pattern")
        return files
    if path.suffix.lower() in FILE_SUFFIXES or source.startswith(("/", ".", "~")):
        raise DataError(f"data.sources: no such file, got {source}; check the path")
    return None


def public_name(source: str) -> str:
    """A source as others may read it: the last part of a path or glob of this machine, anything else as it is."""
    name = source.partition("#")[0]
    is_local = name.startswith(("/", ".", "~")) or glob.has_magic(name) or Path(name).exists()
    return Path(name).name if is_local else source


def _of_known_kind(path: Path, source: str) -> Path:
    if path.suffix.lower() not in FILE_SUFFIXES:
        raise DataError(f"data.sources: unknown kind of file, got {path} for {source}; use {', '.join(FILE_SUFFIXES)}")
    return path


def read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, row) of every row of a file, a part of which is in memory. ``place`` names the line or row in messages.

    Raises:
        DataError: the file cannot be read, or one of its lines is torn or no JSON; the line is named.
    """
    suffix = path.suffix.lower()
    try:
        if suffix == ".parquet":
            yield from _read_parquet(path)
        elif suffix == ".json" and (rows := _json_rows(path)) is not None:
            yield from ((f"row {i} of {path}", row) for i, row in enumerate(rows, 1))
        else:
            yield from _read_jsonl(path)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.sources: cannot be read, got {path} ({error}); mend or replace the file") from error


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            text = line.removeprefix(_BOM) if number == 1 else line
            if not text.strip():
                continue
            place = f"line {number} of {path}"
            try:
                row = json.loads(text.decode())
            except UnicodeDecodeError as error:
                raise DataError(
                    f"data.sources: {place} is not UTF-8, got {error.reason} in byte {error.start + 1}; mend or remove the line"
                ) from error
            except json.JSONDecodeError as error:
                torn = "is not JSON" if line.endswith(b"\n") else "is cut off"
                raise DataError(
                    f"data.sources: {place} {torn}, got {_shorten(text.decode())!r} ({error.msg}); mend or remove the line"
                ) from error
            yield place, row


def _json_rows(path: Path) -> Iterator[Any] | None:
    """The rows of a JSON array (or of an object's only array); None when the file has a JSON value a line."""
    with path.open(encoding="utf-8-sig") as file:
        if file.read(BLOCK_CHARS).lstrip().startswith("["):
            return _array_items(path)
        file.seek(0)
        lines = (line for line in file if line.strip())
        first, second = next(lines, ""), next(lines, None)
    if second is not None and _is_json(first):
        return None
    text = path.read_text(encoding="utf-8-sig")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise _not_json(path, error.lineno, error.msg) from error
    if isinstance(value, dict):
        arrays = [item for item in value.values() if isinstance(item, list)]
        if set(COLUMNS) & set(value) or len(arrays) != 1:
            return iter([value])
        value = arrays[0]
    if not isinstance(value, list):
        raise DataError(f"data.sources: holds no rows, got a {type(value).__name__} in {path}; give a list of rows")
    return iter(value)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


def _array_items(path: Path) -> Iterator[Any]:
    """The items of a JSON array, one after the other."""
    with path.open(encoding="utf-8-sig") as file:
        text = _Text(file, path)
        text.take("[")
        if text.next_character() != "]":
            yield text.value()
            while text.next_character() == ",":
                text.take(",")
                yield text.value()
        text.take("]")
        if text.next_character():
            raise text.fault("there is text behind the array")


class _Text:
    """A JSON text of which a few blocks are in memory."""

    def __init__(self, file: TextIO, path: Path) -> None:
        self.file, self.path = file, path
        self.decoder = json.JSONDecoder()
        self.text, self.at, self.lines = "", 0, 1
        self.ended = False

    def next_character(self) -> str:
        """The next one that is no space, which is left where it is; empty at the end."""
        while True:
            match = _SPACE.match(self.text, self.at)
            self.at = self.at if match is None else match.end()
            if self.at < len(self.text) or not self._more(BLOCK_CHARS):
                return self.text[self.at : self.at + 1]

    def take(self, character: str) -> None:
        """Goes past ``character``, which must come next."""
        if self.next_character() != character:
            raise self.fault(f"expecting {character!r}")
        self.at += 1

    def value(self) -> Any:
        """The next JSON value."""
        self.next_character()
        block = BLOCK_CHARS
        while True:
            try:
                value, end = self.decoder.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                # What a block's end has torn shows there, or at the start of a string that does not end.
                torn = error.pos > len(self.text) - 16 or error.msg.startswith("Unterminated string")
                if not (torn and self._more(block)):
                    raise self.fault(error.msg, error.pos) from error
            else:
                if end < len(self.text) or not self._more(block):  # a number could go on in the next block
                    self.at = end
                    return value
            block *= 2

    def fault(self, why: str, at: int | None = None) -> DataError:
        """The error that names the line of a character, by default of the next one."""
        line = self.lines + self.text.count("\n", 0, self.at if at is None else at)
        return _not_json(self.path, line, why)

    def _more(self, size: int) -> bool:
        """Reads on; False at the end of the file."""
        block = "" if self.ended else self.file.read(size)
        if not block:
            self.ended = True
            return False
        self.lines += self.text.count("\n", 0, self.at)
        self.text, self.at = self.text[self.at :] + block, 0
        return True


def _not_json(path: Path, line: int, why: str) -> DataError:
    return DataError(f"data.sources: line {line} of {path} is not JSON or is cut off, got {why}; mend the file")


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        file = pyarrow.parquet.ParquetFile(path)
        number = 0
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield f"row {number} of {path}", row
    except pyarrow.ArrowException as error:
        raise DataError(
            f"data.sources: not a whole Parquet file, got {path} ({first_line(error)}); replace the file"
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its kind where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _shorten(text: str, size: int = 60) -> str:
    text = text.strip()
    return text if len(text) <= size else f"{text[: size - 1]}…"
