"""Every proposer without a trained head: unchanged text for several families, exact drafts, and clear errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from specdraft.core.errors import ConfigError
from specdraft.core.tree import DraftTree, Proposal
from specdraft.core.types import DraftContext, FeatureRequest
from specdraft.decode._proposer_config import DraftModelConfig, PromptLookupConfig, SuffixConfig
from specdraft.decode.cache import KVCache
from specdraft.decode.draft_model import DraftModelProposer, check_vocabulary, draft_model_proposer
from specdraft.decode.draft_pace import PATIENCE, DraftPace
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.prompt_lookup import NGramIndex, PromptLookupProposer
from specdraft.decode.proposers import Proposer
from specdraft.decode.suffix import SuffixProposer, SuffixRow
from specdraft.targets.first_layers import first_layers
from specdraft.targets.hf import HFTarget
from tests.decode.oracle import VOCAB, greedy, prompt_ids
from tests.tiny import SLIDING_WINDOW, tiny_models, tiny_target, tiny_tokenizer

CPU = torch.device("cpu")
FAMILIES = ["llama", "mistral", "gemma2", "gpt_neox"]
LENGTH = 40
CONFIDENT = {"llama": 0.15, "mistral": 0.17, "gemma2": 0.1, "gpt_neox": 0.22}
"""About the median probability of the likeliest token."""
TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0, 0]]


def build(kind: str) -> HFTarget:
    # Random tied embeddings make Gemma 2 repeat one token.
    return HFTarget.from_model(tiny_models[kind](**({"tie_word_embeddings": False} if kind == "gemma2" else {})))


@dataclass
class Subject:
    """A target, prompts with its own answers to them, and a model that agrees with it often, not always."""

    target: HFTarget
    relative: HFTarget
    answers: list[tuple[list[int], list[int]]]


@pytest.fixture(scope="module", params=FAMILIES)
def subject(request: pytest.FixtureRequest) -> Subject:
    target = build(request.param)
    prompts = [prompt_ids(7), prompt_ids(12, seed=1) * 2]
    relative = close_relative(request.param)
    return Subject(target, relative, [(prompt, greedy(target, prompt, LENGTH)) for prompt in prompts])


def repeated(answer: list[int]) -> list[int]:
    """``answer`` with a token in every few replaced, and pieces of it: a text that holds some of what will come."""
    broken = [(token + 1) % VOCAB if i % 7 in (2, 6) else token for i, token in enumerate(answer)]
    return [*broken, *answer[8:14], 1, *broken[20:24], *answer[24:26], 1]


def close_relative(kind: str) -> HFTarget:
    """The model of ``build`` with its weights moved a little."""
    other = build(kind)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.model.parameters():
            if parameter.dim() > 1:
                spread = parameter.std() * 0.1
                parameter.add_(torch.randn(parameter.shape, generator=generator) * spread)
    return other


def draft_model(subject: Subject, tree: list[list[int]] | None = None, least: float = 0.0) -> DraftModelProposer:
    shape = DraftTree.chain(4) if tree is None else DraftTree.from_paths(tree)
    return DraftModelProposer(subject.relative, VOCAB, shape, least)


PROPOSERS: dict[str, Callable[[Subject], Proposer]] = {
    "lookup": lambda _: PromptLookupProposer(PromptLookupConfig(num_draft_tokens=5), CPU),
    "lookup_tree": lambda _: PromptLookupProposer(PromptLookupConfig(num_draft_tokens=4, max_matches=3), CPU),
    "suffix": lambda _: SuffixProposer(SuffixConfig(num_draft_tokens=6, num_nodes=9), CPU),
    "suffix_earlier": lambda _: SuffixProposer(
        SuffixConfig(num_draft_tokens=6, num_nodes=9, max_earlier_tokens=90), CPU
    ),
    "draft_model": draft_model,
    "draft_model_tree": lambda subject: draft_model(subject, TREE),
    "draft_model_confident": lambda subject: draft_model(subject, least=CONFIDENT[subject.target.spec.model_type]),
    "draft_model_adaptive": lambda subject: DraftModelProposer(subject.relative, VOCAB, DraftTree.chain(6), cost=0.05),
    "draft_model_adaptive_tree": lambda subject: DraftModelProposer(
        subject.relative, VOCAB, DraftTree.from_paths(TREE), cost=0.05
    ),
    "first_layers": lambda subject: DraftModelProposer(first_layers(subject.target, 3), VOCAB, DraftTree.chain(4)),
}


@dataclass
class Watched:
    """A proposer whose drafts and their acceptance are noted."""

    inner: Any
    hint: list[int] = field(default_factory=list)
    """Text that a row of a proposer that looks up starts with: random targets hardly repeat themselves."""
    drafted: list[Proposal] = field(default_factory=list)

    @property
    def draws(self) -> bool:
        return self.inner.draws  # type: ignore[no-any-return]

    @property
    def tree(self) -> DraftTree:
        return self.inner.tree  # type: ignore[no-any-return]

    def features(self) -> FeatureRequest:
        return self.inner.features()  # type: ignore[no-any-return]

    def begin(self, max_length: int) -> Any:
        state = self.inner.begin(max_length)
        if isinstance(state, NGramIndex):
            state.extend(self.hint)
        elif isinstance(state, SuffixRow):
            state.automaton.extend(state.cursor, self.hint)
        return state

    def propose(self, state: Any, context: DraftContext, max_depth: int) -> Proposal | None:
        proposal = self.inner.propose(state, context, max_depth)
        if proposal is not None:
            assert proposal.tokens.shape == (1, len(proposal.tree))
            assert len(proposal.tree) <= len(self.tree)
            assert 1 <= proposal.tree.max_depth <= min(max_depth, self.tree.max_depth)
            tokens = proposal.tokens[0].tolist()
            assert len(set(zip(proposal.tree.parents, tokens, strict=True))) == len(tokens), "siblings are distinct"
            self.drafted.append(proposal)
        return proposal  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", list(PROPOSERS))
def test_text_is_the_targets_own(subject: Subject, name: str) -> None:
    accepted: set[int] = set()
    watched = Watched(PROPOSERS[name](subject))
    decoder = SpeculativeDecoder(subject.target, watched)
    for prompt, answer in subject.answers:
        watched.hint = repeated(answer)
        steps = list(decoder.stream(prompt, LENGTH, ignore_eos=True))
        assert [token for step in steps for token in step.tokens] == answer
        accepted.update(step.num_accepted for step in steps[1:])
    assert watched.drafted
    # A pace that follows what is accepted makes little of a model that is rarely right.
    assert len(accepted) >= (2 if "adaptive" in name else 3), f"accepted lengths {accepted} prove little"


@pytest.mark.parametrize("tree", [[[0], [0, 0], [0] * 3, [0] * 4], TREE], ids=["chain", "tree"])
def test_the_target_itself_as_draft_model_is_always_right(subject: Subject, tree: list[list[int]]) -> None:
    target = subject.target
    whole = first_layers(target, target.spec.num_hidden_layers)
    prompt, answer = subject.answers[0]
    for model in (target, whole):
        decoder = SpeculativeDecoder(target, DraftModelProposer(model, VOCAB, DraftTree.from_paths(tree)))
        result = decoder.generate(prompt, LENGTH, ignore_eos=True)
        assert result.tokens == answer
        assert result.num_steps == -(-(LENGTH - 1) // 5)
        assert result.accepted_tokens == LENGTH - 1 - result.num_steps


@dataclass
class Stateless:
    """The drafts of a model that starts from nothing at every step: what a cache rolled back in step must equal."""

    model: HFTarget
    tree: DraftTree
    min_probability: float = 0.0
    draws = False

    def features(self) -> FeatureRequest:
        return FeatureRequest()

    def begin(self, max_length: int) -> list[int]:
        return []

    def propose(self, state: list[int], context: DraftContext, max_depth: int) -> Proposal | None:
        state += context.new_ids
        tree = self.tree.truncate(max_depth)
        paths: list[list[int]] = []
        for parent, rank in zip(tree.parents, tree.ranks, strict=True):
            above = paths[parent] if parent >= 0 else []
            logits = self.model.model(torch.tensor([[*state, *above]])).logits[0, -1]
            paths.append([*above, int(logits.topk(rank + 1).indices[rank])])
            if logits.softmax(-1).max() < self.min_probability:
                tree = DraftTree.chain(len(paths))
                break
        return Proposal(torch.tensor([[path[-1] for path in paths]]), tree)


@pytest.mark.parametrize("shape", ["chain", "confident", "tree"])
def test_a_cache_rolled_back_in_step_equals_a_fresh_one(subject: Subject, shape: str) -> None:
    kind = subject.target.spec.model_type
    tree = DraftTree.from_paths(TREE) if shape == "tree" else DraftTree.chain(4)
    least = CONFIDENT[kind] if shape == "confident" else 0.0
    prompt, answer = subject.answers[0]
    stateless = Stateless(subject.relative, tree, least)
    wanted = SpeculativeDecoder(subject.target, stateless).generate(prompt, 30, ignore_eos=True)
    models = [subject.relative]
    if kind == "mistral":
        models.append(close_relative(kind))
        models[-1].pack()
    for model in models:
        proposer = DraftModelProposer(model, VOCAB, tree, least)
        found = SpeculativeDecoder(subject.target, proposer).generate(prompt, 30, ignore_eos=True)
        assert found.tokens == answer[:30]
        assert found.accepted_per_depth == wanted.accepted_per_depth
        assert found.reached_per_depth == wanted.reached_per_depth
        assert found.drafted_tokens == wanted.drafted_tokens
    assert 0 < found.accepted_tokens < found.drafted_tokens
    if shape == "confident":
        assert found.num_steps < found.drafted_tokens < 4 * found.num_steps - 6


class Counting(HFTarget):
    """Notes how many tokens each forward runs."""

    sizes: list[int]

    def forward_cached(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.sizes.append(input_ids.numel())
        return super().forward_cached(input_ids, *args, **kwargs)


@pytest.mark.parametrize("tree", [DraftTree.chain(4), DraftTree.from_paths(TREE)], ids=["chain", "tree"])
def test_nothing_accepted_runs_twice(subject: Subject, tree: DraftTree) -> None:
    """A draft starts with the root and, where the last accepted node was not continued, that one before it."""
    prompt, _ = subject.answers[0]
    seen = set()
    # The target itself is always right.
    for source in (subject.relative, subject.target):
        model = Counting(source.model, source.layout, source.spec)
        model.sizes = []
        decoder = SpeculativeDecoder(subject.target, DraftModelProposer(model, VOCAB, tree))
        wanted = {len(prompt) + 1}
        for step in decoder.stream(prompt, LENGTH, ignore_eos=True):
            if not model.sizes:
                continue
            assert model.sizes[0] in wanted
            seen.add(model.sizes[0])
            # A chain of d tokens takes d forwards; of a tree it depends on the path.
            wanted = {1 + (step.num_accepted == len(model.sizes))} if tree.is_chain else {1, 2}
            model.sizes.clear()
    assert seen == {len(prompt) + 1, 1, 2}


def test_depth_follows_what_was_accepted() -> None:
    pace = DraftPace(0.1, 8)
    assert pace.next_depth() >= 4
    for _ in range(20):
        pace.count(pace.next_depth(), 0)
    assert pace.rate < 0.2
    depths = [pace.next_depth() for _ in range(2 * PATIENCE + 2)]
    assert sorted(set(depths)) == [0, 1]
    assert depths.count(1) == 2
    for _ in range(60):
        depth = pace.next_depth()
        pace.count(depth, depth)
    assert pace.next_depth() == 8
    # What costs as much as the target never pays, what is free always does.
    assert DraftPace(1.0, 4).next_depth() == 0
    assert DraftPace(0.0, 4).next_depth() == 4


@pytest.mark.parametrize(
    ("kind", "packed"),
    [(kind, False) for kind in (*FAMILIES, "gpt2", "granite", "gemma3_composite")]
    + [("qwen3", True), ("mistral", True)],
)
def test_first_layers_share_weights_and_compute_what_they_would(kind: str, packed: bool) -> None:
    target = build(kind)
    text = torch.tensor([prompt_ids(3 * SLIDING_WINDOW)])
    with torch.inference_mode():
        wanted = target.model(text, output_hidden_states=True, use_cache=False).hidden_states[2]
        wanted = target.logits(target.layout.final_norm(wanted))
        if packed:
            target.pack()
        before = {id(module): vars(module).get("forward") for module in target.model.modules()}
        model = first_layers(target, 2)
        cache = KVCache(2, 40)
        hidden = model.forward_cached(text, torch.arange(text.shape[1])[None], None, None, cache)
    torch.testing.assert_close(model.logits(hidden.last_hidden), wanted, rtol=1e-4, atol=1e-4)
    assert model.spec.num_hidden_layers == len(model.layer_types) == 2
    owned = {parameter.data_ptr() for parameter in target.model.parameters()}
    assert {parameter.data_ptr() for parameter in model.model.parameters()} <= owned
    # The target is as it was.
    assert len(target.layout.layers) == target.spec.num_hidden_layers == 4
    assert {id(module): vars(module).get("forward") for module in target.model.modules()} == before


def test_drafts_end_where_the_draft_models_context_ends() -> None:
    target = build("llama")
    model = HFTarget.from_model(tiny_models["llama"](max_position_embeddings=40))
    watched = Watched(DraftModelProposer(model, VOCAB, DraftTree.chain(4)))
    prompt = prompt_ids(20)
    result = SpeculativeDecoder(target, watched).generate(prompt, 60, ignore_eos=True)
    assert result.tokens == greedy(target, prompt, 60)
    # The same weights: five tokens a step as far as the drafts go, one a step afterwards.
    assert 4 <= len(watched.drafted) <= 5
    assert result.num_steps > 35
    long = prompt_ids(50)
    assert SpeculativeDecoder(target, watched).generate(long, 12, ignore_eos=True).tokens == greedy(target, long, 12)


def test_a_draft_model_with_more_rows_never_drafts_them() -> None:
    """Padding rows of the lm_head, as families with one tokenizer and several sizes have them."""
    target = tiny_target("llama")
    model = HFTarget.from_model(tiny_models["llama"](vocab_size=130), tiny_tokenizer(), name="padded")
    size = check_vocabulary(model, target)
    assert size == VOCAB
    watched = Watched(DraftModelProposer(model, size, DraftTree.from_paths(TREE)))
    SpeculativeDecoder(target, watched).generate(prompt_ids(9), 20, ignore_eos=True)
    assert max(int(proposal.tokens.max()) for proposal in watched.drafted) < VOCAB


def test_vocabularies_that_differ_are_refused() -> None:
    target = tiny_target("llama")
    bare = HFTarget.from_model(tiny_models["llama"](vocab_size=130), name="other")
    with pytest.raises(
        ConfigError, match=r"^proposer.name: its vocabulary of 130 is not the target's of 97, got other;"
    ):
        check_vocabulary(bare, target)
    tokenizer = tiny_tokenizer()
    vocab = tokenizer.get_vocab()
    tokenizer.add_tokens(["zzz"])
    longer = HFTarget.from_model(tiny_models["llama"](), tokenizer, name="other")
    with pytest.raises(ConfigError, match=r"not the target's \(91 tokens, not 90\), got other"):
        check_vocabulary(longer, target)

    class Moved:
        def get_vocab(self) -> dict[str, int]:
            return {**vocab, "a": 97}

    moved = HFTarget.from_model(tiny_models["llama"](), Moved(), name="other")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"\('a' is 97, not {vocab['a']}\)"):
        check_vocabulary(moved, target)


def test_settings_of_the_draft_model() -> None:
    target = build("llama")
    proposer = draft_model_proposer(DraftModelConfig(), target)
    assert proposer.cost is not None
    assert 0.6 < proposer.cost < 0.95
    assert draft_model_proposer(DraftModelConfig(adaptive=False), target).cost is None
    assert proposer.model.spec.num_hidden_layers == 3
    assert proposer.tree == DraftTree.chain(4)
    proposer = draft_model_proposer(DraftModelConfig(layers=1, tree=TREE), target)
    assert [proposer.model.spec.num_hidden_layers, len(proposer.tree)] == [1, len(TREE)]
    with pytest.raises(ConfigError, match=r"^proposer.layers: the model has 4, got 9; use fewer"):
        draft_model_proposer(DraftModelConfig(layers=9), target)
    for settings, message in (
        ({"tree": [[0]], "num_draft_tokens": 2}, "proposer.tree: contradicts"),
        ({"revision": "main"}, "proposer.revision: has no effect without proposer.name"),
        ({"dtype": "float32"}, "proposer.dtype: has no effect without proposer.name"),
        ({"name": "x", "dtype": "int8"}, "proposer.dtype: unknown, got 'int8'"),
        ({"min_probability": 1.0}, "proposer.min_probability: must lie in"),
        ({"layers": 0}, "proposer.layers: must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            DraftModelConfig(**settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rank beyond the vocabulary of 97, got 97"):
        DraftModelProposer(target, VOCAB, DraftTree.from_paths([[97]]))
