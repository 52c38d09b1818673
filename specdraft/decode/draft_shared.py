"""Rows of one draft model that run together: their keys lie in one cache, and every forward is one for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdraft.core.tree import Proposal
from specdraft.core.types import DraftContext, FeatureRequest
from specdraft.decode.batch_cache import BatchCache, batch_masks
from specdraft.decode.cache import KVCache
from specdraft.heads.base import TokenPicker

if TYPE_CHECKING:
    from specdraft.decode.draft_model import DraftModelProposer, DraftRow

CAPACITY_STEP = 256


class SharedRows:
    """Drafts chains for several rows at a time. The keys of a row move here when it first drafts beside others.

    Args:
        proposer: the draft model.
    """

    def __init__(self, proposer: DraftModelProposer) -> None:
        self._proposer = proposer
        self._num_layers = proposer.model.spec.num_hidden_layers
        self._rows: list[DraftRow] = []
        self._cache = BatchCache(self._num_layers, 0, 0)

    def propose(
        self, states: Sequence[DraftRow], contexts: Sequence[DraftContext], max_depths: Sequence[int]
    ) -> list[Proposal | None]:
        """See ``DraftModelProposer.propose_batch``. A prompt runs alone, and so does the draft behind it."""
        found: list[Proposal | None] = [None] * len(states)
        together = [i for i, state in enumerate(states) if state.filled]
        for i in sorted(set(range(len(states))) - set(together)):
            found[i] = self._proposer.propose(states[i], contexts[i], max_depths[i])
        depths = {}
        for i in together:
            states[i].take_in(contexts[i])
            depths[i] = self._proposer.depth(states[i], max_depths[i])
        self._gather([states[i] for i in together])
        drafting = [i for i in together if depths[i]]
        if drafting:
            pickers = [TokenPicker(self._proposer, contexts[i]) for i in drafting]
            drafts = self._draft([states[i] for i in drafting], pickers, [depths[i] for i in drafting])
            for i, draft in zip(drafting, drafts, strict=True):
                found[i] = draft
        return found

    def release(self, state: DraftRow) -> None:
        """Moves the keys of a row back to its own cache, those of its last draft included."""
        slot = self._rows.index(state)
        self._cache.store.slots = (slot, 1)
        self._cache.store.length = self._cache.lengths[slot]
        _copy(self._cache, state.cache, self._num_layers)
        self._cache.remove(slot)
        state.shared = None
        self._rows[slot] = self._rows[-1]
        del self._rows[-1]

    def _gather(self, states: Sequence[DraftRow]) -> None:
        """Makes ``states`` the rows that are here, with the keys of their text alone."""
        for state in [row for row in self._rows if row not in states]:
            self.release(state)
        needed = max((state.capacity + state.missing.shape[1] for state in states), default=0)
        if needed > self._cache.capacity or len(states) > self._cache.num_slots:
            for state in list(self._rows):
                self.release(state)
            capacity = -(-needed // CAPACITY_STEP) * CAPACITY_STEP
            self._cache = BatchCache(self._num_layers, capacity, len(states))
        for state in states:
            if state.shared is None:
                self._cache.open_slot()
                _copy(state.cache, self._cache, self._num_layers)
                self._cache.close_slot()
                # A new one, which takes no memory until it is written to.
                state.cache = KVCache(self._num_layers, state.capacity)
                state.shared = self
                self._rows.append(state)
        for slot, state in enumerate(self._rows):
            self._cache.lengths[slot] = state.filled

    def _draft(self, states: list[DraftRow], pickers: list[TokenPicker], depths: list[int]) -> list[Proposal]:
        """Drafts for some of the rows that are here; a forward runs all of them, which costs no more."""
        proposer = self._proposer
        slots = [self._rows.index(state) for state in states]
        hidden = self._run({slot: state.missing[0] for slot, state in zip(slots, states, strict=True)})
        tokens: list[list[Tensor]] = [[] for _ in states]
        for state in states:
            state.ran()
        going = list(range(len(states)))
        while going:
            logits = proposer.logits(hidden)
            for place, i in enumerate(going):
                tokens[i].append(pickers[i].ranked(logits[place : place + 1], 1)[0])
            ended = [len(tokens[i]) == depths[i] for i in going]
            if proposer.min_probability > 0:
                unlikely = proposer.unlikely(logits, torch.cat([tokens[i][-1] for i in going]))
                ended = [was or now for was, now in zip(ended, unlikely, strict=True)]
            going = [i for i, end in zip(going, ended, strict=True) if not end]
            if going:
                hidden = self._run({slots[i]: tokens[i][-1] for i in going})
        drafts = []
        for state, picker, own in zip(states, pickers, tokens, strict=True):
            state.drafted = len(own)
            drafts.append(picker.proposal(torch.cat(own), proposer.chains[len(own)]))
        return drafts

    def _run(self, tokens: dict[int, Tensor]) -> Tensor:
        """Runs tokens ``[n]`` by slot, each behind its own row; hidden states ``[len(tokens), H]`` after the last ones."""
        model, cache = self._proposer.model, self._cache
        device = model.device
        nothing = torch.zeros(1, dtype=torch.int64, device=device)
        ids = pad_sequence([tokens.get(slot, nothing) for slot in range(len(self._rows))], batch_first=True)
        size = ids.shape[1]
        lengths, start = list(cache.lengths), cache.open_rows()
        ends, depths = torch.tensor(lengths, device=device), torch.arange(size, device=device)
        # What stands behind the tokens of a row is seen by none of them, and must only have a position.
        positions = (ends[:, None] + depths).clamp(max=model.spec.max_position_embeddings - 1)
        window = model.sliding_window
        full, sliding = None, None
        if size > 1 or min(lengths) < start or (window is not None and start >= window):
            own = (depths[:, None] >= depths).expand(len(lengths), -1, -1)
            full, sliding = batch_masks(ends, start, depths.expand(len(lengths), -1), own, window)
            full = full if "full_attention" in model.layer_types else None
        features = model.forward_cached(ids, positions, full, sliding, cache, FeatureRequest())
        counts = [tokens[slot].numel() if slot in tokens else 0 for slot in range(len(self._rows))]
        cache.commit_rows([list(range(count)) for count in counts])
        places = torch.tensor([[slot, own.numel() - 1] for slot, own in tokens.items()], device=device)
        return features.last_hidden[places[:, 0], places[:, 1]]


def _copy(source: KVCache, target: KVCache, num_layers: int) -> None:
    """Puts the committed rows of ``source`` behind those of ``target``."""
    some = next(iter(source.store.tensors.values()))
    # Adding no rows to a layer gives the rows that it has.
    nothing = some.new_empty(1, 1, 0, 1)
    for layer in range(num_layers):
        target.update(*source.update(nothing, nothing, layer), layer)
    target.commit(range(source.length))
