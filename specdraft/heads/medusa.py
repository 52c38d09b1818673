"""Medusa heads: K independent residual predictors on the target's last hidden state, drafted in one parallel pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdraft.core.compiling import StaticGraph, kept
from specdraft.core.errors import ConfigError
from specdraft.core.tree import DraftTree, Proposal, TreeGrowth
from specdraft.core.types import DraftBatch, DraftContext, DraftStep, Embed, FeatureRequest, TargetSpec, Unembedding
from specdraft.heads._config import HeadConfig
from specdraft.heads._dynamic import GrowingTree, likeliest
from specdraft.heads.base import DraftHead, TokenPicker, register_head


# docs: start-head
@register_head("medusa")
@dataclass(slots=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """Settings of Medusa-1 heads; with adapter=lora they are trained as Medusa-2's."""

    num_layers: int = 1
    """Residual blocks per head; each has weights of its own."""
    shared_lm_head: bool = True
    """True: all heads use the target's frozen lm_head. False: each head trains a copy of it (the original layout)."""

    def __post_init__(self) -> None:
        HeadConfig.__post_init__(self)
        if self.num_layers < 1:
            raise ConfigError(f"head.num_layers: must be at least 1, got {self.num_layers}; use 1")

    @property
    def trains_target(self) -> bool:
        """Medusa-2."""
        return True

    @property
    def size_setting(self) -> str | None:
        """The blocks per head."""
        return "num_layers"

    def build(self, spec: TargetSpec) -> MedusaHead:
        """A head with random residual branches that start at zero, so that it first repeats the target's own logits."""
        return MedusaHead(self, spec)


class ResidualBlock(nn.Module):
    """``x + SiLU(W x + b)`` with W = b = 0 at the start (Medusa, section 3.1)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H]`` -> ``[..., H]``."""
        return x + nn.functional.silu(self.linear(x))


