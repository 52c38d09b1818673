"""Rates from a short run of the training loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specdraft.core.errors import SpecDraftError
from specdraft.plan.times import Measured

WARM_UP = 2
"""First steps, which make buffers and choose kernels, and are left out."""


@dataclass
class Recorder:
    """A tracker that keeps what every step logs. steps: (tokens, seconds, share of the target's forward)."""

    steps: list[tuple[float, float, float]] = field(default_factory=list)
    _tokens: float = 0.0

    def start(self, step: int, config: Mapping[str, Any]) -> None:
        """See Tracker."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See Tracker."""
        if "tokens_per_s" not in values:
            return
        tokens = values["tokens"] - self._tokens
        self._tokens = values["tokens"]
        self.steps.append((tokens, tokens / values["tokens_per_s"], values["time/target"]))

    def close(self) -> None:
        """See Tracker."""


def rates(
    recorder: Recorder,
    answer_s: float,
    decode_s: float | None,
    peak_bytes: float,
    answers_factor: float | None = None,
) -> Measured:
    """Seconds for each token of training, over the steps after the first few.

    Raises:
        SpecDraftError: fewer steps were recorded than are left out.
    """
    steps = recorder.steps[WARM_UP:]
    tokens = sum(step[0] for step in steps)
    if not tokens:
        raise SpecDraftError(f"steps: too few to measure by, got {len(recorder.steps)}; use e.g. 20")
    target = sum(seconds * share for _, seconds, share in steps)
    rest = sum(seconds * (1.0 - share) for _, seconds, share in steps)
    return Measured(
        answer_s=answer_s,
        target_s=target / tokens,
        draft_s=rest / tokens,
        decode_s=decode_s,
        peak_bytes=peak_bytes,
        steps=len(steps),
        answers_factor=answers_factor,
    )
