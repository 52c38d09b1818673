"""Which tokens a head can draft: chosen from what is supervised in the training data, with a report of what they cover."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from specdraft.core.types import TargetSpec
from specdraft.data.prepared import PreparedData, held_out_counts, token_counts
from specdraft.heads._config import HeadConfig
from specdraft.heads._vocab import choose_draft_vocab, coverage, size_for_coverage


@dataclass(frozen=True)
class Vocabulary:
    """The choice for one head.

    config: its settings with a size in the place of a coverage. token_ids: the target's ids, None = all of them. lines: what
    to tell the user.
    """

    config: HeadConfig
    token_ids: list[int] | None
    lines: list[str]


def choose_vocabulary(config: HeadConfig, data: PreparedData, spec: TargetSpec, always: Iterable[int]) -> Vocabulary:
    """The most frequent supervised tokens of ``data``, with those of ``always`` (markers of the template) and EOS.

    How much of text that was not counted they cover is measured on one row in ten, with a vocabulary of the same size
    chosen by the others.

    Raises:
        ConfigError: the size does not fit the target, or there is nothing to cover.
        DataError: the data was prepared for another target.
    """
    counts = token_counts(data, spec.vocab_size)
    if config.draft_vocab_size is None and config.draft_vocab_coverage is None:
        return Vocabulary(config, None, [])
    kept = {*spec.eos_token_ids, *always}
    if config.draft_vocab_coverage is not None:
        size = size_for_coverage(counts, config.draft_vocab_coverage, kept)
        config = replace(config, draft_vocab_size=size, draft_vocab_coverage=None)
    assert config.draft_vocab_size is not None
    chosen = choose_draft_vocab(counts, config.draft_vocab_size, kept)
    seen = int((counts > 0).sum())
    line = (
        f"draft vocabulary: {len(chosen):,} of {spec.vocab_size:,} tokens cover {coverage(counts, chosen):.2%} of the "
        f"supervised tokens ({seen:,} distinct)"
    )
    split = held_out_counts(data, spec.vocab_size)
    if split is not None:
        others, held = split
        share = coverage(held, choose_draft_vocab(others, config.draft_vocab_size, kept))
        line += f"; as many chosen by nine rows in ten cover {share:.2%} of the tenth"
    return Vocabulary(config, chosen, [line])