class MedusaHead(DraftHead):
    """p_k(. | h_t) = softmax(U r_k(h_t)) predicts token t + k + 2 (k from 0), with r_k the k-th stack of blocks.

    U is the target's lm_head, or one per head. Source: Cai et al. 2024 (Medusa), section 3.1, equation 1.
    """

    grows = True

    def __init__(self, config: MedusaConfig, spec: TargetSpec) -> None:
        super().__init__(config, spec)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(spec.hidden_size) for _ in range(config.num_layers)))
            for _ in range(config.num_draft_tokens)
        )
        rows = config.draft_vocab_size or spec.vocab_size
        count = 0 if config.shared_lm_head else config.num_draft_tokens
        self.lm_heads = nn.ModuleList(nn.Linear(spec.hidden_size, rows, bias=False) for _ in range(count))
        self._graph: StaticGraph | None = None

    def features(self) -> FeatureRequest:
        """Only the last hidden state of the anchors themselves."""
        return FeatureRequest(last="anchors")

    def vocabulary_parameters(self) -> list[str]:
        """The unshared lm_heads."""
        return [f"lm_heads.{k}.weight" for k in range(len(self.lm_heads))]

    def init_from_target(self, embed: Embed, unembed: Unembedding) -> None:
        """Unshared lm_heads start as the target's rows."""
        for lm_head in self.lm_heads:
            lm_head.get_parameter("weight").data.copy_(self.draft_unembedding(unembed).weight)

    def _unembed(self, depth: int, shared: Unembedding) -> Unembedding:
        """The unembedding of head ``depth``; ``shared`` is the target's over the draft vocabulary."""
        if not len(self.lm_heads):
            return shared
        return Unembedding(self.lm_heads[depth].get_parameter("weight"), shared.bias, shared.scale, shared.softcap)

    def forward(self, batch: DraftBatch, embed: Embed, unembed: Unembedding) -> list[DraftStep]:
        """See DraftHead: step k has offset k + 2."""
        hidden = batch.features.last_hidden.flatten(0, 1).index_select(0, batch.anchors).to(self.dtype)
        shared = self.draft_unembedding(unembed)
        drafted = [self.recomputed(block, hidden) for block in self.blocks]
        return [DraftStep(own, k + 2, self._unembed(k, shared)) for k, own in enumerate(drafted)]

    def init_state(self, max_length: int, tree: DraftTree, unembed: Unembedding) -> MedusaState:
        """Medusa keeps nothing between steps but the target's unembedding."""
        self.check_depth(tree)
        return MedusaState(self.draft_unembedding(unembed))

    def propose(self, state: Any, context: DraftContext, embed: Embed, tree: DraftTree) -> Proposal:
        """All depths from the last committed state; node of depth k and rank r is head k's r-th token."""
        return self.propose_batch([state], [context], embed, tree)[0]

    def propose_batch(
        self, states: Sequence[Any], contexts: Sequence[DraftContext], embed: Embed, tree: DraftTree
    ) -> list[Proposal]:
        """See DraftHead: one product with every weight for all rows."""
        drafts = []
        for logits, context in zip(self._logits(states[0], contexts, tree.max_depth), contexts, strict=True):
            picker = TokenPicker(self, context)
            ranked = picker.ranked(logits, tree.max_rank + 1)
            depths, ranks, queries = states[0].node_index(tree, ranked.device)
            drafts.append(picker.proposal(ranked[depths, ranks], tree, queries))
        return drafts

    def grow(self, state: Any, context: DraftContext, embed: Embed, growth: TreeGrowth) -> Proposal:
        """The likeliest paths by the product of the heads' probabilities, which do not depend on each other."""
        return self.grow_batch([state], [context], embed, growth)[0]

    def grow_batch(
        self, states: Sequence[Any], contexts: Sequence[DraftContext], embed: Embed, growth: TreeGrowth
    ) -> list[Proposal]:
        """See DraftHead: one product with every weight for all rows."""
        found = likeliest(self._logits(states[0], contexts, growth.depth), growth.top_k)
        drafts = []
        for tokens, scores in zip(*found, strict=True):
            tree = GrowingTree(growth.total_tokens, tokens.device)
            for depth in range(growth.depth):
                width = tree.tokens.numel() if depth else 1
                tree.extend(tokens[depth].expand(width, -1), scores[depth].expand(width, -1))
            chosen, grown = tree.best(growth.total_tokens)
            drafts.append(Proposal(self.to_target_ids(chosen)[None], grown, finite=tree.finite))
        return drafts

    def _logits(self, state: Any, contexts: Sequence[DraftContext], count: int) -> Tensor:
        """``[B, count, D]``: what the first ``count`` heads say after the last committed position of every row."""
        hidden = torch.cat([context.features.last_hidden[:, -1] for context in contexts]).to(self.dtype)
        if self._graph is None:
            return self._heads(hidden, state.unembed, count)
        return kept(self._graph((), (), hidden, state.unembed, count))

    def compile_pass(self) -> None:
        """See DraftHead: all heads at once."""
        if self._graph is None:
            self._graph = StaticGraph(self.config.kind, self._heads, next(self.parameters()).device)

    def _heads(self, hidden: Tensor, unembed: Unembedding, count: int) -> Tensor:
        """Last states ``[B, H]`` -> what the first ``count`` heads say, ``[B, count, D]``."""
        drafted = torch.stack([block(hidden) for block in self.blocks[:count]], dim=1)
        if self.lm_heads:
            return torch.stack([self._unembed(k, unembed)(drafted[:, k]) for k in range(count)], dim=1)
        logits: Tensor = unembed(drafted.flatten(0, 1)).unflatten(0, (-1, count))
        return logits


# docs: end-head


class MedusaState:
    """Decoding state of one row: the unembedding, and where each node of a tree stands in the table of ranked tokens."""

    def __init__(self, unembed: Unembedding) -> None:
        self.unembed = unembed
        self._index: dict[DraftTree, tuple[Tensor, Tensor, Tensor]] = {}

    def node_index(self, tree: DraftTree, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """int64 depth (from 0) and rank of every node, ``[N]`` each, and depth of the children of every row with some.

        The last is ``[Q]``, the root first.
        """
        if tree not in self._index:
            depths = torch.tensor(tree.depths, device=device) - 1
            queries = torch.tensor([0, *(tree.depths[node] for node in sorted(set(tree.parents)) if node >= 0)])
            self._index[tree] = (depths, torch.tensor(tree.ranks, device=device), queries.to(device))
        return self._index[tree]
