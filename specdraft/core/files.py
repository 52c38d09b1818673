"""Files that are whole or not there (written beside their place, forced to the disk, then renamed), and checksums."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of ``path`` once it is whole and on the disk; after an error nothing is left of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Returns when a file's bytes, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Writes ``value`` whole or not at all.

    Raises:
        OSError: it cannot be written; an older file is as it was.
        ValueError: it holds infinity or NaN, which JSON has not.
    """
    with replacing(path) as file:
        file.write(json.dumps(value, indent=2, allow_nan=False).encode() + b"\n")


def file_sha256(path: Path) -> str:
    """Checksum of a file's bytes, as hexadecimal text."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
