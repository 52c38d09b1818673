"""Linear layers kept also in the layout of the CPU kernels, for forwards of few rows without gradients."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdraft.core.types import Unembedding

Product = Callable[[Tensor, Tensor, "Tensor | None", int], Tensor]
"""(x, weight, bias, rows) -> ``x W^T + b`` with a weight packed beforehand."""


@dataclass(frozen=True)
class _Kernel:
    """A way to multiply by a packed weight, and from how many to how many rows it beats the plain product."""

    pack: Callable[[Tensor], Product]
    min_rows: int
    max_rows: int


def _pack_mkl(weight: Tensor) -> Product:
    # Packing is for a guessed number of rows; the product is right for any, since it is told the true number.
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, 8)

    def product(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
        result: Tensor = torch.ops.mkl._mkl_linear(x, packed, weight, bias, rows)
        return result

    return product


def _pack_onednn(weight: Tensor) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)

    def product(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return result

    return product


def _kernels() -> dict[torch.dtype, _Kernel]:
    """The kernels that this build of torch and this processor have, by dtype.

    The row limits are measured ones. In bf16 the packed product wins at every size tried (1 to 64). In fp32 the plain one
    is MKL's. On an Intel processor up to three rows are bound by reading the weight however it lies and it is a little
    faster, from four rows on it falls behind MKL's packed product, above 16 it is as fast again. On an AMD one (Zen 4) it
    takes twice to four times as long as oneDNN's packed product for 1 to 64 rows, and 1.3 times for 256.
    """
    kernels = {}
    onednn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear"):
        if _is_amd() and onednn:
            kernels[torch.float32] = _Kernel(_pack_onednn, min_rows=1, max_rows=256)
        else:
            kernels[torch.float32] = _Kernel(_pack_mkl, min_rows=4, max_rows=16)
    if onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        kernels[torch.bfloat16] = _Kernel(_pack_onednn, min_rows=1, max_rows=64)
    return {dtype: kernel for dtype, kernel in kernels.items() if _is_right(dtype, kernel)}


@cache
def _is_amd() -> bool:
    """Whether the processor says so; what is measured anew at every start would choose now this kernel and now that."""
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return "AuthenticAMD" in platform.processor()


@torch.no_grad()
def _is_right(dtype: torch.dtype, kernel: _Kernel) -> bool:
    """Whether the packed product equals the plain one at every number of rows it is used for."""
    weight = torch.linspace(-1.0, 1.0, 48 * 32).sin().reshape(48, 32).to(dtype)
    x = torch.linspace(-3.0, 2.0, kernel.max_rows * 32).cos().reshape(-1, 32).to(dtype)
    wanted = F.linear(x, weight).float()
    try:
        product = kernel.pack(weight)
        found = [product(x[:n], weight, None, n).float() for n in range(kernel.min_rows, kernel.max_rows + 1)]
    except RuntimeError:
        return False
    tolerance = 16 * torch.finfo(dtype).eps * float(wanted.abs().max())
    return all(bool((rows - wanted[: len(rows)]).abs().max() <= tolerance) for rows in found)


class _PackedForward:
    """Stands in for the ``forward`` of one linear layer: the packed product where it helps, else the plain one.

    A weight that was written to since it was packed is multiplied plainly.
    """

    def __init__(self, linear: nn.Linear, kernel: _Kernel) -> None:
        self.linear = linear
        self.kernel = kernel
        self.dtype = linear.weight.dtype
        self.product = kernel.pack(linear.weight.detach())
        self.number = next(_NUMBERS)
        _ALL[self.number] = self
        # What is made in inference mode counts no changes.
        self.version = None if linear.weight.is_inference() else linear.weight._version

    @property
    def is_current(self) -> bool:
        """Whether what is packed is still the weight."""
        return self.version is None or self.linear.weight._version == self.version

    def __call__(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            # A compiler cannot look into a packed weight: for it this is one operation without an inside.
            compiled: Tensor = torch.ops.specdraft.packed_linear(x, self.number, self.linear.out_features)
            return compiled
        return self.multiply(x)

    def multiply(self, x: Tensor) -> Tensor:
        """``[..., in]`` -> ``[..., out]``."""
        weight, bias = self.linear.weight, self.linear.bias
        rows = x.numel() // weight.shape[1]
        if (
            self.kernel.min_rows <= rows <= self.kernel.max_rows
            and x.dtype is self.dtype
            and (self.version is None or weight._version == self.version)
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
        ):
            return self.product(x, weight, bias, rows)
        return F.linear(x, weight, bias)


_NUMBERS = itertools.count()
_ALL: WeakValueDictionary[int, _PackedForward] = WeakValueDictionary()
"""By number: what the operation of a compiled graph multiplies with."""


def _packed_linear(x: Tensor, number: int, size: int) -> Tensor:
    return _ALL[number].multiply(x)


def _like_packed_linear(x: Tensor, number: int, size: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], size)


torch.library.define("specdraft::packed_linear", "(Tensor x, int number, int size) -> Tensor")
torch.library.impl("specdraft::packed_linear", "CPU", _packed_linear)
torch.library.register_fake("specdraft::packed_linear", _like_packed_linear)


def pack_unembedding(unembed: Unembedding) -> Unembedding:
    """The same map with a packed weight where there is a kernel for it; a frozen weight on the CPU, which stays as it is."""
    kernel = _kernels().get(unembed.weight.dtype) if unembed.weight.device.type == "cpu" else None
    if kernel is None or unembed.product is not None:
        return unembed
    size, width = unembed.weight.shape
    linear = nn.Linear(width, size, bias=unembed.bias is not None, device="meta")
    linear.weight = nn.Parameter(unembed.weight.detach(), requires_grad=False)
    if unembed.bias is not None:
        linear.bias = nn.Parameter(unembed.bias.detach(), requires_grad=False)
    return replace(unembed, product=_PackedForward(linear, kernel))


class PackedLinears:
    """Handle of the packed layers of one model; ``with`` removes them at the end of the block."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        self._linears = linears

    def __len__(self) -> int:
        return len(self._linears)

    def __enter__(self) -> PackedLinears:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Back to the plain layers; the packed copies are freed."""
        for linear in self._linears:
            linear.__dict__.pop("forward", None)
        self._linears = []


def pack_linears(model: nn.Module, extra: Iterable[nn.Linear] = (), without: Iterable[nn.Linear] = ()) -> PackedLinears:
    """Packs every plain, frozen ``nn.Linear`` of ``model`` that lies on the CPU in a dtype with a kernel.

    Other modules (quantised, adapted, on a device, trainable, packed already) stay as they are. With gradients, under
    autocast, for more rows than the kernel is good for, and once its weight was changed in place, a packed layer computes
    what it did before; packing it again packs the new weight. A change through ``.data`` is not seen.

    Args:
        model: whose layers are packed.
        extra: layers outside ``model`` that are packed too.
        without: layers of ``model`` that are left alone.
    """
    kernels = _kernels()
    left_alone = set(without)
    packed = []
    for module in (*model.modules(), *extra):
        if type(module) is not nn.Linear or module in left_alone:
            continue
        forward = module.__dict__.get("forward")
        if forward is not None and (not isinstance(forward, _PackedForward) or forward.is_current):
            continue
        weight = module.weight
        if weight.device.type == "cpu" and not weight.requires_grad and weight.dtype in kernels:
            # An attribute of the instance goes before the method of its class.
            module.__dict__["forward"] = _PackedForward(module, kernels[weight.dtype])
            packed.append(module)
    return PackedLinears(packed)
