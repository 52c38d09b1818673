"""Hidden states in the precisions of a feature store: plain bf16 and fp32, or one byte a number with scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST = {"fp8": 448.0, "int8": 127.0}
"""What the largest number of a position becomes."""
ROWS_AT_ONCE = 32
_TINY = 1e-30


@dataclass(frozen=True)
class Encoded:
    """``states = codes * scale * channel``.

    codes: ``[n, S*H]`` in the dtype of the precision, S layers side by side. scale: ``[n, S]`` float32, of every position
    and layer; channel: ``[S*H]`` float32. Both are None in precisions without scales.
    """

    codes: Tensor
    scale: Tensor | None
    channel: Tensor | None


def encode(states: Tensor, precision: str, hidden_size: int) -> Encoded:
    """``[n, S*H]`` -> codes and scales.

    A few channels of a transformer are tens of times as large as the others, and a few positions hundreds of times. So every
    channel is first divided by its root mean square over the positions (each brought to 1 before, so that none outweighs
    the others), then every position by its largest number.
    """
    if precision not in LARGEST:
        return Encoded(states.to(DTYPES[precision]), None, None)
    x = states.float().unflatten(-1, (-1, hidden_size))
    level = x.square().mean(-1, keepdim=True).sqrt().clamp(min=_TINY)
    channel = (x / level).square().mean(0).sqrt()
    channel = torch.where(channel > 0, channel, torch.ones_like(channel))
    x = x / channel
    scale = (x.abs().amax(-1, keepdim=True) / LARGEST[precision]).clamp(min=_TINY)
    x = x / scale
    codes = x.round_().to(torch.int8) if precision == "int8" else x.to(DTYPES[precision])
    return Encoded(codes.flatten(-2), scale.squeeze(-1), channel.flatten())


def decode(codes: Tensor, scale: Tensor | None, channel: Tensor | None, out: Tensor) -> None:
    """The states of some positions, ``[n, S*H]``, written into ``out`` in its dtype; see ``Encoded``."""
    if scale is None or channel is None:
        out.copy_(codes)
        return
    layers = scale.shape[-1]
    # In parts that stay in the processor's cache, and in memory that is used again and again.
    for start in range(0, codes.shape[0], ROWS_AT_ONCE):
        part = codes[start : start + ROWS_AT_ONCE]
        x = _from_fp8(part) if part.dtype == torch.float8_e4m3fn else part.to(torch.float32)
        x.unflatten(-1, (layers, -1)).mul_(scale[start : start + ROWS_AT_ONCE, :, None])
        out[start : start + ROWS_AT_ONCE].copy_(x.mul_(channel))


def _from_fp8(codes: Tensor) -> Tensor:
    """e4m3 -> float32, several times as fast on a CPU as the conversion of torch.

    Its bits are those of a float16, but for a factor of 2 ** 8 between the biases of the exponents.
    """
    bits = codes.view(torch.int8).to(torch.int16)  # the sign in the highest bit
    return ((bits & 0x7F).bitwise_left_shift_(7) | (bits & -0x8000)).view(torch.float16).to(torch.float32).mul_(256.0)
