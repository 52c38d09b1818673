"""Trees grown at every step: which nodes they hold, their plans, and decoding with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from specdraft.core.errors import ConfigError
from specdraft.core.tree import DraftTree, GrownTree, Proposal, TreeGrowth
from specdraft.core.tree_search import greedy_tree
from specdraft.core.types import DraftContext, FeatureRequest, TokenBatch
from specdraft.decode._config import DecodeConfig
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.plan import TreePlan
from specdraft.decode.proposers import HeadProposer, draft_tree
from specdraft.heads._dynamic import GrowingTree, likeliest
from specdraft.heads.base import DraftHead, head_kinds
from specdraft.losses.alignment import build_draft_batch
from specdraft.targets.hf import HFTarget
from tests.decode.conftest import LENGTH, PROMPT
from tests.decode.oracle import VOCAB, Oracle, greedy, prompt_ids
from tests.decode.probes import count_reads, one_row
from tests.support import World, make_head, world
from tests.tiny import tiny_target

CPU = torch.device("cpu")
GROWTH = TreeGrowth(depth=3, top_k=3, total_tokens=9)
GROWING = list(head_kinds())
Path = tuple[int, ...]


def paths_of(proposal: Proposal) -> list[Path]:
    """The tokens from the root to every node."""
    rows = proposal.tree.parent_rows().tolist()
    paths: list[Path] = [()]
    for token, parent in zip(proposal.tokens[0].tolist(), rows[1:], strict=True):
        assert parent < len(paths)
        paths.append((*paths[parent], token))
    return paths[1:]


def grow_by_hand(after: Callable[[Path], torch.Tensor], growth: TreeGrowth, width: int) -> set[Path]:
    """EAGLE-2 written out: ``after`` gives the log-probabilities of the tokens behind a path."""
    beam: list[tuple[float, Path]] = [(0.0, ())]
    pool: list[tuple[float, Path]] = []
    for _ in range(growth.depth):
        level = []
        for score, path in beam:
            best = after(path).topk(growth.top_k)
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                level.append((score + value, (*path, token)))
        pool += level
        beam = sorted(level, reverse=True)[:width]
    return {path for _, path in sorted(pool, reverse=True)[: growth.total_tokens]}


@dataclass
class Row:
    """A row of random tokens up to ``position``, and a head that drafts behind it."""

    world: World
    head: DraftHead
    ids: list[int]
    position: int

    def after(self, path: Path) -> torch.Tensor:
        """Log-probabilities ``[V]`` behind a drafted path, by the training forward over the text with it."""
        text = [*self.ids[: self.position + 2], *path, 5, 5, 5]
        ids = torch.tensor([text])
        columns = torch.arange(len(text))[None]
        mask = columns == self.position + 2
        tokens = TokenBatch(ids, columns >= 0, mask, columns, columns * 0, torch.zeros(1, dtype=torch.int64))
        batch = build_draft_batch(tokens, self.world.features(tokens, len(self.head.features().aux_layers)))
        assert batch.anchors.tolist() == [self.position]
        step = self.head(batch, self.world.embed, self.world.unembed)[len(path)]
        drafted = step.unembed(step.hidden)[0].log_softmax(-1)
        everything = torch.full((self.world.spec.vocab_size,), -1e9)
        return everything.index_copy(0, self.head.to_target_ids(torch.arange(drafted.numel())), drafted)

    def grow(self, growth: TreeGrowth) -> Proposal:
        """The head's draft, features taken in over two calls."""
        ids = torch.tensor([self.ids])
        columns = torch.arange(len(self.ids))[None]
        tokens = TokenBatch(ids, columns >= 0, columns >= 0, columns, columns * 0, torch.zeros(1, dtype=torch.int64))
        features = self.world.features(tokens, len(self.head.features().aux_layers))
        state = self.head.init_state(64, growth.beams, self.world.unembed)
        for start, stop in ((0, 4), (4, self.position + 1)):
            context = DraftContext(ids[:, start + 1 : stop + 1], features.select(torch.arange(start, stop)), start)
            proposal = self.head.grow(state, context, self.world.embed, growth)
        return proposal


@pytest.mark.parametrize("size", [None, 40])
@pytest.mark.parametrize("kind", GROWING)
@torch.no_grad()
def test_heads_grow_the_tree_of_the_paper(kind: str, size: int | None) -> None:
    w = world()
    settings: dict[str, Any] = {"num_draft_tokens": 3, "draft_vocab_size": size}
    settings |= {"unroll_steps": 3} if kind == "eagle" else {}
    head = make_head(kind, w.spec, **settings).eval()
    row = Row(w, head, prompt_ids(12), 9)
    for growth in (GROWTH, TreeGrowth(3, 3, 21), TreeGrowth(3, 4, 5), TreeGrowth(2, 5, 8), TreeGrowth(1, 4, 2)):
        proposal = row.grow(growth)
        assert isinstance(proposal.tree, GrownTree)
        assert len(proposal.tree) == proposal.tokens.shape[1] == growth.total_tokens
        found = paths_of(proposal)
        assert len(set(found)) == len(found)
        assert max(map(len, found)) <= proposal.tree.max_depth <= growth.depth
        # Where depths do not depend on each other, a wider beam costs no forward.
        width = growth.total_tokens if kind in ("medusa", "dflash", "peagle") else growth.top_k
        assert set(found) == grow_by_hand(row.after, growth, width)


