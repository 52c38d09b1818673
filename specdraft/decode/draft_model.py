"""A smaller causal LM that drafts: its own cache, rolled back in step with what the target accepts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from specdraft.core.errors import ConfigError, SpecDraftError
from specdraft.core.tree import DraftTree, Proposal
from specdraft.core.types import DraftContext, FeatureRequest
from specdraft.decode._proposer_config import DraftModelConfig
from specdraft.decode.cache import KVCache
from specdraft.decode.draft_pace import DraftPace
from specdraft.decode.draft_shared import SharedRows
from specdraft.decode.plan import TreePlan
from specdraft.heads.base import TokenPicker
from specdraft.targets._config import TargetConfig
from specdraft.targets.base import Target
from specdraft.targets.first_layers import first_layers
from specdraft.targets.hf import HFTarget, load_target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_DEPTH = 4
NO_AUX = FeatureRequest()


class DraftRow:
    """State of one row: its text, the keys of it that the draft model has, and how its drafts fare.

    Args:
        model: the draft model.
        capacity: tokens of the row, with the drafted nodes behind them.
        pace: says how deep to draft; None = as deep as allowed.
    """

    def __init__(self, model: Target, capacity: int, pace: DraftPace | None) -> None:
        self.capacity = capacity
        self.cache = KVCache(model.spec.num_hidden_layers, capacity)
        self.pace = pace
        self.last_id = model.spec.vocab_size - 1
        """Stands for the tokens beyond it, padding rows that the target has alone."""
        self.root = -1
        """Position of the text's last token, -1 before the first call."""
        self.filled = 0
        """Tokens of the text with keys. Behind theirs lie those of the drafted nodes that were continued."""
        self.missing = torch.empty(1, 0, dtype=torch.int64, device=model.device)
        """``[1, n]``: the tokens of the text without keys, the root last."""
        self.drafted = 0
        """Depth of the last draft."""
        self.nodes: tuple[DraftTree, Tensor] | None = None
        """Of a draft that was a tree: the nodes that were continued, and the tokens ``[N]`` of these."""
        self.shared: SharedRows | None = None
        """Where the keys are if not in ``cache``."""

    def take_in(self, context: DraftContext) -> list[int]:
        """Adds what was committed to the text; returns which keys behind the text's belong to it now, ascending."""
        if self.root < 0:
            self.root = len(context.new_ids) - 1
            self.missing = torch.tensor([context.new_ids], device=self.missing.device).clamp(max=self.last_id)
            return []
        accepted = context.next_tokens.shape[1] - 1
        if self.pace is not None:
            self.pace.count(self.drafted, accepted)
        kept = list(range(min(accepted, max(self.drafted - 1, 0))))
        if self.nodes is not None:
            kept = _path(*self.nodes, context.new_ids[:-1])
        self.root += context.next_tokens.shape[1]
        self.filled += len(kept)
        new = context.next_tokens[:, len(kept) :].clamp(max=self.last_id)
        self.missing = torch.cat([self.missing, new], dim=1)
        self.drafted, self.nodes = 0, None
        return kept

    def ran(self) -> None:
        """All of the text has keys now."""
        self.filled = self.root + 1
        self.missing = self.missing[:, :0]


def _path(tree: DraftTree, tokens: Tensor, text: Sequence[int]) -> list[int]:
    """The nodes of ``tree``, which hold ``tokens``, that the beginning of ``text`` leads through."""
    held = tokens.tolist()
    path: list[int] = []
    node = -1
    for token in text:
        children = (i for i, parent in enumerate(tree.parents) if parent == node and held[i] == token)
        node = next(children, len(held))
        if node == len(held):
            break
        path.append(node)
    return path


