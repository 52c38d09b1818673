"""Hidden states in the precisions of a feature store: plain bf16 and fp32, or one byte a number with scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST = {"fp8": 448.0, "int8": 127.0}
"""What the largest number of a position becomes."""
ROWS_AT_ONCE = 32
"""Positions that are converted at a time: in float32 they stay in the processor's cache, in memory that is used again."""
SAMPLE = 2048
"""Positions that the scales of channels are taken from."""
_TINY = 1e-30


def channel_scale(parts: Sequence[Tensor], precision: str, hidden_size: int) -> Tensor | None:
    """``[S*H]`` float32, the scale of every channel of states ``[n, S*H]`` in parts; None in precisions without scales.

    A few channels of a transformer are tens of times as large as the others, and a few positions hundreds of times. So a
    channel's scale is its root mean square over positions, each brought to 1 before, so that none outweighs the others.
    It is taken from about ``SAMPLE`` positions at even distances: it only shares out the error between the channels, while
    the scale that every position has of its own makes its largest number fit.
    """
    if precision not in LARGEST:
        return None
    stride = max(1, sum(part.shape[0] for part in parts) // SAMPLE)
    x = torch.cat([part[::stride] for part in parts]).float().unflatten(-1, (-1, hidden_size))
    level = x.square().mean(-1, keepdim=True).sqrt().clamp(min=_TINY)
    channel = (x / level).square().mean(0).sqrt().flatten()
    return torch.where(channel > 0, channel, torch.ones_like(channel))


def encode(states: Tensor, precision: str, channel: Tensor | None, hidden_size: int) -> tuple[Tensor, Tensor | None]:
    """States ``[n, S*H]`` -> codes and scale, of which ``states = codes * scale * channel``.

    channel: see ``channel_scale``. codes: ``[n, S*H]`` in the dtype of the precision. scale: ``[n, S]`` float32, of every
    position and layer: what makes the largest number of its channels, each divided by the channel's scale, fit the codes;
    None without ``channel``.
    """
    if channel is None:
        return states.to(DTYPES[precision]), None
    inverse = channel.reciprocal()
    codes = torch.empty(states.shape, dtype=DTYPES[precision])
    scale = torch.empty(states.shape[0], channel.numel() // hidden_size)
    for start in range(0, states.shape[0], ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        x = states[part].to(torch.float32, copy=True).mul_(inverse)
        layers = x.unflatten(-1, (-1, hidden_size))
        own = layers.abs().amax(-1).div_(LARGEST[precision]).clamp_(min=_TINY)
        layers.mul_(own.reciprocal()[..., None])
        codes[part] = x.round_() if precision == "int8" else x
        scale[part] = own
    return codes, scale


def decode(codes: Tensor, scale: Tensor | None, channel: Tensor | None, out: Tensor) -> None:
    """The states of some positions, ``[n, S*H]``, written into ``out`` in its dtype; see ``encode``."""
    if scale is None or channel is None:
        out.copy_(codes)
        return
    layers = scale.shape[-1]
    is_fp8 = codes.dtype == torch.float8_e4m3fn
    if is_fp8:
        scale = scale * _FP8_FACTOR
    for start in range(0, codes.shape[0], ROWS_AT_ONCE):
        part = codes[start : start + ROWS_AT_ONCE]
        x = _from_fp8(part) if is_fp8 else part.to(torch.float32)
        x.unflatten(-1, (layers, -1)).mul_(scale[start : start + ROWS_AT_ONCE, :, None])
        out[start : start + ROWS_AT_ONCE].copy_(x.mul_(channel))


_FP8_FACTOR = 256.0


def _from_fp8(codes: Tensor) -> Tensor:
    """e4m3 -> float32 divided by ``_FP8_FACTOR``, several times as fast on a CPU as the conversion of torch.

    With the sign in the highest bit and the others one place below it, its bits are those of a float16 whose exponent's
    bias is larger by 8.
    """
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(8).bitwise_right_shift_(1)  # copies the sign
    return bits.bitwise_and_(-0x4001).view(torch.float16).to(torch.float32)
