"""Heads whose pass is compiled draft what they draft without, beside a compiled target, and their graph is what ran."""

from __future__ import annotations

from typing import Any

import pytest

from specdraft.core.compiling import COLUMNS, StaticGraph
from specdraft.core.tree import DraftTree, Proposal, TreeGrowth
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.proposers import HeadProposer
from specdraft.targets.hf import HFTarget
from tests.decode.oracle import prompt_ids
from tests.support import make_head
from tests.tiny import tiny_models, tiny_target

NEW_TOKENS = 16
SHAPES = {
    "chain": DraftTree.chain(3),
    "tree": DraftTree.from_paths([[0], [1], [2], [0, 0], [1, 0], [1, 1], [1, 1, 0]]),
    "grown": TreeGrowth(depth=3, top_k=3, total_tokens=9),
}


pytestmark = pytest.mark.usefixtures("own_graphs")


def drafts(target: HFTarget, kind: str, shape: Any, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The text, and what was drafted at every step: tokens and parents."""
    head = make_head(kind, target.spec, num_draft_tokens=3, **DRAFT_LAYER.get(kind, {})).requires_grad_(False)
    head.init_from_target(target.embed, target.unembedding)
    proposer = HeadProposer(head, target, shape)
    if target.compiles:
        head.compile_pass()  # decoders do it on devices
    found: list[Any] = []
    propose = proposer.propose

    def recorded(*args: Any) -> Proposal | None:
        proposal = propose(*args)
        assert proposal is not None
        found.append((proposal.tokens.tolist(), proposal.tree.parent_rows().tolist()))
        return proposal

    monkeypatch.setattr(proposer, "propose", recorded)
    found.append(SpeculativeDecoder(target, proposer).generate(prompt, NEW_TOKENS, ignore_eos=True).tokens)
    return found


DRAFT_LAYER = {"eagle3": {"norm_output": True}}


@pytest.mark.parametrize(
    ("kind", "shape"), [("eagle", "chain"), ("eagle3", "tree"), ("eagle3", "grown"), ("medusa", "tree")]
)
def test_drafts_are_those_of_the_plain_passes(kind: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The text passes from the first block of columns to the second.
    prompt = prompt_ids(COLUMNS - 8)
    plain = drafts(HFTarget.from_model(tiny_models["llama"]()), kind, SHAPES[shape], prompt, monkeypatch)
    target = HFTarget.from_model(tiny_models["llama"]())
    target.compile()
    graphs: list[str] = []
    run = StaticGraph.__call__

    def counted(self: StaticGraph, *args: Any) -> Any:
        graphs.append(self.name)
        return run(self, *args)

    monkeypatch.setattr(StaticGraph, "__call__", counted)
    assert drafts(target, kind, SHAPES[shape], prompt, monkeypatch) == plain
    steps, passes = len(plain) - 1, 1 if kind == "medusa" else 3
    # At the end of a text drafts are shorter.
    assert steps * passes - 3 <= graphs.count(kind) <= steps * passes
    # Every step of the target after the prompt.
    assert graphs.count("target") >= steps


def test_kinds_without_a_graph_draft_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_ids(9)
    plain = drafts(tiny_target(), "mlp", SHAPES["tree"], prompt, monkeypatch)
    target = tiny_target()
    target.compile()
    assert drafts(target, "mlp", SHAPES["tree"], prompt, monkeypatch) == plain