def test_independent_levels_give_the_best_first_tree() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, generator=generator) * 2
    probabilities = logits.softmax(-1)
    tokens, scores = likeliest(logits, 6)
    for count in (1, 5, 20):
        tree = GrowingTree(count, CPU)
        for depth in range(4):
            width = tree.tokens.numel() if depth else 1
            tree.extend(tokens[depth].expand(width, -1), scores[depth].expand(width, -1))
        chosen, grown = tree.best(count)
        wanted = greedy_tree(probabilities.tolist(), count)
        assert sorted(paths_of(Proposal(chosen[None], grown))) == sorted(tuple(path) for path in wanted.paths())


def test_equal_scores_keep_the_tree_connected() -> None:
    for count in range(1, 14):
        tree = GrowingTree(3, CPU)
        for depth in range(3):
            width = 3 if depth else 1
            tree.extend(torch.arange(3).expand(width, 3), torch.zeros(width, 3))
        tokens, grown = tree.best(count)
        rows = grown.parent_rows().tolist()
        assert all(parent < row for row, parent in enumerate(rows) if row)
        assert len(paths_of(Proposal(tokens[None], grown))) == count


@pytest.mark.parametrize("window", [None, 3, 6])
def test_plan_of_a_grown_tree_equals_that_of_the_same_fixed_one(window: int | None) -> None:
    for paths in ([[0], [1], [0, 0], [1, 0], [1, 1], [1, 1, 0]], [[0]], [[0], [0, 0], [0, 0, 0]]):
        tree = DraftTree.from_paths(paths)
        # The bound on the depth may be larger than the depth.
        grown = GrownTree(tree.parent_rows(), tree.max_depth + 2)
        fixed, other = (TreePlan(shape, 16, window, True, CPU) for shape in (tree, grown))
        assert fixed.path_rows == other.path_rows
        assert fixed.has_children == other.has_children
        assert fixed.parents.equal(other.parents)
        assert fixed.unrelated.equal(other.unrelated)
        assert fixed.ranking.equal(other.ranking)
        assert fixed.paths.equal(other.paths[:, : tree.max_depth + 1])
        assert fixed.paths.equal(tree.path_table())
        for length in (1, 5, 16):
            assert fixed.positions(length).equal(other.positions(length))
            for a, b in zip(fixed.masks(length), other.masks(length), strict=True):
                assert (a is None and b is None) or (a is not None and b is not None and a.equal(b))


