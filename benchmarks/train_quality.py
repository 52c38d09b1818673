"""Acceptance against minutes of training: a head on a fixed set of answers, by the trainer that ``specdraft train`` runs.

    python benchmarks/train_quality.py --train FILE --test FILE --minutes 20 [--every 200] [--out FOLDER] [--threads 2]
        [--head JSON] [--optim JSON] [--loss JSON] [--trainer JSON] [--batch-size 2] [--prompts-too]

The files hold one greedy answer of the target a line as token ids: {"p": prompt ids, "r": answer ids}. The clock counts
all of training, the target's forwards of the first epoch included, and stops while acceptance is measured. It is the
chain acceptance length over all places of the test answers, 1 + the mean number of drafted tokens that equal the text,
which for greedy answers is what decoding accepts. Nothing is chosen by it: the head that counts is the last one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from specdraft.core.types import Features, TokenBatch
from specdraft.data.batching import BatchPlan, collate
from specdraft.data.prepared import TokenRow
from specdraft.heads._vocab import choose_draft_vocab
from specdraft.heads.base import DraftHead, head_config
from specdraft.losses._config import LossConfig
from specdraft.losses.alignment import build_draft_batch
from specdraft.losses.objectives import Objective
from specdraft.targets._config import TargetConfig
from specdraft.targets.hf import HFTarget, load_target
from specdraft.train._config import OptimConfig, TrackerConfig, TrainerConfig
from specdraft.train.inputs import TrainInputs, make_accelerator
from specdraft.train.loop import train
from specdraft.train.state import EvalPoint
from specdraft.train.trackers import build_tracker

TEST_ROWS = 16


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--target", default="smollm2", help="Hub id, folder, or smollm2")
    parser.add_argument("--kind", default="eagle3")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--every", type=int, default=400, help="optimizer steps between measurements")
    parser.add_argument("--batch-size", type=int, default=2, help="answers of an optimizer step")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="0 = no reduced vocabulary")
    parser.add_argument("--steps", type=int, default=5, help="depth of the drafts")
    for name in ("head", "optim", "loss", "trainer"):
        parser.add_argument(f"--{name}", type=json.loads, default={}, help="settings that differ, as JSON")
    parser.add_argument("--prompts-too", action="store_true", help="the loss is on the prompts' tokens too")
    parser.add_argument("--out", help="receives the heads; by default a temporary folder")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def load_rows(path: str, prompts_too: bool) -> list[TokenRow]:
    """The answers of at least four tokens; the mask is True on them, or on everything but a row's first token."""
    rows = []
    for line in Path(path).read_text().splitlines():
        pair = json.loads(line)
        if len(pair["r"]) < 4:
            continue
        first = 1 if prompts_too else len(pair["p"])
        ids = pair["p"] + pair["r"]
        rows.append(TokenRow(ids, [place >= first for place in range(len(ids))]))
    return rows


def build_head(args: argparse.Namespace, target: HFTarget, rows: list[TokenRow]) -> DraftHead:
    """The head as ``specdraft train`` would make it: vocabulary by counts, lm_head and layer from the target."""
    torch.manual_seed(0)
    settings = {"num_draft_tokens": args.steps, "draft_vocab_size": args.draft_vocab or None, **args.head}
    head = head_config(args.kind, settings).build(target.spec)
    if head.vocab is not None:
        answered = [token for row in rows for token, on in zip(row.input_ids, row.loss_mask, strict=True) if on]
        counts = torch.bincount(torch.tensor(answered), minlength=target.spec.vocab_size)
        head.vocab.set_tokens(choose_draft_vocab(counts, args.draft_vocab, target.spec.eos_token_ids))
    head.init_from_target(target.embed, target.unembedding)
    print(f"{args.kind}, {head.num_parameters:,} parameters; {head.init_layer(target.last_layer()) or 'no layer'}")
    return head


