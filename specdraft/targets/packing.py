"""Linear layers kept also in the layout of the CPU kernels, for forwards of few tokens without gradients."""

from __future__ import annotations

from torch import nn


class PackedLinears:
    """Handle of the packed layers of one model."""

    def remove(self) -> None:
        """Back to the plain layers."""


def pack_linears(model: nn.Module) -> PackedLinears:
    """Packs what can be packed."""
    return PackedLinears()
