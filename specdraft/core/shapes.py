"""Sizes that products are padded to, so that few shapes occur: on a CPU every new shape costs a kernel of its own."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 16
"""No padded size is smaller than this, nor are two less than this apart."""


def padded_size(size: int) -> int:
    """The least multiple of ``LEAST``, and of an eighth of the power of two below, that ``size`` fits in; 0 stays 0.

    These are eight sizes for every doubling. oneDNN, which multiplies in half precision on a CPU, compiles a kernel for every
    shape it meets, which takes longer than the product itself: a few milliseconds to tens of them.
    """
    step = max(LEAST, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


def padded_rows(rows: Tensor, most: int) -> Tensor:
    """``[n, ...]`` -> ``[padded_size(n), ...]``, zeros behind the rows; on a device other than a CPU the rows as they are.

    most: there are no more rows than that after padding.
    """
    missing = min(missing_rows(rows.shape[0], rows.device), max(0, most - rows.shape[0]))
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def missing_rows(count: int, device: torch.device) -> int:
    """Rows that ``count`` lacks to a padded size; none on a device other than a CPU, where new shapes cost nothing."""
    return padded_size(count) - count if device.type == "cpu" else 0