class DraftModelProposer:
    """Drafts with another causal LM (Leviathan et al. 2023; Chen et al. 2023): its likeliest tokens, or drawn ones.

    The keys and values of what was accepted stay, of a chain and of a tree; the next draft starts with a forward over the
    root and what may be missing before it.

    Args:
        model: the model that drafts, on the target's device.
        vocab_size: tokens that both models have, the first rows of either lm_head.
        tree: shape of the drafts.
        min_probability: a chain ends behind a token of a lower probability; 0 = never, and nothing is read from the
            device.
        cost: of one of its forwards in forwards of the target; with it, drafts are as deep as pays by what was accepted
            lately, at most as deep as ``tree``. None = always as deep as that.
        target_vocab_size: rows of the target's lm_head; None = ``vocab_size``.
    """

    draws = True

    def __init__(
        self,
        model: Target,
        vocab_size: int,
        tree: DraftTree,
        min_probability: float = 0.0,
        cost: float | None = None,
        target_vocab_size: int | None = None,
    ) -> None:
        if tree.max_rank >= vocab_size:
            raise ConfigError(
                f"proposer.tree: rank beyond the vocabulary of {vocab_size}, got {tree.max_rank}; lower it"
            )
        self.model = model
        self.vocab_size = vocab_size
        self.tree = tree
        self.min_probability = min_probability
        self.cost = cost
        self.chains = [DraftTree.chain(depth) for depth in range(tree.max_depth + 1)]
        self._padding = (target_vocab_size or vocab_size) - vocab_size
        self._levels = {depth: _Levels(tree.truncate(depth), model.device) for depth in range(1, tree.max_depth + 1)}
        self._plans: dict[tuple[DraftTree, int], TreePlan] = {}
        self._shared = SharedRows(self)

    @property
    def weights(self) -> nn.Module | None:
        """The module that holds the model's weights; None where the target is of another kind than ours."""
        return self.model.model if isinstance(self.model, HFTarget) else None

    def features(self) -> FeatureRequest:
        """Nothing of the target's."""
        return NO_AUX

    def begin(self, max_length: int) -> DraftRow:
        """An empty cache for a row of ``max_length`` tokens."""
        length = min(max_length, self.model.spec.max_position_embeddings)
        pace = None if self.cost is None else DraftPace(self.cost, self.tree.max_depth)
        return DraftRow(self.model, length + len(self.tree), pace)

    def propose(self, state: DraftRow, context: DraftContext, max_depth: int) -> Proposal | None:
        """A draft of depth ``max_depth`` at most; None past the draft model's own context, or where none pays."""
        if state.shared is not None:
            state.shared.release(state)
        filled = state.filled
        kept = state.take_in(context)
        state.cache.rollback(filled)
        if kept:
            state.cache.commit(kept)
        depth = self.depth(state, max_depth)
        if depth < 1:
            return None
        plan = self._plan(self._chain(state.missing.shape[1] - 1), state.cache) if state.filled else None
        hidden = self._run(state.cache, state.missing, plan)
        state.ran()
        picker = TokenPicker(self, context)
        if self.tree.is_chain:
            return self._draft_chain(state, hidden, depth, picker)
        return self._draft_tree(state, hidden, self._levels[depth], picker)

    def propose_batch(
        self, states: Sequence[DraftRow], contexts: Sequence[DraftContext], max_depths: Sequence[int]
    ) -> list[Proposal | None]:
        """``propose`` for each row; the rows share the forwards of a chain, and draft trees one after another."""
        if not self.tree.is_chain:
            rows = zip(states, contexts, max_depths, strict=True)
            return [self.propose(state, context, max_depth) for state, context, max_depth in rows]
        return self._shared.propose(states, contexts, max_depths)

    def depth(self, state: DraftRow, max_depth: int) -> int:
        """How deep the row drafts now; to be called once a step."""
        room = self.model.spec.max_position_embeddings - state.root
        if room < 1:
            # There will be no draft any more.
            state.missing = state.missing[:, :0]
        depth = min(max_depth, self.tree.max_depth, room)
        return depth if state.pace is None else min(depth, state.pace.next_depth())

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """The tokens are the same."""
        return draft_ids

    def to_target_probs(self, probs: Tensor) -> Tensor:
        """``[m, vocab_size]`` -> ``[m, V]``: tokens that the target alone has are never drawn."""
        return functional.pad(probs, (0, self._padding)) if self._padding else probs

    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, H]`` -> ``[n, vocab_size]``."""
        return self.model.logits(hidden)[:, : self.vocab_size]

    def unlikely(self, logits: Tensor, tokens: Tensor) -> list[bool]:
        """Whether each of ``tokens`` ``[n]`` has less than ``min_probability`` by its row of ``logits`` ``[n, V]``."""
        logits = logits.float()
        chosen = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(dim=-1)
        found: list[bool] = (chosen < math.log(self.min_probability)).tolist()
        return found

    def _chain(self, depth: int) -> DraftTree:
        return self.chains[depth] if depth < len(self.chains) else DraftTree.chain(depth)

    def _plan(self, tree: DraftTree, cache: KVCache) -> TreePlan:
        plan = self._plans.get((tree, cache.capacity))
        if plan is None:
            if len(self._plans) > 4 * len(self.chains):
                self._plans.clear()
            model = self.model
            has_full = "full_attention" in model.layer_types
            plan = TreePlan(tree, cache.capacity, model.sliding_window, has_full, model.device)
            self._plans[tree, cache.capacity] = plan
        return plan

    def _run(self, cache: KVCache, tokens: Tensor, plan: TreePlan | None) -> Tensor:
        """Hidden states ``[1, n, H]`` of ``tokens`` after the committed ones, which they join. plan: None = a prompt."""
        length, count = cache.length, tokens.shape[1]
        if plan is None:
            positions, full, sliding = torch.arange(count, device=tokens.device)[None], None, None
        else:
            positions, (full, sliding) = plan.positions(length), plan.masks(length)
        features = self.model.forward_cached(tokens, positions, full, sliding, cache, NO_AUX)
        cache.commit(range(count))
        return features.last_hidden

    def _draft_chain(self, state: DraftRow, hidden: Tensor, depth: int, picker: TokenPicker) -> Proposal:
        step = self._plan(self.chains[0], state.cache)
        tokens: list[Tensor] = []
        for level in range(depth):
            logits = self.logits(hidden[0, -1:])
            tokens.append(picker.ranked(logits, 1)[0])
            if level == depth - 1 or (self.min_probability > 0 and self.unlikely(logits, tokens[-1])[0]):
                break
            hidden = self._run(state.cache, tokens[-1][None], step)
        state.drafted = len(tokens)
        return picker.proposal(torch.cat(tokens), self.chains[len(tokens)])

    def _draft_tree(self, state: DraftRow, hidden: Tensor, levels: _Levels, picker: TokenPicker) -> Proposal:
        plan = self._plan(levels.continued, state.cache)
        positions, masks = plan.positions(state.root), plan.masks(state.root)
        hidden = hidden[0, -1:]
        found: list[Tensor] = []
        inside: list[Tensor] = []
        done = 1
        for parents, ranks, inner in levels.steps:
            best = picker.ranked(self.logits(hidden), levels.tree.max_rank + 1)
            found.append(best[parents, ranks])
            if inner is None:
                break
            end = done + inner.shape[0]
            # A level sees the text, the levels before it as far as they lead to it, and itself.
            full, sliding = (None if mask is None else mask[:, :, done:end, : state.root + end] for mask in masks)
            inside.append(found[-1].index_select(0, inner))
            features = self.model.forward_cached(
                inside[-1][None], positions[:, done:end], full, sliding, state.cache, NO_AUX
            )
            state.cache.commit(range(end - done))
            hidden, done = features.last_hidden[0], end
        state.drafted = levels.tree.max_depth
        state.nodes = levels.continued, torch.cat(inside) if inside else state.missing[0]
        return picker.proposal(torch.cat(found), levels.tree)


class _Levels:
    """Index tensors to draft ``tree`` level by level, and the tree of the nodes that are continued."""

    def __init__(self, tree: DraftTree, device: torch.device) -> None:
        self.tree = tree
        inner = sorted({parent for parent in tree.parents if parent >= 0})
        places = {node: place for place, node in enumerate(inner)} | {-1: -1}
        self.continued = DraftTree(
            tuple(places[tree.parents[node]] for node in inner), tuple(tree.ranks[node] for node in inner)
        )
        self.steps: list[tuple[Tensor, Tensor, Tensor | None]] = []
        """Per level: each node's parent among the nodes that the level before continued, its rank, and which nodes of
        this level are continued (None below them)."""
        above = [-1]
        for nodes in tree.levels:
            parents = torch.tensor([above.index(tree.parents[node]) for node in nodes], device=device)
            ranks = torch.tensor([tree.ranks[node] for node in nodes], device=device)
            above = [node for node in nodes if node in places]
            continued = torch.tensor([nodes.index(node) for node in above], device=device) if above else None
            self.steps.append((parents, ranks, continued))


def draft_model_proposer(config: DraftModelConfig, target: HFTarget) -> DraftModelProposer:
    """The proposer of the settings, its model loaded beside ``target``.

    Raises:
        ConfigError: the vocabularies differ, or the model has fewer layers than asked for.
        CheckpointError, UnsupportedTargetError: the model cannot be loaded or used.
    """
    model = _load(config, target)
    size = check_vocabulary(model, target)
    tree = DraftTree.from_paths(config.tree) if config.tree is not None else None
    if tree is None:
        tree = DraftTree.chain(config.num_draft_tokens or DEFAULT_DEPTH)
    cost = weight_bytes(model) / weight_bytes(target) if config.adaptive else None
    return DraftModelProposer(model, size, tree, config.min_probability, cost, target.spec.vocab_size)


def weight_bytes(model: HFTarget) -> int:
    """What a forward of one token reads: the layers and the lm_head. The cost of two models compares by it."""
    weights = [*model.layout.layers.parameters(), *model.layout.lm_head.parameters()]
    return sum(weight.numel() * weight.element_size() for weight in weights)


def _load(config: DraftModelConfig, target: HFTarget) -> HFTarget:
    if config.name is None:
        num_layers = target.spec.num_hidden_layers
        return first_layers(target, config.layers or max(1, num_layers * 3 // 4))
    dtype = config.dtype or str(target.dtype).removeprefix("torch.")
    settings = TargetConfig(
        name=config.name,
        revision=config.revision,
        dtype=dtype,
        device=str(target.device),
        pack_weights=target.packed is not None,
    )
    try:
        model = load_target(settings)
    except SpecDraftError as error:
        raise type(error)(re.sub(r"\btarget\.(name|revision|dtype)\b", r"proposer.\1", str(error))) from error
    return model if config.layers is None else first_layers(model, config.layers)


def check_vocabulary(model: HFTarget, target: HFTarget) -> int:
    """Rows of the lm_heads that mean the same tokens.

    With both tokenizers at hand their tokens must be the same; the heads may then differ in padding rows. Without, the
    sizes must agree.

    Raises:
        ConfigError: the vocabularies differ.
    """
    sizes = model.spec.vocab_size, target.spec.vocab_size
    name = model.spec.name
    if model.tokenizer is None or target.tokenizer is None:
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"proposer.name: its vocabulary of {sizes[0]} is not the target's of {sizes[1]}, got {name}; "
                "use a model with the target's tokenizer"
            )
    elif model.tokenizer is not target.tokenizer:
        difference = _difference(model.tokenizer, target.tokenizer)
        if difference is not None:
            raise ConfigError(
                f"proposer.name: its vocabulary is not the target's ({difference}), got {name}; "
                "use a model with the target's tokenizer"
            )
    return min(sizes)


def _difference(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> str | None:
    """What differs first between two vocabularies; None when they are equal."""
    first, second = ours.get_vocab(), theirs.get_vocab()
    if len(first) != len(second):
        return f"{len(first)} tokens, not {len(second)}"
    for token, place in second.items():
        if first.get(token) != place:
            return f"{token!r} is {first.get(token, 'missing')}, not {place}"
    return None
