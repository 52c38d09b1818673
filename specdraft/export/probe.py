"""What an export is held against: the head's own drafts after 32 positions, and how engines' readings are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdraft.core.errors import ExportError
from specdraft.core.tree import DraftTree
from specdraft.core.types import DraftContext, Features, Unembedding
from specdraft.heads.base import DraftHead
from specdraft.targets.weights import TargetFiles

POSITIONS = 32
TOLERANCE = 1e-3
"""Largest difference of two logits that count as equal, as a share of the largest logit; float32."""
ROUNDED = {torch.float32: TOLERANCE, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""The same where the format rounds products of weights to the head's dtype."""


@dataclass(frozen=True)
class World:
    """Random features of a text of real tokens, as a target would hand them over, and the target's two matrices.

    next_tokens: ``[P]`` int64, the token after every position. hidden: ``[L + 1, P, H]`` float32, by index into
    hidden_states; the last is after the final norm. embedding, lm_head: as stored in the target's files.
    """

    next_tokens: Tensor
    hidden: Tensor
    embedding: Tensor
    embedding_scale: float
    lm_head: Tensor

    def embed(self, ids: Tensor) -> Tensor:
        """``[...]`` -> ``[..., H]`` float32, as the target embeds."""
        return self.embedding[ids].float() * self.embedding_scale


@dataclass(frozen=True)
class Drafts:
    """What the head drafts after every position. tokens: ``[P, K]`` target ids; logits: ``[P, K, D]``; ids: ``[D]``."""

    tokens: Tensor
    logits: Tensor
    ids: Tensor


@dataclass(frozen=True)
class Reading:
    """How one engine, or all that agree, understand the files of an export.

    logits: the world and the head's tokens ``[P, K]`` -> ``[P, K, D]`` float32 after the same prefixes, and the target
    ids ``[D]`` that the columns stand for.
    """

    engine: str
    logits: Callable[[World, Tensor], tuple[Tensor, Tensor]]


def make_world(target: TargetFiles, num_layers: int, vocab_size: int) -> World:
    """The same world whenever the target is the same."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(min(vocab_size, target.embedding.shape[0]), (POSITIONS,), generator=generator)
    hidden = torch.randn(num_layers + 1, POSITIONS, target.lm_head.shape[1], generator=generator)
    return World(tokens, hidden, target.embedding, target.embedding_scale, target.lm_head)


def has_own_lm_head(head: DraftHead) -> bool:
    """Whether the head never reads the target's lm_head, which is large."""
    return "lm_head.weight" in head.vocabulary_parameters()


@torch.no_grad()
def draft(head: DraftHead, world: World) -> Drafts:
    """The chains that the head drafts, one position of the text committed at a time. ``head``: float32, in eval mode."""
    unembed = Unembedding(world.lm_head if has_own_lm_head(head) else world.lm_head.float())
    depth = head.config.num_draft_tokens
    tree = DraftTree.chain(depth)
    state = head.init_state(POSITIONS + depth + 1, tree, unembed)
    layers = head.features().aux_layers
    seen: list[Tensor] = []

    def record(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        seen.append(logits)
        return logits.topk(count, dim=-1).indices, logits.softmax(-1)

    tokens, all_logits = [], []
    for position in range(POSITIONS):
        seen.clear()
        aux = torch.cat([world.hidden[layer, position] for layer in layers]) if layers else None
        features = Features(world.hidden[-1, position][None, None], None if aux is None else aux[None, None])
        context = DraftContext(world.next_tokens[position][None, None], features, position, sampler=record)
        tokens.append(head.propose(state, context, world.embed, tree).tokens[0])
        all_logits.append(torch.cat(seen))
    ids = torch.arange(head.spec.vocab_size) if head.vocab is None else head.vocab.draft_token_ids()
    return Drafts(torch.stack(tokens), torch.stack(all_logits), ids)


@torch.no_grad()
def compare(drafts: Drafts, reading: Reading, world: World, tolerance: float) -> None:
    """Holds one reading against the head's drafts.

    Raises:
        ExportError: another draft vocabulary, another token, or other logits.
    """
    logits, ids = reading.logits(world, drafts.tokens)
    order = ids.argsort()
    if not torch.equal(ids[order], drafts.ids):
        raise _differs(reading, f"drafts from other tokens ({ids.numel()}, the head from {drafts.ids.numel()})")
    logits = logits[..., order]
    scale = drafts.logits.abs().amax().clamp(min=1e-6)
    chosen = drafts.ids[logits.argmax(-1)]
    lead = logits.amax(-1) - logits.gather(-1, torch.searchsorted(drafts.ids, drafts.tokens)[..., None])[..., 0]
    # Two orders of the same sums may decide a tie in two ways.
    wrong = (chosen != drafts.tokens) & ~(lead <= tolerance * scale)
    if bool(wrong.any()):
        position, depth = (int(i) for i in wrong.nonzero()[0])
        raise _differs(
            reading,
            f"drafts other tokens, {int(wrong.sum())} of {wrong.numel()} (first: position {position}, depth {depth + 1}, "
            f"{int(chosen[position, depth])} in place of {int(drafts.tokens[position, depth])})",
        )
    difference = float((logits - drafts.logits).abs().amax() / scale)
    if not difference <= tolerance:
        raise _differs(reading, f"computes other logits (off by {difference:.2g} of the largest)")


def _differs(reading: Reading, how: str) -> ExportError:
    return ExportError(
        f"export.format: as {reading.engine} reads it, the export {how}; nothing was written, report this"
    )
