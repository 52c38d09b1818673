"""Which shape of draft is fastest on this machine: predicted from accuracies and costs, then measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from time import perf_counter
from typing import Any

from specdraft.core.errors import DataError
from specdraft.core.tree import DraftTree, TreeGrowth
from specdraft.core.tree_search import SequoiaTable, expected_length
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.proposers import HeadProposer
from specdraft.decode.result import DecodeResult
from specdraft.eval._config import TuneConfig
from specdraft.eval.accuracies import RankedText, accuracies, rank_text, replay
from specdraft.eval.costs import CostProbe, CostTable
from specdraft.eval.grown import TOP_KS, GrownText, grow_text, growths, replay_grown
from specdraft.eval.shapes import PLAIN, Shape, describe, is_chain, is_plain, num_nodes, shape_json
from specdraft.eval.speed import synchronize
from specdraft.heads.base import DraftHead
from specdraft.targets.hf import HFTarget

MAX_QUERIES = 16
OVERHEAD_PROMPTS = 2
NEARLY = 0.05
"""Shapes whose speeds differ by a smaller share are equally fast, as far as some seconds of measuring can tell."""
WORTH_MEASURING = 0.8
"""A prediction below this share of the best one is not looked into."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """A shape and what is predicted of it, for steps of ``batch_size`` rows."""

    shape: Shape
    acceptance_length: float
    step_ms: float
    batch_size: int = 1

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first ones, per second, of all rows together."""
        return 1e3 * self.batch_size * self.acceptance_length / self.step_ms

    def as_json(self) -> dict[str, Any]:
        """Shape and figures."""
        figures = {"tokens_per_s": self.tokens_per_s, "acceptance_length": self.acceptance_length}
        return {**shape_json(self.shape), **figures, "step_ms": self.step_ms}


def candidate_trees(table: Sequence[Sequence[float]], max_nodes: int) -> list[DraftTree]:
    """Plain decoding, every chain, and the best tree of every size for every bound on the depth; none twice.

    Siblings have the ranks 0, 1, 2, ...: where chance put a lower rank above a higher one, they count as equal.
    """
    depth = len(table)
    table = [list(accumulate(row, min)) for row in table]
    trees = dict.fromkeys([PLAIN, *(DraftTree.chain(k) for k in range(1, depth + 1))])
    best = SequoiaTable(table, max_nodes)
    for bound in range(1, depth + 1):
        for size in range(1, max_nodes + 1):
            tree = best.tree(size, bound)
            if len(tree):
                trees[tree] = None
    return list(trees)


def predict(
    texts: Sequence[RankedText],
    costs: CostTable,
    max_nodes: int,
    num_ranks: int,
    grown: Sequence[GrownText] = (),
    depth: int = 0,
) -> list[Candidate]:
    """Every candidate, the fastest first. Acceptance is that of decoding the texts again; equals go to the smaller.

    texts: of one head, at least one with a position. grown: the same texts where grown trees are compared too, of at most
    ``depth`` levels.
    """
    candidates = []
    for tree in candidate_trees(accuracies(texts, num_ranks), max_nodes):
        length = replay(texts, tree).acceptance_length
        candidates.append(Candidate(tree, length, costs.step(tree), costs.batch_size))
    for growth in growths(depth, max_nodes) if grown else []:
        if all(growth.top_k in text.places for text in grown):
            length = replay_grown(grown, growth).acceptance_length
            candidates.append(Candidate(growth, length, costs.step(growth), costs.batch_size))
    return sorted(candidates, key=lambda candidate: (-candidate.tokens_per_s, num_nodes(candidate.shape)))


