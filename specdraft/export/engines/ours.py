"""What our own decoder drafts and accepts for a few prompts, in the form in which engines report theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdraft.core.tree import Proposal
from specdraft.core.types import DraftContext
from specdraft.data.chat import ChatRenderer
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.proposers import HeadProposer
from specdraft.heads.base import DraftHead
from specdraft.targets.hf import HFTarget

TEXTS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper and his dog.",
    "Explain how to sort a list of numbers in Python.",
)


@dataclass(frozen=True)
class Row:
    """One prompt and our greedy text for it.

    tokens: at least two. proposals: the draft of every step, all of full depth but near the end. drafted, accepted: as the
    decoder counts them. steps: forwards of the target after that of the prompt.
    """

    prompt: list[int]
    tokens: list[int]
    proposals: list[list[int]]
    drafted: int
    accepted: int
    steps: int


class _Recorder(HeadProposer):
    """A head that remembers what it proposed."""

    seen: list[list[int]]

    def propose(self, state: Any, context: DraftContext, max_depth: int) -> Proposal | None:
        proposal = super().propose(state, context, max_depth)
        if proposal is not None:
            self.seen.append(proposal.tokens[0].tolist())
        return proposal


def our_rows(target: HFTarget, head: DraftHead, max_new_tokens: int, texts: Sequence[str] = TEXTS) -> list[Row]:
    """Decodes every text up to its end-of-text token, which is left out: engines treat it each in their own way.

    Args:
        target: with a tokenizer, in float32.
        head: in float32, frozen.
        max_new_tokens: of each text at most.
        texts: what the user says; those that are answered with fewer than two tokens are left out.
    """
    proposer = _Recorder(head, target)
    decoder = SpeculativeDecoder(target, proposer)
    rows = []
    for prompt in prompt_ids(target, texts):
        proposer.seen = []
        whole = decoder.generate(prompt, max_new_tokens)
        count = len(whole.tokens) - (whole.finish_reason == "eos")
        if count < 2:
            continue
        if count < len(whole.tokens):
            proposer.seen = []
            whole = decoder.generate(prompt, count)
        rows.append(
            Row(prompt, whole.tokens, proposer.seen, whole.drafted_tokens, whole.accepted_tokens, whole.num_steps)
        )
    return rows


def prompt_ids(target: HFTarget, texts: Sequence[str]) -> list[list[int]]:
    """The texts as the target is asked them: through its chat template where it has one."""
    tokenizer = target.tokenizer
    assert tokenizer is not None
    if tokenizer.chat_template is None:
        return [list(tokenizer(text)["input_ids"]) for text in texts]
    renderer = ChatRenderer(tokenizer)
    return [renderer.prompt_ids([{"role": "user", "content": text}]) for text in texts]


def places(tokens: Sequence[int], proposals: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """The draft of every step by how many tokens of the text stood before it, which the drafts themselves tell.

    The first comes behind the prompt's own token; each next one behind what was accepted of the last and one token more.
    """
    found: dict[int, list[int]] = {}
    place = 1
    for proposal in proposals:
        if place >= len(tokens):
            break
        found[place] = list(proposal)
        taken = 0
        while taken < len(proposal) and place + taken < len(tokens) and proposal[taken] == tokens[place + taken]:
            taken += 1
        place += taken + 1
    return found
