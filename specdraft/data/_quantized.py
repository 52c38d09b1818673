"""Hidden states in the precisions of a feature store: plain bf16 and fp32, or one byte a number with scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST = {"fp8": 448.0, "int8": 127.0}
"""What the largest number of a position becomes."""
ROWS_AT_ONCE = 128
"""Positions that are converted at a time: in float32 they stay in the processor's cache, in memory that is used again."""
SAMPLE = 2048
"""Positions that the scales of channels are taken from."""
_TINY = 1e-30


@dataclass(frozen=True)
class Encoded:
    """States ``codes * scale * channel`` of some rows.

    codes: of every row ``[n_i, S*H]`` in the dtype of the precision, S layers side by side. scale: ``[n, S]`` float32, of
    every position and layer of all rows; channel: ``[S*H]`` float32. Both are None in precisions without scales.
    """

    codes: list[Tensor]
    scale: Tensor | None
    channel: Tensor | None


def encode(rows: Sequence[Tensor], precision: str, hidden_size: int) -> Encoded:
    """The states ``[n_i, S*H]`` of some rows in a precision; those that are in its dtype already are not copied.

    A few channels of a transformer are tens of times as large as the others, and a few positions hundreds of times. So every
    channel is first divided by a scale of its own, then every position of a layer by what makes its largest number fit.
    """
    dtype = DTYPES[precision]
    if precision not in LARGEST:
        return Encoded([states.to(dtype) for states in rows], None, None)
    counts, width = [len(states) for states in rows], rows[0].shape[1]
    channel = _channel_scale(rows, hidden_size)
    inverse = channel.reciprocal()
    codes = torch.empty(sum(counts), width, dtype=dtype)
    scale = torch.empty(sum(counts), width // hidden_size)
    # Memory that is used again and again: that of a thread is given back to the system, and asked for anew, with each use.
    space, sizes = torch.empty(2, ROWS_AT_ONCE, width), torch.empty(ROWS_AT_ONCE, width // hidden_size, 1)
    at = 0
    for part in (part for states in rows for part in _parts(states)):
        stop = at + len(part)
        x, spare, own = space[0, : len(part)], space[1, : len(part)], sizes[: len(part)]
        x.copy_(part).mul_(inverse)
        layers = x.unflatten(-1, (-1, hidden_size))
        torch.amax(torch.abs(x, out=spare).unflatten(-1, (-1, hidden_size)), -1, keepdim=True, out=own)
        own.div_(LARGEST[precision]).clamp_(min=_TINY)
        scale[at:stop] = own[..., 0]
        layers.mul_(own.reciprocal_())
        codes[at:stop] = x.round_() if precision == "int8" else x
        at = stop
    return Encoded(list(codes.split(counts)), scale, channel)


def _parts(states: Tensor) -> tuple[Tensor, ...]:
    """Nearly equal parts of at most ``ROWS_AT_ONCE`` positions: short ones take as long to begin as long ones."""
    return states.tensor_split(max(1, -(-len(states) // ROWS_AT_ONCE)))


def _channel_scale(rows: Sequence[Tensor], hidden_size: int) -> Tensor:
    """The root mean square of every channel over positions, each brought to 1 before, so that none outweighs the others.

    It is taken from about ``SAMPLE`` positions at even distances, since it only shares out the error between the channels.
    """
    stride = max(1, sum(len(states) for states in rows) // SAMPLE)
    x = torch.cat([states[::stride] for states in rows]).float().unflatten(-1, (-1, hidden_size))
    level = x.square().mean(-1, keepdim=True).sqrt().clamp(min=_TINY)
    channel = (x / level).square().mean(0).sqrt().flatten()
    return torch.where(channel > 0, channel, torch.ones_like(channel))


def decode(codes: Tensor, scale: Tensor | None, channel: Tensor | None, out: Tensor) -> None:
    """The states of some positions, ``[n, S*H]``, written into ``out`` in its dtype; see ``Encoded``."""
    if scale is None or channel is None:
        out.copy_(codes)
        return
    is_fp8 = codes.dtype == torch.float8_e4m3fn
    if is_fp8:
        scale = scale * _FP8_FACTOR
    shape = (min(ROWS_AT_ONCE, codes.shape[0]), codes.shape[1])
    space, bits = torch.empty(shape), torch.empty(shape, dtype=torch.int16)
    for part, own, into in zip(_parts(codes), _parts(scale), _parts(out), strict=True):
        x = space[: len(part)]
        x.copy_(_fp8_bits(part, bits[: len(part)]).view(torch.float16) if is_fp8 else part)
        x.unflatten(-1, (own.shape[-1], -1)).mul_(own[..., None])
        into.copy_(x.mul_(channel))


_FP8_FACTOR = 256.0


def _fp8_bits(codes: Tensor, out: Tensor) -> Tensor:
    """e4m3 -> the int16 bits of the float16 that is smaller by ``_FP8_FACTOR``; several times as fast as torch's conversion.

    With the sign in the highest bit and the others one place below it they are those of a float16, whose exponent's bias is
    larger by 8.
    """
    out.copy_(codes.view(torch.int8))
    return out.bitwise_left_shift_(8).bitwise_right_shift_(1).bitwise_and_(-0x4001)  # the right shift doubles the sign