def finalists(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """What is measured: plain decoding first, the first ``count`` that draft, the best chain, the best grown tree.

    And the best fixed tree of every depth and the smallest of those that are predicted to be nearly as fast as the first:
    costs are known to a few per cent only, and a shape of few nodes is often as fast as a large one predicted to be faster.
    """
    plain = next(candidate for candidate in candidates if is_plain(candidate.shape))
    drafting = [candidate for candidate in candidates if not is_plain(candidate.shape)]
    chosen = drafting[:count]
    near = [candidate for candidate in drafting if candidate.tokens_per_s >= (1 - NEARLY) * drafting[0].tokens_per_s]
    worth = WORTH_MEASURING * drafting[0].tokens_per_s
    depths: dict[int, Candidate] = {}
    for candidate in drafting:
        if isinstance(candidate.shape, DraftTree) and candidate.tokens_per_s >= worth:
            depths.setdefault(candidate.shape.max_depth, candidate)
    for best in (
        *(depths[depth] for depth in sorted(depths)),
        min(near, key=lambda candidate: num_nodes(candidate.shape)),
        next(candidate for candidate in drafting if is_chain(candidate.shape)),
        next((candidate for candidate in drafting if isinstance(candidate.shape, TreeGrowth)), None),
    ):
        if best is not None and best not in chosen:
            chosen.append(best)
    return [plain, *chosen]


@dataclass
class _Run:
    """A shape as it was measured, pooled over prompts; the first token, the prefill's, counts nowhere."""

    candidate: Candidate
    decoder: SpeculativeDecoder
    tokens: int = 0
    steps: int = 0
    ms: float = 0.0
    identical: int = 0

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.tokens / self.ms if self.ms else 0.0

    @property
    def acceptance_length(self) -> float:
        return self.tokens / self.steps if self.steps else 1.0

    def as_json(self) -> dict[str, Any]:
        rows = self.candidate.batch_size
        return {
            **shape_json(self.candidate.shape),
            "tokens_per_s": self.tokens_per_s,
            "acceptance_length": self.acceptance_length,
            "step_ms": rows * self.ms / self.steps if self.steps else None,
            "predicted_tokens_per_s": self.candidate.tokens_per_s,
            "identical_outputs": self.identical,
        }


def choose(runs: Sequence[_Run]) -> _Run:
    """The fastest; of drafts that are nearly as fast as the fastest draft, the one with the fewest nodes.

    Fewer nodes cost less in what was not measured: other batch sizes, longer contexts, a busier machine.
    """
    fastest = max(runs, key=lambda run: run.tokens_per_s)
    if is_plain(fastest.candidate.shape):
        return fastest
    near = [run for run in runs if run.tokens_per_s >= (1 - NEARLY) * fastest.tokens_per_s]
    drafting = [run for run in near if not is_plain(run.candidate.shape)]
    return min(drafting, key=lambda run: (num_nodes(run.candidate.shape), -run.tokens_per_s))


class Tuner:
    """One target, one head, some prompts: measures what shapes are made of, predicts, and measures the best.

    Args:
        target: the model.
        head: in eval mode, in the target's dtype, on its device.
        prompts: token ids, at least one list.
        config: sizes and repetitions.
        say: gets a line about each part as it is done.
    """

    def __init__(
        self, target: HFTarget, head: DraftHead, prompts: Sequence[list[int]], config: TuneConfig, say: Say
    ) -> None:
        self.target = target
        self.head = head
        self.prompts = prompts
        self.config = config
        self.say = say
        self.num_ranks = min(config.num_ranks, head.config.draft_vocab_size or head.spec.vocab_size)
        self._plain = SpeculativeDecoder(target)
        self._plain_results: list[DecodeResult] = []

    def run(self) -> dict[str, Any]:
        """The body of decode.json: shape, prediction, measurement, and what they rest on.

        Raises:
            DataError: no answer is longer than one token.
        """
        texts = self.rank_texts()
        grown = self.grow_texts()
        costs = self.measure_costs(texts)
        depth = self.head.config.num_draft_tokens
        candidates = predict(texts, costs, self.config.max_nodes, self.num_ranks, grown, depth)
        best = candidates[0]
        self.say(
            f"predicted: {describe(best.shape)}, {best.tokens_per_s:.1f} tokens/s, best of {len(candidates)} shapes"
        )
        runs = self.verify(finalists(candidates, self.config.contenders))
        plain, chosen = runs[0], choose(runs)
        speedup = chosen.tokens_per_s / plain.tokens_per_s
        table = accuracies(texts, self.num_ranks)
        return {
            "shape": shape_json(chosen.candidate.shape),
            "predicted": {
                **chosen.candidate.as_json(),
                "expected_length": self._expected_length(chosen.candidate.shape, table),
                "speedup": chosen.candidate.tokens_per_s / plain.candidate.tokens_per_s,
            },
            "measured": {
                **chosen.as_json(),
                "speedup": speedup,
                "efficiency": speedup / chosen.acceptance_length,
            },
            "verified": [run.as_json() for run in runs],
            "candidates": [candidate.as_json() for candidate in candidates[:10]],
            "accuracies": table,
            "costs": costs.as_json(),
            "num_prompts": len(self.prompts),
            "num_tokens": sum(len(result.tokens) for result in self._plain_results),
        }

    def rank_texts(self) -> list[RankedText]:
        """The target's answers, and at which rank the head has each of their tokens."""
        texts = []
        for prompt in self.prompts:
            result = self._plain.generate(prompt, self.config.max_new_tokens)
            self._plain_results.append(result)
            texts.append(rank_text(self.target, self.head, prompt, result.tokens, self.num_ranks))
        positions = sum(len(text.ranks) for text in texts)
        if not positions:
            raise DataError(
                "tune.prompts: every answer ends at its first token, got nothing to draft; use other prompts"
            )
        shares = ", ".join(f"{sum(row):.0%}" for row in accuracies(texts, self.num_ranks))
        firsts = ", ".join(f"{row[0]:.0%}" for row in accuracies(texts, self.num_ranks))
        self.say(
            f"accuracy by depth over {positions} positions: first choice {firsts}; among the first {self.num_ranks}: {shares}"
        )
        return texts

    @staticmethod
    def _expected_length(shape: Shape, table: Sequence[Sequence[float]]) -> float | None:
        """By the accuracies; None for a grown tree, which they say nothing about."""
        return expected_length(shape, table) if isinstance(shape, DraftTree) else None

    def grow_texts(self) -> list[GrownText]:
        """The same answers with trees grown at each of their positions; none where these are not considered."""
        if not self._grows:
            return []
        size = self.head.config.draft_vocab_size or self.head.spec.vocab_size
        rows = zip(self.prompts, self._plain_results, strict=True)
        return [grow_text(self.target, self.head, prompt, result.tokens, size) for prompt, result in rows]

    @property
    def _grows(self) -> bool:
        return self.config.dynamic and self.head.grows and self.head.config.num_draft_tokens > 1

    def measure_costs(self, texts: Sequence[RankedText]) -> CostTable:
        """Prices at the length that rows have on the average, and what a step takes beside its two forwards."""
        length = int(median(text.prompt_length + len(text.ranks) // 2 for text in texts))
        longest = max(self.prompts, key=len)
        context = (longest * (-(-max(length, 8) // len(longest))))[: max(length, 8)]
        rows = self.config.batch_size
        probe = CostProbe(self.target, self.head, context, self.config.max_nodes, rows)
        depth, size = self.head.config.num_draft_tokens, self.head.config.draft_vocab_size or self.head.spec.vocab_size
        levels = [(levels, top_k) for levels in range(2, depth + 1) for top_k in TOP_KS if top_k <= size]
        measured = probe.measure(
            min(MAX_QUERIES, self.config.max_nodes),
            self.config.rounds,
            self.config.seed,
            levels if self._grows else [],
        )
        costs = CostTable(
            target_ms=measured["target_ms"],
            chain_ms=measured["chain_ms"],
            level_ms=measured["level_ms"],
            step_ms=self._beside_forwards(DraftTree.chain(depth)),
            plain_ms=self._beside_forwards(PLAIN),
            grown_ms=measured["grown_ms"],
            grown_step_ms=self._beside_forwards(TreeGrowth(depth, min(4, size), 4)) if self._grows else 0.0,
            batch_size=rows,
        )
        target = ", ".join(f"{size}: {ms:.1f}" for size, ms in costs.target_ms.items())
        self.say(f"target forward by tokens, ms: {target}")
        self.say(f"draft by depth, ms: {', '.join(f'{size}: {ms:.2f}' for size, ms in costs.chain_ms.items())}")
        return costs

    def verify(self, chosen: Sequence[Candidate]) -> list[_Run]:
        """Decodes every prompt with each of the shapes, in an order that turns from prompt to prompt."""
        runs = []
        for candidate in chosen:
            runs.append(_Run(candidate, self._decoder(candidate.shape)))
            self._decode(runs[-1].decoder, [0], min(self.config.max_new_tokens, 16))
        rows = self.config.batch_size
        for index, places in enumerate(batches(len(self.prompts), rows)):
            for run in (*runs[index % len(runs) :], *runs[: index % len(runs)]):
                synchronize(self.target.device)
                begin = perf_counter()
                results = self._decode(run.decoder, places, self.config.max_new_tokens)
                synchronize(self.target.device)
                run.ms += 1e3 * (perf_counter() - begin) - sum(result.time_ms["prefill"] for result in results)
                for place, result in zip(places, results, strict=True):
                    run.tokens += result.step_tokens
                    run.steps += result.num_steps
                    run.identical += result.tokens == self._plain_results[place].tokens
        for run in runs:
            self.say(
                f"measured: {describe(run.candidate.shape)}, {run.tokens_per_s:.1f} tokens/s "
                f"({run.candidate.tokens_per_s:.1f} predicted), acceptance length {run.acceptance_length:.2f}"
            )
        return runs

    def _decoder(self, shape: Shape) -> SpeculativeDecoder:
        proposer = None if is_plain(shape) else HeadProposer(self.head, self.target, shape)
        return SpeculativeDecoder(self.target, proposer)

    def _decode(self, decoder: SpeculativeDecoder, places: Sequence[int], length: int) -> list[DecodeResult]:
        """Decodes the prompts at ``places``, together where the tuning is for more than one row."""
        prompts = [self.prompts[place] for place in places]
        if self.config.batch_size == 1:
            return [decoder.generate(prompt, length) for prompt in prompts]
        return decoder.generate_batch(prompts, length, max_batch_size=self.config.batch_size)

    def _beside_forwards(self, shape: Shape) -> float:
        """Milliseconds of a step that are neither target nor draft. The first batch of prompts warms up."""
        decoder, rows = self._decoder(shape), self.config.batch_size
        chosen = batches(len(self.prompts), rows)[: OVERHEAD_PROMPTS + 1]
        decoded = [self._decode(decoder, places, self.config.max_new_tokens) for places in chosen]
        results = [result for rest in decoded[1:] or decoded for result in rest]
        steps = sum(result.num_steps for result in results)
        return rows * sum(result.time_ms[part] for result in results for part in ("verify", "other")) / max(steps, 1)


def batches(count: int, size: int) -> list[list[int]]:
    """Places of ``count`` prompts, ``size`` at a time and each at least once; full ones, and at least two of more than one."""
    number = -(-count // size)
    if size > 1:
        number = max(number, 2)
    return [[(i * size + j) % count for j in range(size)] for i in range(number)]
