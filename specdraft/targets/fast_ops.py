"""What the layers of ``fast_path`` share: norm, rotation and mask in as few kernels as torch offers for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Rotation = tuple[Tensor, Tensor]
"""``[B, n, 1, d]`` each: cosines, and sines with the sign that half a turn of x lacks."""


def as_rotation(cos: Tensor, sin: Tensor) -> Rotation:
    """``[B, n, d]`` each, as rotary embeddings give them -> as the layers here want them."""
    half = sin.shape[-1] // 2
    signed = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
    return cos.unsqueeze(2), signed.unsqueeze(2)


def as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask, bool (True = may attend) or to be added to the scores -> to be added."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))


class RMSNorm:
    """A root-mean-square norm in as few kernels as torch offers for it on a CPU; sums and roots are in fp32.

    Raises:
        AttributeError: the module is another kind of norm.
    """

    def __init__(self, norm: nn.Module) -> None:
        module: Any = norm
        self.weight = norm.get_parameter("weight").detach()
        self.eps = float(module.variance_epsilon)
        self._epsilon = torch.tensor(self.eps, device=self.weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., H]`` -> ``[..., H]`` in the dtype of x."""
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scaled = x * torch.addcmul(self._epsilon, size, size, value=1.0 / x.shape[-1]).rsqrt_()
        return scaled.to(x.dtype) * self.weight
