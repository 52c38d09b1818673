"""Conversations that are nearly the same, by MinHash and locality-sensitive hashing (Broder 1997), on disk where it counts."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdraft.core.errors import ConfigError
from specdraft.data._config import DataConfig
from specdraft.data.overlap import split_words

NUM_HASHES = 128
"""Of a signature; the similarity of two texts is the share of equal ones, with a standard error of at most 0.045."""
PIECE_WORDS = 5
"""Words of the overlapping pieces whose sets are compared."""
MOST_KEPT = 32
"""Texts of a bucket that a further one is compared with."""


def check_datasketch(config: DataConfig) -> None:
    """Raises ConfigError where near-duplicates are to be removed and datasketch is not installed; nothing is loaded."""
    if config.near_duplicates is not None and importlib.util.find_spec("datasketch") is None:
        raise ConfigError(
            f"data.near_duplicates: needs the package datasketch, got {config.near_duplicates} without it; pip install "
            "'specdraft[dedup]', or use null"
        )


def signature(texts: Sequence[str]) -> NDArray[np.uint32]:
    """``[NUM_HASHES]``: the MinHash of a conversation's texts, from the set of all their pieces."""
    pieces = set()
    for text in texts:
        words = split_words(text)
        for start in range(max(1, len(words) - PIECE_WORDS + 1)):
            pieces.add(" ".join(words[start : start + PIECE_WORDS]).encode())
    empty = _empty()
    found = empty.copy()
    found.update_batch(pieces)
    values: NDArray[np.uint32] = found.hashvalues.astype(np.uint32)
    return values


@cache
def _empty() -> Any:
    """Its permutations are drawn once; copies share them."""
    from datasketch import MinHash

    return MinHash(num_perm=NUM_HASHES, seed=1)


def bands(threshold: float) -> list[slice]:
    """Parts of a signature: texts that agree in one of them are compared. Chosen for few misses at ``threshold``."""
    from datasketch import MinHashLSH

    lsh = MinHashLSH(threshold=threshold, num_perm=NUM_HASHES, weights=(0.2, 0.8))
    return [slice(i * lsh.r, (i + 1) * lsh.r) for i in range(lsh.b)]


def find_duplicates(signatures: NDArray[np.uint32], threshold: float) -> NDArray[np.bool_]:
    """``[R]``: True = so like an earlier one that stays that it may go. signatures: ``[R, NUM_HASHES]``, e.g. a memory map.

    In memory are 16 bytes a row: one band is looked at after the other.
    """
    gone = np.zeros(len(signatures), dtype=np.bool_)
    for band in bands(threshold):
        keys = _hashes(signatures, band)
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
        ends = np.r_[starts[1:], len(order)]
        for start, end in zip(starts[ends - starts > 1], ends[ends - starts > 1], strict=True):
            _thin(signatures, order[start:end], threshold, gone)
    return gone


def _thin(signatures: NDArray[np.uint32], rows: NDArray[np.int64], threshold: float, gone: NDArray[np.bool_]) -> None:
    """Marks those of a bucket, in ascending order, that are like an earlier one of it."""
    kept: list[NDArray[np.uint32]] = []
    for row in rows[~gone[rows]].tolist():
        own = signatures[row]
        if kept and (np.stack(kept) == own).mean(1).max() >= threshold:
            gone[row] = True
        elif len(kept) < MOST_KEPT:
            kept.append(own)


def _hashes(signatures: NDArray[np.uint32], band: slice, block: int = 65536) -> NDArray[np.uint64]:
    """``[R]``: one number for each row's part of a signature."""
    keys = np.empty(len(signatures), dtype=np.uint64)
    # An odd multiplier keeps differing numbers apart; what collides all the same is compared as a whole afterwards.
    factor = np.uint64(0x9E3779B97F4A7C15)
    for start in range(0, len(signatures), block):
        own = np.zeros(len(signatures[start : start + block]), dtype=np.uint64)
        for column in signatures[start : start + block, band].T:
            own = (own ^ column.astype(np.uint64)) * factor
            own ^= own >> np.uint64(29)
        keys[start : start + block] = own
    return keys
