"""The exponential moving average of a head's weights, which evaluation and the saved heads use in place of the last ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from specdraft.heads.base import DraftHead


class WeightAverage:
    """``average = d * average + (1 - d) * weights`` after every update, in the weights' dtype.

    d is the smaller of ``decay`` and (1 + n) / (10 + n) at update n, so that the first weights do not weigh for long.
    tensors: parameter name -> average; what is no parameter is not averaged.
    """

    def __init__(self, head: DraftHead, decay: float) -> None:
        self.decay = decay
        self.tensors = {name: parameter.detach().clone() for name, parameter in head.named_parameters()}

    @torch.no_grad()
    def update(self, head: DraftHead, num_updates: int) -> None:
        """Takes in the weights after update ``num_updates`` (from 1)."""
        decay = min(self.decay, (1 + num_updates) / (10 + num_updates))
        for name, parameter in head.named_parameters():
            self.tensors[name].lerp_(parameter, 1 - decay)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes ``tensors``, which must be of the same names and shapes, as the average."""
        for name, value in self.tensors.items():
            value.copy_(tensors[name])

    @torch.no_grad()
    def put(self, head: DraftHead) -> None:
        """Overwrites the head's weights with the average."""
        for name, parameter in head.named_parameters():
            parameter.copy_(self.tensors[name])

    @contextmanager
    def inside(self, head: DraftHead) -> Iterator[None]:
        """The head has the averaged weights inside, and its own again afterwards."""
        own = {name: parameter.detach().clone() for name, parameter in head.named_parameters()}
        self.put(head)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in head.named_parameters():
                    parameter.copy_(own[name])
