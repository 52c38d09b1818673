"""The reduced draft vocabulary: which target tokens a head can draft, the maps both ways, and its coverage."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from specdraft.core.errors import CheckpointError, ConfigError


class DraftVocab(nn.Module):
    """D of the V target tokens, in ascending order of their target ids.

    Buffers, saved with the head: ``d2t`` ``[D]`` int64 **offsets** (target id = draft id + d2t[draft id]) and ``t2d``
    ``[V]`` bool **mask**, True where the target token can be drafted. Source: EAGLE-3's checkpoints and every engine.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, vocab_size: int, draft_vocab_size: int) -> None:
        super().__init__()
        if draft_vocab_size > vocab_size:
            raise ConfigError(
                f"head.draft_vocab_size: exceeds the target's vocabulary of {vocab_size}, got {draft_vocab_size}; "
                "use null for all tokens"
            )
        # Nothing is chosen yet: an all-False mask, so that a head decoded without a map fails loudly (``check``).
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(vocab_size, dtype=torch.bool))

    def set_tokens(self, token_ids: Iterable[int]) -> None:
        """Chooses the tokens. ``token_ids``: exactly D distinct target ids, any order.

        Raises:
            ConfigError: another number of tokens, or an id outside the target's vocabulary.
        """
        ids = torch.tensor(sorted(set(token_ids)), dtype=torch.int64)
        size = self.d2t.numel()
        if ids.numel() != size:
            raise ConfigError(
                f"head.draft_vocab_size: {size} distinct tokens are needed, got {ids.numel()}; choose as many"
            )
        if ids[0] < 0 or ids[-1] >= self.t2d.numel():
            raise ConfigError(
                f"head.draft_vocab_size: a token is outside the target's {self.t2d.numel()}, got {ids[-1]}"
            )
        self.d2t.copy_(ids - torch.arange(size))
        self.t2d.zero_()
        self.t2d[ids.to(self.t2d.device)] = True

    def check(self) -> None:
        """Raises CheckpointError when the two buffers contradict each other or no tokens were chosen."""
        ids = self.draft_token_ids()
        if not torch.equal(ids, self.t2d.nonzero().flatten()):
            raise CheckpointError(
                f"head: d2t and t2d do not describe the same {ids.numel()} tokens, got {int(self.t2d.sum())} in t2d; "
                "the checkpoint lacks its draft vocabulary, train or import it again"
            )

    def draft_token_ids(self) -> Tensor:
        """``[D]`` int64: the target id of every draft id, ascending."""
        return torch.arange(self.d2t.numel(), device=self.d2t.device) + self.d2t

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft ids -> target ids, any shape, int64."""
        return draft_ids + self.d2t[draft_ids]

    def to_draft(self, target_ids: Tensor) -> Tensor:
        """Target ids -> draft ids, any shape, int64; -1 where the token cannot be drafted."""
        position = torch.cumsum(self.t2d, 0) - 1
        return torch.where(self.t2d[target_ids], position[target_ids], -1)


def choose_draft_vocab(counts: Tensor, size: int, always: Iterable[int] = ()) -> list[int]:
    """The ``size`` most frequent tokens. counts: ``[V]`` int64, occurrences in the supervised part of the data.

    Tokens of ``always`` (EOS, the template's markers) are in whatever their count; ties go to the lower id, so fewer
    seen tokens than ``size`` fill up with unseen ones.

    Raises:
        ConfigError: ``always`` alone exceeds ``size``, or ``size`` exceeds V.
    """
    chosen = sorted(set(always))
    if len(chosen) > size or size > counts.numel():
        raise ConfigError(
            f"head.draft_vocab_size: must lie between the {len(chosen)} tokens that are always kept and the target's "
            f"{counts.numel()}, got {size}; choose a size between them"
        )
    counts = counts.clone()
    counts[torch.tensor(chosen, dtype=torch.int64)] = -1
    order = torch.sort(counts, descending=True, stable=True).indices
    return sorted([*chosen, *order[: size - len(chosen)].tolist()])


def size_for_coverage(counts: Tensor, share: float, always: Iterable[int] = (), multiple: int = 64) -> int:
    """The smallest draft vocabulary that covers ``share`` of ``counts`` with the tokens of ``always`` in it.

    Rounded up to a ``multiple``, which suits matrix products, and at most V.

    Raises:
        ConfigError: nothing was counted.
    """
    total = int(counts.sum())
    if not total:
        raise ConfigError(
            f"head.draft_vocab_coverage: no supervised tokens to cover, got {share}; set head.draft_vocab_size instead"
        )
    kept = torch.tensor(sorted(set(always)), dtype=torch.int64)
    rest = counts.clone()
    rest[kept] = 0
    covered = rest.sort(descending=True).values.cumsum(0) + counts[kept].sum()
    # Counts are whole, so the share is met to the token; a share of 1 takes every token that was seen.
    needed = -(-share * total // 1)
    more = 0 if int(counts[kept].sum()) >= needed else int((covered < needed).sum()) + 1
    size = kept.numel() + more
    return min(-(-size // multiple) * multiple, counts.numel())


def coverage(counts: Tensor, token_ids: Iterable[int]) -> float:
    """Share of the occurrences ``counts`` (``[V]``) that fall on ``token_ids``; 0.0 when nothing was counted."""
    total = int(counts.sum())
    kept = int(counts[torch.tensor(sorted(set(token_ids)), dtype=torch.int64)].sum())
    return kept / total if total else 0.0
