"""A smaller causal LM that drafts: its own cache, rolled back in step with what the target accepts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from specdraft.core.errors import ConfigError, SpecDraftError
from specdraft.core.tree import DraftTree, Proposal
from specdraft.core.types import DraftContext, FeatureRequest
from specdraft.decode._proposer_config import DraftModelConfig
from specdraft.decode.cache import KVCache
from specdraft.decode.plan import TreePlan
from specdraft.targets._config import TargetConfig
from specdraft.targets.base import Target
from specdraft.targets.first_layers import first_layers
from specdraft.targets.hf import HFTarget, load_target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_DEPTH = 4
NO_AUX = FeatureRequest()


@dataclass
class DraftRow:
    """State of one row. root: position of the text's last token at the last call, -1 before the first."""

    cache: KVCache
    root: int = -1


class DraftModelProposer:
    """Drafts with the likeliest tokens of another causal LM (Leviathan et al. 2023; Chen et al. 2023).

    A chain keeps the keys and values of what was accepted; the next draft starts with one or two tokens. Of a tree only
    the text's are kept, and the accepted path is run once more, as one chain.

    Args:
        model: the model that drafts, on the target's device.
        vocab_size: tokens that both models have, the first rows of either lm_head.
        tree: shape of the drafts.
        min_probability: a chain ends at a token of a lower probability; 0 = never, and nothing is read from the device.
    """

    def __init__(self, model: Target, vocab_size: int, tree: DraftTree, min_probability: float = 0.0) -> None:
        if tree.max_rank >= vocab_size:
            raise ConfigError(
                f"proposer.tree: rank beyond the vocabulary of {vocab_size}, got {tree.max_rank}; lower it"
            )
        self.model = model
        self.vocab_size = vocab_size
        self.tree = tree
        self.min_probability = min_probability
        self._chains = [DraftTree.chain(depth) for depth in range(tree.max_depth + 1)]
        self._levels = {depth: _Levels(tree.truncate(depth), model.device) for depth in range(1, tree.max_depth + 1)}
        self._plans: dict[tuple[DraftTree, int], TreePlan] = {}

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
        return DraftRow(KVCache(self.model.spec.num_hidden_layers, length + len(self.tree)))

    def propose(self, state: DraftRow, context: DraftContext, max_depth: int) -> Proposal | None:
        """A draft of depth ``max_depth`` at most; None past the draft model's own context."""
        tokens = self._catch_up(state, context)
        depth = min(max_depth, self.tree.max_depth, self.model.spec.max_position_embeddings - state.root)
        if depth < 1:
            return None
        prompt = state.cache.length == 0
        hidden = self._run(state.cache, tokens, None if prompt else self._plan(self._chains_of(tokens), state.cache))
        if not self.tree.is_chain:
            return self._draft_tree(state, hidden, self._levels[depth])
        return self._draft_chain(state, hidden, depth)

    def _catch_up(self, state: DraftRow, context: DraftContext) -> Tensor:
        """Keeps the rows that are part of the text and returns the tokens ``[1, n]`` that lack theirs, the root last."""
        if state.root < 0:
            state.root = len(context.new_ids) - 1
            return torch.tensor([context.new_ids], device=self.model.device)
        accepted = context.next_tokens.shape[1] - 1 if self.tree.is_chain else 0
        state.cache.rollback(min(state.root + 1 + accepted, state.cache.length))
        state.root += context.next_tokens.shape[1]
        return context.next_tokens[:, state.cache.length - state.root - 1 :]

    def _chains_of(self, tokens: Tensor) -> DraftTree:
        """The tree whose root and nodes are ``tokens``, one after the other."""
        count = tokens.shape[1] - 1
        return self._chains[count] if count < len(self._chains) else DraftTree.chain(count)

    def _plan(self, tree: DraftTree, cache: KVCache) -> TreePlan:
        plan = self._plans.get((tree, cache.capacity))
        if plan is None:
            if len(self._plans) > 4 * len(self._chains):
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

    def _logits(self, hidden: Tensor) -> Tensor:
        """``[n, H]`` -> ``[n, vocab_size]``."""
        return self.model.logits(hidden)[:, : self.vocab_size]

    def _draft_chain(self, state: DraftRow, hidden: Tensor, depth: int) -> Proposal | None:
        step = self._plan(self._chains[0], state.cache)
        tokens: list[Tensor] = []
        for level in range(depth):
            logits = self._logits(hidden[0, -1:])
            token = logits.argmax(dim=-1)
            if self.min_probability > 0 and self._is_unlikely(logits):
                break
            tokens.append(token)
            if level < depth - 1:
                hidden = self._run(state.cache, token[None], step)
        return Proposal(torch.cat(tokens)[None], self._chains[len(tokens)]) if tokens else None

    def _is_unlikely(self, logits: Tensor) -> bool:
        """Whether the likeliest of ``logits`` ``[1, V]`` has less than ``min_probability``."""
        logits = logits.float()
        return bool((logits.amax() - logits.logsumexp(dim=-1)).exp() < self.min_probability)

    def _draft_tree(self, state: DraftRow, hidden: Tensor, levels: _Levels) -> Proposal:
        plan = self._plan(levels.continued, state.cache)
        positions, masks = plan.positions(state.root), plan.masks(state.root)
        hidden = hidden[0, -1:]
        found: list[Tensor] = []
        done = 1
        for parents, ranks, inner in levels.steps:
            best = self._logits(hidden).topk(levels.tree.max_rank + 1, dim=-1).indices
            found.append(best[parents, ranks])
            if inner is None:
                break
            end = done + inner.shape[0]
            # A level sees the text, the levels before it as far as they lead to it, and itself.
            full, sliding = (None if mask is None else mask[:, :, done:end, : state.root + end] for mask in masks)
            tokens = found[-1].index_select(0, inner)[None]
            features = self.model.forward_cached(tokens, positions[:, done:end], full, sliding, state.cache, NO_AUX)
            state.cache.commit(range(end - done))
            hidden, done = features.last_hidden[0], end
        return Proposal(torch.cat(found)[None], levels.tree)


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
    return DraftModelProposer(model, size, tree, config.min_probability)


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
