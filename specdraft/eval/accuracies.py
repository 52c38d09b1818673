"""At which rank a head has the target's next tokens: the measurement behind every shape of draft, and its replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specdraft.core.tree import DraftTree
from specdraft.core.types import TokenBatch
from specdraft.heads.base import DraftHead
from specdraft.losses.alignment import align, build_draft_batch
from specdraft.targets.hf import HFTarget

BEYOND = -1
"""Rank of a token behind the end of the text: there is nothing to accept."""
Ranks = tuple[int, ...]


@dataclass(frozen=True)
class RankedText:
    """A greedy answer of L tokens and what a head drafts at each of its positions.

    ranks[i][k]: the rank that the head gives answer token i + 1 + k when tokens 0 .. i are emitted, the i-th being the
    root, and the tokens between are as they are; BEYOND past the end. There are L - 1 positions.
    """

    prompt_length: int
    ranks: list[Ranks]


@torch.inference_mode()
def rank_text(target: HFTarget, head: DraftHead, prompt: list[int], answer: list[int], limit: int) -> RankedText:
    """The ranks of a text, from one forward of target and head over all of it.

    What is drafted at a position depends on the text before it alone, so this is what decoding would see at every
    position, steps begin there or not.

    Args:
        target: the model that wrote ``answer``.
        head: in eval mode, on the target's device.
        prompt: at least one token.
        answer: the target's greedy tokens, the first one included.
        limit: ranks from here on are given as ``limit``; a token outside the draft vocabulary has this rank, too.
    """
    if len(answer) < 2:
        return RankedText(len(prompt), [])
    ids = torch.tensor([prompt + answer], device=target.device)
    columns = torch.arange(ids.shape[1], device=target.device)[None]
    present = torch.ones_like(ids, dtype=torch.bool)
    tokens = TokenBatch(ids, present, columns > len(prompt), columns, columns * 0, columns[:, 0])
    batch = build_draft_batch(tokens, target.capture(tokens, head.features()))
    label_map = head.label_map()
    table = []
    for step in head.draft_steps(batch, target.embed, target.unembedding.to(head.dtype)):
        aligned = align(batch, step)
        labels = aligned.labels if label_map is None else label_map[aligned.labels]
        logits = step.unembed(step.hidden).float()
        own = logits.gather(1, labels.clamp(min=0)[:, None])
        rank = (logits > own).sum(dim=1).clamp(max=limit)
        rank = torch.where(labels < 0, limit, rank)
        table.append(torch.where(aligned.valid, rank, BEYOND))
    rows = torch.stack(table, dim=1).tolist()
    return RankedText(len(prompt), [tuple(row) for row in rows])


def accuracies(texts: Sequence[RankedText], num_ranks: int) -> list[list[float]]:
    """``[k][r]``: share of the positions whose token at depth k + 1 has rank r, of those that were accepted before it.

    Accepted before it means: every token above has one of the first ``num_ranks`` ranks, so that a tree can hold it.
    """
    rows = [row for text in texts for row in text.ranks]
    table = []
    for k in range(len(rows[0]) if rows else 0):
        reached = [row[k] for row in rows if row[k] != BEYOND and all(0 <= rank < num_ranks for rank in row[:k])]
        table.append([reached.count(rank) / max(len(reached), 1) for rank in range(num_ranks)])
    return table


@dataclass(frozen=True)
class Replay:
    """What decoding the texts with a tree would have counted: target forwards, and tokens they emitted."""

    num_steps: int
    num_tokens: int

    @property
    def acceptance_length(self) -> float:
        """Tokens per target forward, the target's own included; 1 without steps."""
        return self.num_tokens / self.num_steps if self.num_steps else 1.0


def count_steps(texts: Sequence[tuple[int, Callable[[int], int]]]) -> Replay:
    """Decodes texts again on paper: of each its positions, and how many tokens a step at a position accepts."""
    num_steps = num_tokens = 0
    for last, accepted in texts:
        position = 0
        while position < last:
            emitted = min(accepted(position) + 1, last - position)
            num_steps, num_tokens, position = num_steps + 1, num_tokens + emitted, position + emitted
    return Replay(num_steps, num_tokens)


def replay(texts: Sequence[RankedText], tree: DraftTree) -> Replay:
    """Decodes the texts again on paper: each step accepts the longest path of ranks that the tree holds."""
    known = {tuple(path) for path in tree.paths()}

    def accepted(table: list[Ranks]) -> Callable[[int], int]:
        def count(position: int) -> int:
            ranks, number = table[position], 0
            while number < len(ranks) and ranks[: number + 1] in known:
                number += 1
            return number

        return count

    return count_steps([(len(text.ranks), accepted(text.ranks)) for text in texts])