@dataclass
class GrowingOracle:
    """Grows trees from probabilities in which the target's next token stands at ``rank``, down to depth ``right``."""

    answer: list[int]
    growth: TreeGrowth
    right: int
    rank: int
    draws = False

    @property
    def tree(self) -> DraftTree:
        return self.growth.largest

    def features(self) -> FeatureRequest:
        return FeatureRequest()

    def begin(self, max_length: int) -> dict[str, int]:
        return {}

    def logits(self, root: int, path: Path) -> list[float]:
        """Scores of the tokens behind ``path``: sure on the true path, flat elsewhere, the known token never on top."""
        known = self.answer[root + len(path) + 1]
        wrong = [(known + 1 + i) % VOCAB for i in range(3)]
        if list(path) != self.answer[root + 1 : root + 1 + len(path)] or len(path) >= self.right:
            return [0.1 if token in wrong else 0.0 for token in range(VOCAB)]
        order = [*wrong[: self.rank], known]
        return [9.0 - 0.1 * order.index(token) if token in order else 0.0 for token in range(VOCAB)]

    def propose(self, state: dict[str, int], context: DraftContext, max_depth: int) -> Proposal:
        growth = self.growth.cut(max_depth)
        prompt = state.setdefault("prompt", context.next_tokens.shape[1])
        root = context.start + context.next_tokens.shape[1] - prompt
        tree = GrowingTree(growth.top_k, CPU)
        beam: list[Path] = [()]
        for _ in range(growth.depth):
            tree.extend(*likeliest(torch.tensor([self.logits(root, path) for path in beam]), growth.top_k))
            origins, tokens = tree.origin.tolist(), tree.tokens.tolist()
            beam = [(*beam[origin], token) for origin, token in zip(origins, tokens, strict=True)]
        chosen, grown = tree.best(growth.total_tokens)
        return Proposal(chosen[None], grown)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("right", range(4))
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_acceptance_is_what_the_oracle_knows_and_no_less_than_a_chain(kind: str, right: int, rank: int) -> None:
    target = tiny_target(kind)
    answer = greedy(target, PROMPT, LENGTH + 8)
    growth = TreeGrowth(3, 3, 21)
    result = SpeculativeDecoder(target, GrowingOracle(answer, growth, right, rank)).generate(
        PROMPT, LENGTH, ignore_eos=True
    )
    assert result.tokens == answer[:LENGTH]
    assert result.num_steps == -(-(LENGTH - 1) // (right + 1))
    chain = SpeculativeDecoder(target, Oracle(answer, DraftTree.chain(3), right if rank == 0 else 0)).generate(
        PROMPT, LENGTH, ignore_eos=True
    )
    assert result.acceptance_length >= chain.acceptance_length
    # The last steps draft less deep, and no deeper than what may still be emitted.
    assert result.drafted_tokens <= 21 * result.num_steps


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("kind", GROWING)
def test_heads_leave_the_text_unchanged(kind: str, family: str) -> None:
    target = tiny_target(family)
    head = make_head(kind, target.spec, num_draft_tokens=3).eval()
    decoder = SpeculativeDecoder(target, HeadProposer(head, target, TreeGrowth(3, 5, 30)))
    for seed in (0, 1):
        prompt = prompt_ids(7, seed)
        result = decoder.generate(prompt, LENGTH, ignore_eos=True)
        assert result.tokens == greedy(target, prompt, LENGTH)
        assert result.drafted_tokens > 20 * (result.num_steps - 3)
        assert decoder.generate(prompt, LENGTH, ignore_eos=True).accepted_per_depth == result.accepted_per_depth
    assert not decoder._plans or all(isinstance(tree, DraftTree) for tree, _ in decoder._plans)


@pytest.mark.parametrize("kind", GROWING)
def test_one_copy_to_the_host_a_step(kind: str, llama: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(kind, llama.spec, num_draft_tokens=3).eval()
    proposer = HeadProposer(head, llama, GROWTH)
    state = proposer.begin(64)
    context = DraftContext(torch.tensor([[4, 5, 6]]), llama.capture(one_row([3, 4, 5]), head.features()), 0)
    counts = count_reads(monkeypatch)
    with torch.inference_mode():
        proposal = proposer.propose(state, context, 3)
        assert proposal is not None
        TreePlan(proposal.tree, 64, None, True, CPU)
    monkeypatch.undo()
    assert not any(counts.values()), counts


def test_growth_is_cut_and_checked() -> None:
    assert TreeGrowth(4, 3, 30).pool_size == 30
    assert TreeGrowth(4, 3, 30).cut(2) == TreeGrowth(2, 3, 12)
    assert TreeGrowth(4, 3, 5).cut(9) == TreeGrowth(4, 3, 5)
    assert [len(GROWTH.beams), GROWTH.beams.max_depth, GROWTH.beams.max_rank] == [9, 3, 2]
    for growth in (GROWTH, TreeGrowth(3, 8, 2), TreeGrowth(5, 2, 5)):
        assert len(growth.largest) == growth.total_tokens
        assert growth.largest.max_depth == min(growth.depth, growth.total_tokens)
    with pytest.raises(ConfigError, match=r"dynamic_total_tokens: depth 2 and top_k 2 give 6 nodes, got 7"):
        TreeGrowth(2, 2, 7)


def test_shapes_a_head_cannot_draft_are_refused(llama: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head("medusa", llama.spec, num_draft_tokens=2).eval()
    with pytest.raises(ConfigError, match=r"deeper than the head drafts \(2\), got depth 3"):
        HeadProposer(head, llama, GROWTH)
    with pytest.raises(ConfigError, match=r"rank beyond the draft vocabulary of 97, got 99"):
        HeadProposer(head, llama, TreeGrowth(1, 100, 5))
    monkeypatch.setattr(type(head), "grows", False)
    with pytest.raises(ConfigError, match=r"dynamic_total_tokens: medusa heads draft fixed trees only, got 5"):
        HeadProposer(head, llama, TreeGrowth(2, 3, 5))


def test_decode_settings() -> None:
    assert draft_tree(DecodeConfig(dynamic_total_tokens=12), 3) == TreeGrowth(3, 8, 12)
    config = DecodeConfig(dynamic_total_tokens=12, dynamic_depth=2, dynamic_top_k=4)
    assert draft_tree(config, 3) == TreeGrowth(2, 4, 12)
    assert config.has_shape
    assert not DecodeConfig().has_shape


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dynamic_total_tokens": 0}, r"decode.dynamic_total_tokens: must lie in 1..512 or be null, got 0"),
        (
            {"dynamic_total_tokens": 9, "dynamic_top_k": 65},
            r"decode.dynamic_top_k: must lie in 1..64 or be null, got 65",
        ),
        ({"dynamic_depth": 3}, r"decode.dynamic_depth: has no effect without decode.dynamic_total_tokens, got 3"),
        ({"dynamic_top_k": 3}, r"decode.dynamic_top_k: has no effect without decode.dynamic_total_tokens, got 3"),
        ({"dynamic_total_tokens": 9, "tree": [[0]]}, r"decode.tree: contradicts decode.dynamic_total_tokens"),
        ({"dynamic_total_tokens": 9, "num_draft_tokens": 2}, r"decode.num_draft_tokens: contradicts decode.dynamic"),
    ],
)
def test_bad_decode_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DecodeConfig(**settings)
