"""torch.compile for the head's part of a training step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from specdraft.core.errors import ConfigError
from specdraft.heads.base import DraftHead

BACKEND = "inductor"


def check_compiler(device: torch.device) -> None:
    """Compiles something small; no model is needed for that.

    Raises:
        ConfigError: torch.compile does not work here, mostly for want of a compiler.
    """
    try:
        torch.compile(torch.sin, backend=BACKEND)(torch.zeros(8, device=device))
    except (RuntimeError, OSError, ImportError) as error:  # what backends raise is a RuntimeError
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"trainer.compile: torch.compile does not work here, got {reason}; install a C++ compiler (and Triton on "
            "CUDA) or use false"
        ) from error


@contextmanager
def compiled(head: DraftHead, wanted: bool) -> Iterator[None]:
    """Inside, ``forward`` of the head is compiled if ``wanted``, for any number of rows, tokens and anchors.

    The head keeps its class and its names, so checkpoints and saved heads are the same; decoding is left as it is.
    """
    if not wanted:
        yield
        return
    head.compile(dynamic=True, backend=BACKEND)
    try:
        with warnings.catch_warnings():
            # The compiler looks at tensors that come out of one graph and go into the next.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf Tensor")
            yield
    finally:
        head._compiled_call_impl = None
