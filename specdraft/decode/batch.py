"""Rows of different lengths decoded together: one target forward a step for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from specdraft.core.errors import DecodeError
from specdraft.core.tree import DraftTree, GrownTree, Proposal
from specdraft.decode.batch_cache import BatchCache, batch_masks
from specdraft.decode.judge import Verdict
from specdraft.decode.plan import TreePlan
from specdraft.decode.result import StepOutput
from specdraft.decode.row import NO_TREE, Row
from specdraft.targets.base import Target

Plans = Callable[[DraftTree | GrownTree, int], TreePlan]


@dataclass(frozen=True)
class Waiting:
    """A row that has not begun: its place among the prompts, and its prompt ``[1, P]``."""

    place: int
    prompt: Tensor
    row: Row


class Batch:
    """Decodes rows together, as many at a time as the cache has slots; a row that ends makes room for the next.

    Every row has its own proposer state, tree, judge and counts, so that its text is the one it has alone. A step has one
    target forward over the widest of the rows' trees and one copy to the host.

    Args:
        target: of all rows.
        cache: empty, of at least ``num_slots`` slots.
        plan: makes what a forward over a tree needs; see ``SpeculativeDecoder.plan``.
        num_slots: rows at a time.
        prefill_chunk: tokens of a prompt run at a time; None = all.
    """

    def __init__(
        self, target: Target, cache: BatchCache, plan: Plans, num_slots: int, prefill_chunk: int | None
    ) -> None:
        self.target = target
        self.cache = cache
        self.num_slots = num_slots
        self.errors: dict[int, DecodeError] = {}
        """By place: why a row could not be decoded to its end."""
        self._plan = plan
        self._prefill_chunk = prefill_chunk
        self._rows: list[Row] = []
        self._places: list[int] = []

    def run(self, waiting: Sequence[Waiting]) -> Iterator[tuple[int, StepOutput]]:
        """What the rows emit, as it comes, with the place of the row."""
        queue = list(reversed(waiting))
        while queue or self._rows:
            while queue and len(self._rows) < self.num_slots:
                yield from self._admit(queue.pop())
            if self._rows:
                yield from self._step()

    @torch.inference_mode()
    def _admit(self, new: Waiting) -> list[tuple[int, StepOutput]]:
        """Runs the prompt of a row into a free slot; a row may fail or end there."""
        self.cache.open_slot()
        try:
            output = new.row.prefill(
                new.prompt, self.cache, self._plan(NO_TREE, self.cache.capacity), self._prefill_chunk
            )
        except DecodeError as error:
            self.errors[new.place] = error
            self.cache.wipe(len(self._rows))
            return []
        if not new.row.result.finish_reason:
            self.cache.close_slot()
            self._rows.append(new.row)
            self._places.append(new.place)
        return [(new.place, output)]

    @torch.inference_mode()
    def _step(self) -> list[tuple[int, StepOutput]]:
        """Drafts for every row, runs the target once, and emits what each row accepted."""
        begin = perf_counter()
        proposals = [row.propose() for row in self._rows]
        drafted = perf_counter()
        plans = [self._plan(NO_TREE if p is None else p.tree, self.cache.capacity) for p in proposals]
        tokens = [
            row.root if p is None else torch.cat([row.root, p.tokens[0]])
            for row, p in zip(self._rows, proposals, strict=True)
        ]
        lengths = list(self.cache.lengths)
        ids, positions, full, sliding = self._inputs(plans, tokens)
        prepared = perf_counter()
        features = self.target.forward_cached(ids, positions, full, sliding, self.cache, self._rows[0].request)
        logits = self.target.logits(_drop_padding(features.last_hidden, plans)).split([plan.size for plan in plans])
        ran = perf_counter()
        verdicts = self._judge(plans, tokens, logits, proposals)
        self.cache.commit_rows([plan.path_rows[v.row] if v else [] for plan, v in zip(plans, verdicts, strict=True)])
        verified = perf_counter()
        outputs = []
        for slot, verdict in enumerate(verdicts):
            if verdict:
                own = features.row(slot)
                output = self._rows[slot].accept(plans[slot], verdict, own, logits[slot], lengths[slot])
                outputs.append((self._places[slot], output))
        end = perf_counter()
        self._share_time(drafted - begin, ran - prepared, verified - ran, prepared - drafted + end - verified)
        self._let_go(verdicts)
        return outputs

    def _inputs(
        self, plans: list[TreePlan], tokens: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Token ids and positions ``[B, n]`` and the masks of a forward over all rows, n the widest tree with its root.

        Padding stands where the root stands and sees what the root sees; nothing sees it.
        """
        lengths = self.cache.lengths
        start = self.cache.open_rows()
        ids = pad_sequence(tokens, batch_first=True)
        size = ids.shape[1]
        device = ids.device
        depths = pad_sequence([plan.depths for plan in plans], batch_first=True)
        ends = torch.tensor(lengths, device=device)
        positions = ends[:, None] + depths
        window = self.target.sliding_window
        if size == 1 and min(lengths) == start and (window is None or start < window):
            return ids, positions, None, None
        if all(plan is plans[0] for plan in plans):
            ancestors = plans[0].ancestors.expand(len(plans), -1, -1)
        else:
            missing = [size - plan.size for plan in plans]
            padded = [F.pad(plan.ancestors, (0, m, 0, m)) for plan, m in zip(plans, missing, strict=True)]
            ancestors = torch.stack(padded)
            ancestors[:, :, 0] = True
        full, sliding = batch_masks(ends, start, depths, ancestors, window)
        return ids, positions, full if "full_attention" in self.target.layer_types else None, sliding

    def _judge(
        self,
        plans: list[TreePlan],
        tokens: list[Tensor],
        logits: Sequence[Tensor],
        proposals: list[Proposal | None],
    ) -> list[Verdict | None]:
        """Every row's outcome, read from the device in one copy; None where the row failed."""
        steps = zip(self._rows, plans, tokens, logits, proposals, strict=True)
        decided = [row.judge.weigh(plan, own, scores, proposal) for row, plan, own, scores, proposal in steps]
        held = torch.cat(decided).tolist()
        verdicts: list[Verdict | None] = []
        for place, row, plan, own in zip(self._places, self._rows, plans, decided, strict=True):
            values, held = held[: own.numel()], held[own.numel() :]
            try:
                verdicts.append(row.judge.read(plan, own, values))
            except DecodeError as error:
                self.errors[place] = error
                verdicts.append(None)
        return verdicts

    def _share_time(self, draft: float, target: float, verify: float, other: float) -> None:
        """Adds the seconds of a step to its rows, in equal parts."""
        share = 1e3 / len(self._rows)
        for row in self._rows:
            for part, seconds in (("draft", draft), ("target", target), ("verify", verify), ("other", other)):
                row.result.time_ms[part] += share * seconds

    def _let_go(self, verdicts: list[Verdict | None]) -> None:
        """Rows that ended or failed leave, from the last on, so that the places of those before them stay."""
        for slot in reversed(range(len(verdicts))):
            if verdicts[slot] is None:
                self.cache.wipe(slot)
            elif not self._rows[slot].result.finish_reason:
                continue
            self.cache.remove(slot)
            self._rows[slot], self._places[slot] = self._rows[-1], self._places[-1]
            del self._rows[-1], self._places[-1]


def _drop_padding(hidden: Tensor, plans: list[TreePlan]) -> Tensor:
    """``[B, n, H]`` -> the rows of the trees one after another; the lm_head is too large to run on padding."""
    _, size, width = hidden.shape
    flat = hidden.reshape(-1, width)
    if all(plan.size == size for plan in plans):
        return flat
    kept = [slot * size + i for slot, plan in enumerate(plans) for i in range(plan.size)]
    return flat.index_select(0, torch.tensor(kept, device=hidden.device))