class Chain:
    """Chain acceptance of the test answers, from features that are captured once; keeps the curve."""

    def __init__(self, target: HFTarget, head: DraftHead, objective: Objective, rows: list[TokenRow]) -> None:
        self.target, self.objective = target, objective
        order = sorted(range(len(rows)), key=lambda i: len(rows[i].input_ids))
        starts = range(0, len(order), TEST_ROWS)
        self.batches: list[TokenBatch] = [
            collate([rows[i] for i in order[s : s + TEST_ROWS]], 0, order[s : s + TEST_ROWS]) for s in starts
        ]
        self.features: list[Features] = [target.capture(batch, head.features()) for batch in self.batches]
        self.curve: list[tuple[float, list[float]]] = []
        self.begin, self.paused_s = 0.0, 0.0

    def start(self, run: TrainInputs) -> None:
        """Training begins."""
        self.teacher = run.teacher()
        self.begin = time.perf_counter()

    @torch.no_grad()
    def __call__(self, head: DraftHead) -> EvalPoint:
        """The prefix of every drafted chain that equals the text, pooled over all places of all answers."""
        now = time.perf_counter()
        minutes = (now - self.begin - self.paused_s) / 60
        hits, places = torch.zeros(head.config.num_draft_tokens, dtype=torch.float64), 0.0
        for batch, features in zip(self.batches, self.features, strict=True):
            drafted = build_draft_batch(batch, features)
            steps = head.draft_steps(drafted, self.target.embed, self.target.unembedding)
            stats = self.objective(steps, drafted, self.teacher).stats
            hits += stats.prefix_hits
            places += float(stats.counts[0])
        survival = (hits / places).tolist()
        self.curve.append((minutes, survival))
        self.paused_s += time.perf_counter() - now
        before = [1.0, *survival[:-1]]
        rates = [now / above if above else 0.0 for now, above in zip(survival, before, strict=True)]
        return EvalPoint(1 + sum(survival), rates, int(places), int(places * (1 + sum(survival))))


def show(curve: list[tuple[float, list[float]]], title: str) -> None:
    """One line for each measurement."""
    table = Table(title=title, box=box.MARKDOWN)
    for name in ("minutes", "acceptance length", "accepted down to each depth"):
        table.add_column(name, justify="right")
    for minutes, survival in curve:
        table.add_row(f"{minutes:.1f}", f"{1 + sum(survival):.3f}", " ".join(f"{share:.3f}" for share in survival))
    Console(width=150).print(table)


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    target = load_target(TargetConfig(name=args.target, dtype="bfloat16"))
    rows, test = load_rows(args.train, args.prompts_too), load_rows(args.test, False)
    head = build_head(args, target, load_rows(args.train, False))
    objective = Objective(LossConfig(**args.loss))
    settings = {"max_minutes": args.minutes, "feature_memory_gib": 4.0, "log_every": 50, "eval_every": args.every}
    trainer = TrainerConfig(**{**settings, **args.trainer})
    accelerator = make_accelerator(trainer)
    measure = Chain(target, head, objective, test)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.out or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        run = TrainInputs(
            accelerator=accelerator,
            target=target,
            head=head,
            objective=objective,
            rows=lambda places: [rows[i] for i in places],
            plan=BatchPlan(lengths=[len(row.input_ids) for row in rows], batch_size=args.batch_size),
            pad_id=0,
            optim=OptimConfig(**args.optim),
            trainer=trainer,
            tracker=build_tracker(TrackerConfig(), folder, True),
            folder=folder,
            settings={"trainer": asdict(trainer)},
            provenance={},
            evaluate=measure,
        )
        measure.start(run)
        result = train(run)
        state = result.state
        print(
            f"{state.step} steps, {state.tokens:,} tokens, {state.tokens / state.seconds:,.0f} tokens/s, "
            f"{state.seconds / 60:.1f} minutes of training, peak memory {result.totals['peak_memory_gib']:.2f} GiB"
        )
        given = {name: getattr(args, name) for name in ("head", "optim", "loss", "trainer") if getattr(args, name)}
        show(
            measure.curve,
            f"{args.kind}, batch of {args.batch_size}, {args.threads} threads, settings {json.dumps(given)}",
        )


if __name__ == "__main__":
    main()
