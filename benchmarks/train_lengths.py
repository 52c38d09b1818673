"""EAGLE-3 training speed and peak memory against the length of rows, and packed rows against padded ones.

    python benchmarks/train_lengths.py [--data FILE] [--target smollm2] [--tokens 4096] [--steps 3] [--threads 2]

Lengths: steps of the same number of tokens as rows of 128 to 2,048 random ids, the second half of each supervised. Packing:
rows as long as the conversations of FILE, one a line as token ids {"p": prompt ids, "r": answer ids}, in steps of about as
many tokens. Steps include the target's forward. Every case runs in a process of its own, so that its peak memory is its
own; what it held before its first step is told, too.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

from specdraft.core.types import TokenBatch
from specdraft.data.batching import BatchPlan, collate
from specdraft.data.chat import TokenRow
from specdraft.heads.base import head_config
from specdraft.losses._config import LossConfig
from specdraft.losses.alignment import build_draft_batch
from specdraft.losses.objectives import Objective, Teacher
from specdraft.targets._config import TargetConfig
from specdraft.targets.hf import HFTarget, load_target

LENGTHS = (128, 256, 512, 1024, 2048)
UNROLL, DRAFT_VOCAB, ROWS = 5, 8192, 8
CAPACITY = 512


def rows_of(lengths: list[tuple[int, int]], vocab_size: int) -> list[TokenRow]:
    """Random ids; each row has so many tokens, the last so many of them supervised."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for length, answer in lengths:
        ids = torch.randint(100, vocab_size, (length,), generator=generator).tolist()
        made.append(TokenRow(ids, [t >= length - answer for t in range(length)]))
    return made


def real_lengths(path: str) -> list[tuple[int, int]]:
    """Tokens of every conversation, and of its answer; those that are longer than ``CAPACITY`` are left out."""
    found = [json.loads(line) for line in Path(path).read_text().splitlines()]
    lengths = [(len(row["p"]) + len(row["r"]), len(row["r"])) for row in found]
    return [pair for pair in lengths if pair[0] <= CAPACITY and pair[1] >= 4]


def batches(case: str, args: argparse.Namespace, vocab_size: int) -> list[TokenBatch]:
    """The steps' batches. case: a length, ``padded`` (as they come), ``bucketed`` (like lengths together) or ``packed``."""
    if case.isdigit():
        length = int(case)
        rows = rows_of([(length, length // 2)] * (args.tokens // length * (args.steps + 1)), vocab_size)
        size = args.tokens // length
        return [collate(rows[i : i + size], 0) for i in range(0, len(rows), size)]
    rows = rows_of(real_lengths(args.data), vocab_size)
    mean = sum(len(row.input_ids) for row in rows) / len(rows)
    packed = case == "packed"
    plan = BatchPlan(
        lengths=[len(row.input_ids) for row in rows],
        batch_size=max(1, args.tokens // CAPACITY if packed else round(args.tokens / mean)),
        capacity=CAPACITY if packed else None,
        bucket=case == "bucketed",
    )
    made = []
    for step in plan.epoch(0):
        for micro in step:
            places = [place for row in micro for place in row]
            made.append(collate([rows[i] for i in places], 0, places, [len(row) for row in micro], rounded=True))
        if len(made) > args.steps:
            break
    return made


def measure(case: str, args: argparse.Namespace) -> dict[str, float]:
    """Trains over the batches of a case; tokens/s without the first step, and memory in GiB.

    With one thread, tokens a second of CPU time hardly depend on what else runs on the machine.
    """
    torch.set_num_threads(args.threads)
    target: HFTarget = load_target(TargetConfig(name=args.target, dtype="bfloat16", pack_weights=False))
    torch.manual_seed(0)
    head = head_config("eagle3", {"num_draft_tokens": UNROLL, "draft_vocab_size": DRAFT_VOCAB}).build(target.spec)
    assert head.vocab is not None
    head.vocab.set_tokens(range(DRAFT_VOCAB))
    head.init_from_target(target.embed, target.unembedding)
    head.train()
    objective = Objective(LossConfig())
    teacher = Teacher(target.unembedding, head.draft_unembedding(target.unembedding), head.label_map())
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, fused=True)
    made = batches(case, args, target.spec.vocab_size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    seconds, cpu_seconds, tokens_seen, positions = 0.0, 0.0, 0, 0
    for number, tokens in enumerate(made):
        begin, cpu_begin = time.perf_counter(), time.process_time()
        batch = build_draft_batch(tokens, target.capture(tokens, head.features()), rounded=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = objective(head(batch, target.embed, target.unembedding), batch, teacher).loss_sum
        (loss / batch.drafting.sum().clamp(min=1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number:
            seconds += time.perf_counter() - begin
            cpu_seconds += time.process_time() - cpu_begin
            tokens_seen += int(tokens.attention_mask.sum())
            positions += tokens.input_ids.numel()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "tokens_per_s": tokens_seen / seconds,
        "tokens_per_cpu_s": tokens_seen / cpu_seconds,
        "padding": 1 - tokens_seen / positions,
        "peak_gib": peak,
        "before_gib": before,
    }


def main() -> None:
    """Runs every case in a process of its own and prints one line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="without it, lengths only")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--case")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(args.case, args)))
        return
    cases = [*map(str, LENGTHS), *(("padded", "bucketed", "packed") if args.data else ())]
    for case in cases:
        command = [sys.executable, __file__, *sys.argv[1:], "--case", case]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        print(case, out.splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
