"""What decoding returns, and how its steps are counted."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdraft.core.errors import DecodeError

PARTS = ("prefill", "target", "draft", "verify", "other")


@dataclass(frozen=True)
class StepOutput:
    """Tokens emitted by one step, in order; the first ``num_accepted`` of them were drafted."""

    tokens: list[int]
    num_accepted: int


@dataclass
class DecodeResult:
    """The text of one row and the counts behind every acceptance figure.

    A **step** is one target forward after the prefill. The prefill emits the first token and counts nowhere else.
    Tokens after the first EOS of a step are cut before anything is counted, and no step drafts more than
    ``max_new_tokens`` or the context leave room for, so every figure is about emitted tokens. A step that ends in a
    cut counts as a step: it emitted what it emitted.
    """

    tokens: list[int] = field(default_factory=list)
    """New tokens, the EOS included."""
    num_steps: int = 0
    """Target forwards after the prefill."""
    accepted_per_depth: list[int] = field(default_factory=list)
    """[k]: steps whose drafted token at depth k + 1 was accepted and emitted. An accepted EOS counts, what was accepted
    behind it does not."""
    reached_per_depth: list[int] = field(default_factory=list)
    """[k]: steps that accepted depth k and held a drafted token below that node, so that depth k + 1 was put to the
    test. Behind an accepted EOS nothing was tested. ``accepted / reached`` is the conditional acceptance rate."""
    drafted_tokens: int = 0
    """Drafted nodes that went through the target."""
    accepted_tokens: int = 0
    """Drafted tokens that were emitted: the sum of ``accepted_per_depth``."""
    finish_reason: str = ""
    """eos, stop (a stop text), length (max_new_tokens) or context (the target's last position); empty while decoding
    runs."""
    time_ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """Milliseconds of the host: prefill, target (forward and logits), draft, verify (acceptance, the copy to the host,
    the cache), other. Time between steps of a stream is not ours and not in it. An accelerator works behind the host,
    so there the wait for it shows in verify. Of the steps of a batch every row has an equal part."""
    first_margins: list[float] = field(default_factory=list)
    """With ``trace``: for every token of ``tokens``, how far the target's best logit was above the second best."""

    verifier: str | None = None
    """The rule by which drafts were accepted; None without a proposer."""
    lossless: bool = True
    """False: drafts were accepted by a rule that changes the distribution of the text (``typical``)."""

    @property
    def step_tokens(self) -> int:
        """Tokens emitted by steps: all but the prefill's."""
        return max(len(self.tokens) - 1, 0)

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per step, the target's own included; NaN without steps."""
        return self.step_tokens / self.num_steps if self.num_steps else float("nan")

    def count_step(self, num_drafted: int, num_accepted: int, num_reached: int) -> None:
        """Adds one step: nodes drafted, drafted tokens emitted, and depths that were put to the test."""
        self.num_steps += 1
        self.drafted_tokens += num_drafted
        self.accepted_tokens += num_accepted
        for counts, depth in ((self.accepted_per_depth, num_accepted), (self.reached_per_depth, num_reached)):
            counts.extend([0] * (max(num_reached, num_accepted) - len(counts)))
            for k in range(depth):
                counts[k] += 1


class BatchError(DecodeError):
    """Some rows of a batch could not be decoded to their end; the others were.

    errors: by the row's place among the prompts, what it failed of. results: of all rows; those that failed hold the
    tokens emitted until then and no ``finish_reason``.
    """

    def __init__(self, errors: dict[int, DecodeError], results: list[DecodeResult]) -> None:
        first = min(errors)
        others = f" ({len(errors)} of {len(results)} rows failed)" if len(errors) > 1 else ""
        super().__init__(f"row {first} of the batch{others}: {errors[first]}")
        self.errors = errors
        self.results = results
