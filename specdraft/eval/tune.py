"""Which shape of draft is fastest on this machine: predicted from accuracies and costs, then measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from time import perf_counter
from typing import Any

from specdraft.core.errors import DataError
from specdraft.core.tree import DraftTree
from specdraft.core.tree_search import SequoiaTable, expected_length
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.proposers import HeadProposer
from specdraft.decode.result import DecodeResult
from specdraft.eval._config import TuneConfig
from specdraft.eval.accuracies import RankedText, accuracies, rank_text, replay
from specdraft.eval.costs import CostProbe, CostTable
from specdraft.eval.speed import synchronize
from specdraft.heads.base import DraftHead
from specdraft.targets.hf import HFTarget

PLAIN = DraftTree((), ())
MAX_QUERIES = 16
OVERHEAD_PROMPTS = 2
Say = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """A shape and what is predicted of it. tree: empty for plain decoding."""

    tree: DraftTree
    acceptance_length: float
    step_ms: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first one, per second."""
        return 1e3 * self.acceptance_length / self.step_ms

    def as_json(self) -> dict[str, Any]:
        """Shape and figures."""
        figures = {"tokens_per_s": self.tokens_per_s, "acceptance_length": self.acceptance_length}
        return {**shape_json(self.tree), **figures, "step_ms": self.step_ms}


def is_chain(tree: DraftTree) -> bool:
    """Whether ``tree`` is what ``decode.num_draft_tokens`` gives: a path of likeliest tokens, at least one."""
    return bool(len(tree)) and tree == DraftTree.chain(len(tree))


def shape_json(tree: DraftTree) -> dict[str, Any]:
    """A shape as decode.json has it: ``plain``, or the settings of ``decode`` that give it."""
    chain = is_chain(tree)
    return {
        "plain": not len(tree),
        "num_draft_tokens": len(tree) if chain else None,
        "tree": tree.paths() if len(tree) and not chain else None,
    }


def describe(tree: DraftTree) -> str:
    """A shape in words."""
    if not len(tree):
        return "plain decoding"
    return f"a chain of {len(tree)}" if is_chain(tree) else f"a tree of {len(tree)} nodes and depth {tree.max_depth}"


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


def predict(texts: Sequence[RankedText], costs: CostTable, max_nodes: int, num_ranks: int) -> list[Candidate]:
    """Every candidate, the fastest first. Acceptance is that of decoding the texts again; equals go to the smaller.

    texts: of one head, at least one with a position.
    """
    candidates = []
    for tree in candidate_trees(accuracies(texts, num_ranks), max_nodes):
        step_ms = costs.step(tree) if len(tree) else costs.plain
        candidates.append(Candidate(tree, replay(texts, tree).acceptance_length, step_ms))
    return sorted(candidates, key=lambda candidate: (-candidate.tokens_per_s, len(candidate.tree)))


def finalists(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """What is measured: the first ``count`` that draft, the best chain, and plain decoding, which stands first."""
    plain = next(candidate for candidate in candidates if not len(candidate.tree))
    drafting = [candidate for candidate in candidates if len(candidate.tree)]
    best_chain = next(candidate for candidate in drafting if is_chain(candidate.tree))
    chosen = drafting[:count]
    return [plain, *chosen, *([] if best_chain in chosen else [best_chain])]


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

    def as_json(self) -> dict[str, Any]:
        return {
            **shape_json(self.candidate.tree),
            "tokens_per_s": self.tokens_per_s,
            "acceptance_length": self.tokens / self.steps if self.steps else 1.0,
            "step_ms": self.ms / self.steps if self.steps else None,
            "predicted_tokens_per_s": self.candidate.tokens_per_s,
            "identical_outputs": self.identical,
        }


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
        costs = self.measure_costs(texts)
        candidates = predict(texts, costs, self.config.max_nodes, self.num_ranks)
        best = candidates[0]
        self.say(
            f"predicted: {describe(best.tree)}, {best.tokens_per_s:.1f} tokens/s, best of {len(candidates)} shapes"
        )
        runs = self.verify(finalists(candidates, self.config.contenders))
        plain, chosen = runs[0], max(runs, key=lambda run: run.tokens_per_s)
        table = accuracies(texts, self.num_ranks)
        return {
            "shape": shape_json(chosen.candidate.tree),
            "predicted": {
                **chosen.candidate.as_json(),
                "expected_length": expected_length(chosen.candidate.tree, table),
                "speedup": chosen.candidate.tokens_per_s / plain.candidate.tokens_per_s,
            },
            "measured": {**chosen.as_json(), "speedup": chosen.tokens_per_s / plain.tokens_per_s},
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

    def measure_costs(self, texts: Sequence[RankedText]) -> CostTable:
        """Prices at the length that rows have on the average, and what a step takes beside its two forwards."""
        length = int(median(text.prompt_length + len(text.ranks) // 2 for text in texts))
        longest = max(self.prompts, key=len)
        context = (longest * (-(-max(length, 8) // len(longest))))[: max(length, 8)]
        probe = CostProbe(self.target, self.head, context, self.config.max_nodes)
        measured = probe.measure(min(MAX_QUERIES, self.config.max_nodes), self.config.rounds, self.config.seed)
        drafting = SpeculativeDecoder(self.target, HeadProposer(self.head, self.target))
        results = [
            drafting.generate(prompt, self.config.max_new_tokens) for prompt in self.prompts[: OVERHEAD_PROMPTS + 1]
        ]
        costs = CostTable(
            target_ms=measured["target_ms"],
            chain_ms=measured["chain_ms"],
            level_ms=measured["level_ms"],
            step_ms=_beside_forwards(results[1:] or results),
            plain_ms=_beside_forwards(self._plain_results),
        )
        target = ", ".join(f"{size}: {ms:.1f}" for size, ms in costs.target_ms.items())
        self.say(f"target forward by tokens, ms: {target}")
        self.say(f"draft by depth, ms: {', '.join(f'{size}: {ms:.2f}' for size, ms in costs.chain_ms.items())}")
        return costs

    def verify(self, chosen: Sequence[Candidate]) -> list[_Run]:
        """Decodes every prompt with each of the shapes, in an order that turns from prompt to prompt."""
        runs = []
        for candidate in chosen:
            proposer = HeadProposer(self.head, self.target, candidate.tree) if len(candidate.tree) else None
            runs.append(_Run(candidate, SpeculativeDecoder(self.target, proposer)))
            runs[-1].decoder.generate(self.prompts[0], min(self.config.max_new_tokens, 16))
        for index, (prompt, known) in enumerate(zip(self.prompts, self._plain_results, strict=True)):
            for run in (*runs[index % len(runs) :], *runs[: index % len(runs)]):
                synchronize(self.target.device)
                begin = perf_counter()
                result = run.decoder.generate(prompt, self.config.max_new_tokens)
                synchronize(self.target.device)
                run.ms += 1e3 * (perf_counter() - begin) - result.time_ms["prefill"]
                run.tokens += result.step_tokens
                run.steps += result.num_steps
                run.identical += result.tokens == known.tokens
        for run in runs:
            self.say(
                f"measured: {describe(run.candidate.tree)}, {run.tokens_per_s:.1f} tokens/s "
                f"({run.candidate.tokens_per_s:.1f} predicted), acceptance length {run.tokens / max(run.steps, 1):.2f}"
            )
        return runs


def _beside_forwards(results: Sequence[DecodeResult]) -> float:
    """Milliseconds of a step that are neither target nor draft."""
    steps = sum(result.num_steps for result in results)
    return sum(result.time_ms[part] for result in results for part in ("verify", "other")) / max(steps, 1)
