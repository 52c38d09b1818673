"""EAGLE-3 training speed and peak memory, as a ratio in one run against a naive fp32 loop with logits on every position.

    python benchmarks/train_speed.py --data FILE [--target smollm2] [--rounds 3] [--batches 12] [--rows 8] [--threads 2]
        [--sides ours naive]

FILE holds one conversation a line as token ids: {"p": prompt ids, "r": answer ids}. Features of the target are captured
once and kept in memory for both sides, as the peers' figures have it; the online figure (capture included) is printed
too. The sides train the same head on the same batches; each runs in a process of its own, so that its peak memory is
its own, and the rounds alternate. Side ``exact`` is ours without the padding to rounded sizes (``core.shapes``): give it
as many ``--batches`` as make shapes come again.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from specdraft.core import shapes
from specdraft.core.types import DraftBatch, Features, TokenBatch
from specdraft.data.batching import collate
from specdraft.data.prepared import TokenRow
from specdraft.heads._vocab import choose_draft_vocab
from specdraft.heads.base import DraftHead, head_config
from specdraft.losses._config import LossConfig
from specdraft.losses.alignment import align, build_draft_batch
from specdraft.losses.objectives import Objective, Teacher
from specdraft.targets._config import TargetConfig
from specdraft.targets.hf import HFTarget, load_target

STEPS, DRAFT_VOCAB = 5, 8192
SIDES = ("ours", "naive", "exact")


def load_batches(path: str, count: int, size: int, rounded: bool) -> tuple[list[TokenBatch], Tensor]:
    """``count`` micro-batches of ``size`` rows spread over the length-sorted rows, and counts of the answers' tokens."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    rows = sorted((r for r in rows if len(r["r"]) >= 4), key=lambda r: len(r["p"]) + len(r["r"]))
    counts = torch.bincount(torch.tensor([token for r in rows for token in r["r"]]))
    tokens = [TokenRow(r["p"] + r["r"], [False] * len(r["p"]) + [True] * len(r["r"])) for r in rows]
    starts = [i * (len(tokens) - size) // max(count - 1, 1) for i in range(count)]
    places = [list(range(start, start + size)) for start in starts]
    return [collate([tokens[i] for i in of], 0, of, rounded=rounded) for of in places], counts


def build_head(target: HFTarget, counts: Tensor) -> DraftHead:
    """An EAGLE-3 head of five steps over 8,192 tokens."""
    torch.manual_seed(0)
    head = head_config("eagle3", {"num_draft_tokens": STEPS, "draft_vocab_size": DRAFT_VOCAB}).build(target.spec)
    padded = torch.zeros(target.spec.vocab_size, dtype=torch.int64)
    padded[: counts.numel()] = counts
    assert head.vocab is not None
    head.vocab.set_tokens(choose_draft_vocab(padded, DRAFT_VOCAB, target.spec.eos_token_ids))
    head.init_from_target(target.embed, target.unembedding)
    return head.train()


def naive_loss(head: DraftHead, target: HFTarget, batch: DraftBatch, teacher: Teacher) -> Tensor:
    """Every position is unrolled, and draft and teacher logits exist for all of them at once, in fp32."""
    everywhere = replace(batch, anchors=batch.attention_mask.flatten().nonzero().flatten())
    hidden = batch.features.last_hidden.flatten(0, 1).float()
    unembed = replace(teacher.draft_unembed, weight=teacher.draft_unembed.weight.float())
    total = torch.zeros(())
    for k, step in enumerate(head(everywhere, target.embed, target.unembedding)):
        aligned = align(everywhere, step)
        log_q = step.unembed(step.hidden).log_softmax(-1)
        probs = unembed(hidden[aligned.teacher_positions]).softmax(-1)
        assert teacher.label_map is not None
        keep = aligned.valid & (teacher.label_map[aligned.labels] >= 0)
        total = total + 0.8**k * (-(probs * log_q).sum(-1) * keep).sum()
    return total


def measure(side: str, args: argparse.Namespace) -> dict[str, float]:
    """Trains over the batches and returns tokens/s (without the first batches) and the peak memory of this process."""
    torch.set_num_threads(args.threads)
    target = load_target(TargetConfig(name=args.target, dtype="bfloat16"))
    rounded = side == "ours"
    if side == "exact":
        vars(shapes)["padded_size"] = lambda size: size
    batches, counts = load_batches(args.data, args.batches, args.rows, rounded)
    head = build_head(target, counts)
    begin = time.perf_counter()
    features: list[Features] = [target.capture(tokens, head.features()) for tokens in batches]
    capture_s = time.perf_counter() - begin
    objective = Objective(LossConfig())
    teacher = Teacher(target.unembedding, head.draft_unembedding(target.unembedding), head.label_map())
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, fused=True)
    seconds, tokens_seen, warm = 0.0, 0, 2
    for i in [0] * warm + list(range(len(batches))):
        batch = build_draft_batch(batches[i], features[i], rounded)
        begin = time.perf_counter()
        if side != "naive":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = objective(head(batch, target.embed, target.unembedding), batch, teacher).loss_sum
        else:
            loss = naive_loss(head, target, batch, teacher)
        (loss / batch.drafting.sum()).backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if warm:
            warm -= 1
            continue
        seconds += time.perf_counter() - begin
        tokens_seen += int(batch.num_tokens)
    return {
        "tokens_per_s": tokens_seen / seconds,
        "online_tokens_per_s": tokens_seen / (seconds + capture_s),
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def main() -> None:
    """Runs the sides ``--rounds`` times, alternating, and prints medians and the ratio of the first to the last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8, help="of a batch")
    parser.add_argument("--sides", choices=SIDES, nargs="+", default=["ours", "naive"])
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(measure(args.side, args)))
        return
    found: dict[str, list[dict[str, float]]] = {side: [] for side in args.sides}
    for _ in range(args.rounds):
        for side, results in found.items():
            command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            results.append(json.loads(out.splitlines()[-1]))
            print(side, results[-1], flush=True)
    medians = {side: {k: statistics.median(r[k] for r in rs) for k in rs[0]} for side, rs in found.items()}
    ratio = medians[args.sides[0]]["tokens_per_s"] / medians[args.sides[-1]]["tokens_per_s"]
    print(
        json.dumps({"median": medians, "ratio": round(ratio, 2), "threads": args.threads, "torch": torch.__version__})
    )


if __name__ == "__main__":
    main()
