"""How deep to draft: as deep as pays by what was accepted lately and by what a drafted token costs."""

from __future__ import annotations

WINDOW = 24.0
"""Drafted tokens that the estimate remembers, about."""
PRIOR = 4.0
"""Drafted tokens that a new row is taken to have seen, accepted as ``FIRST_RATE`` says."""
FIRST_RATE = 0.8
PATIENCE = 16
"""Steps without a draft after which one token is drafted again, to see whether it pays now."""
CHECK_COST = 0.02
"""Of one more token in the target's forward, in target forwards."""


class DraftPace:
    """The depth of the next draft of one row. It depends on what the row accepted alone, so that drawn text stays exact.

    With acceptance rate a and a drafted token that costs c target forwards, a draft of depth d gives
    ``(1 + a + ... + a^d) / (1 + c d)`` tokens in the time of a plain step (Leviathan et al. 2023, theorem 3.8); the depth
    with the largest is taken, 0 where none gives more than one.

    Args:
        cost: of a drafted token, in target forwards.
        max_depth: no draft is deeper.
    """

    def __init__(self, cost: float, max_depth: int) -> None:
        self.cost = cost + CHECK_COST
        self.max_depth = max_depth
        self._tested, self._accepted = PRIOR, PRIOR * FIRST_RATE
        self._idle = 0

    @property
    def rate(self) -> float:
        """Estimated probability that a drafted token is accepted once those before it are."""
        return self._accepted / self._tested

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Takes in the outcome of a draft of depth ``num_drafted``; one of depth 0 is none."""
        tested = min(num_drafted, num_accepted + 1)
        fading = (1.0 - 1.0 / WINDOW) ** tested
        self._tested = self._tested * fading + tested
        self._accepted = self._accepted * fading + num_accepted

    def next_depth(self) -> int:
        """The depth to draft; to be called once a step."""
        best, depth, gain, tokens, power = 1.0, 0, 1.0, 1.0, 1.0
        for d in range(1, self.max_depth + 1):
            power *= self.rate
            tokens += power
            gain = tokens / (1.0 + self.cost * d)
            if gain > best:
                best, depth = gain, d
        if depth:
            self._idle = 0
            return depth
        self._idle += 1
        if self._idle <= PATIENCE:
            return 0
        self._idle = 0
        return min(1, self.max_depth)
