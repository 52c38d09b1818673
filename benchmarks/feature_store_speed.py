"""A feature store against a raw copy of its bytes, and training from it against training with the target in the loop.

    python benchmarks/feature_store_speed.py store --data FOLDER [--target smollm2] [--rows 400] [--rounds 3]
    python benchmarks/feature_store_speed.py train --data FOLDER [--rows 400] [--head eagle3]
    python benchmarks/feature_store_speed.py precision --data FOLDER [--rows 1000] [--steps 400]

FOLDER is prepared data (a folder under outputs/data, made by `specdraft prepare`).

store: bytes a second of writing (checksums and sync included) and of reading by training's shuffled batches (checksums
included), over those of writing and reading the same files one after the other; with the files in the system's cache, and
out of it.
train: tokens a second of the second epoch, online and offline, each in a process of its own.
precision: agreement per depth on rows that were not trained on, of heads trained from stores of every precision, same seed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from specdraft.core.types import FeatureRequest, Features, TokenBatch
from specdraft.data._features_config import PRECISIONS
from specdraft.data.batching import BatchPlan, collate
from specdraft.data.chat import TokenRow
from specdraft.data.feature_store import FeatureStore, store_identity
from specdraft.data.feature_writer import FeatureWriter
from specdraft.data.features import FeatureMemory, StoredRows
from specdraft.data.prepared import load_prepared, token_counts
from specdraft.heads._vocab import choose_draft_vocab
from specdraft.heads.base import DraftHead, head_config
from specdraft.losses._config import LossConfig
from specdraft.losses.alignment import build_draft_batch
from specdraft.losses.objectives import Objective, Teacher
from specdraft.targets._config import TargetConfig
from specdraft.targets.hf import HFTarget, load_target

BLOCK = 8 << 20
BATCH_ROWS = 8
SHARD_BYTES = 64 << 20


class Setting:
    """Target, rows, and a head of one kind."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(args.threads)
        self.target: HFTarget = load_target(TargetConfig(name=args.target, dtype="bfloat16"))
        data = load_prepared(Path(args.data))
        self.manifest = data.manifest
        self.rows: list[TokenRow] = data.rows(range(min(args.rows, len(data))))
        self.counts = token_counts(data, self.target.spec.vocab_size)
        self._captured: dict[FeatureRequest, list[tuple[TokenBatch, Features]]] = {}
        self.plan = BatchPlan(lengths=[len(row.input_ids) for row in self.rows], batch_size=BATCH_ROWS)

    def head(self, kind: str) -> DraftHead:
        """An untrained head over 8,192 tokens, the same each time."""
        torch.manual_seed(0)
        head = head_config(kind, {"num_draft_tokens": 3, "draft_vocab_size": 8192}).build(self.target.spec)
        assert head.vocab is not None
        head.vocab.set_tokens(choose_draft_vocab(self.counts, 8192, self.target.spec.eos_token_ids))
        head.init_from_target(self.target.embed, self.target.unembedding)
        head.init_layer(self.target.last_layer())
        return head.train()

    def of(self, places: list[int] | range) -> list[TokenRow]:
        """Some rows."""
        return [self.rows[place] for place in places]

    def tokens(self, micro_batch: list[list[int]]) -> TokenBatch:
        """A micro-batch of the plan."""
        places = [place for row in micro_batch for place in row]
        return collate(self.of(places), 0, places, [len(row) for row in micro_batch])

    def captured(self, request: FeatureRequest) -> list[tuple[TokenBatch, Features]]:
        """The batches of the first epoch with the target's states, captured once."""
        if request not in self._captured:
            batches = [self.tokens(batch) for step in self.plan.epoch(0) for batch in step]
            self._captured[request] = [(tokens, self.target.capture(tokens, request)) for tokens in batches]
        return self._captured[request]

    def store(self, folder: Path, request: FeatureRequest, precision: str) -> tuple[FeatureStore, float]:
        """A filled store, and the seconds that filling it took, without the target's forward."""
        identity = store_identity(
            self.target.spec, self.target.dtype, request, precision, self.manifest, len(self.rows)
        )
        captured = self.captured(request)
        begin = time.perf_counter()
        writer = FeatureWriter(folder, identity, shard_bytes=SHARD_BYTES)
        store = FeatureStore(folder, identity, self.target.dtype)
        for tokens, features in captured:
            writer.add_batch(tokens, features, store)
        writer.close()
        spent = time.perf_counter() - begin
        store.refresh()
        return store, spent


def forget(paths: list[Path]) -> None:
    """Puts files out of the system's cache."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def raw_read(paths: list[Path]) -> float:
    """Seconds to read files one after the other."""
    buffer = bytearray(BLOCK)
    begin = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - begin


def raw_write(paths: list[Path], folder: Path) -> float:
    """Seconds to write the bytes of files, which are in memory, to as many new files, synced."""
    spent = 0.0
    for path in paths:
        data = memoryview(path.read_bytes())
        copy = folder / "copy"
        begin = time.perf_counter()
        with copy.open("wb", buffering=0) as file:
            for start in range(0, len(data), BLOCK):
                file.write(data[start : start + BLOCK])
            os.fsync(file.fileno())
        spent += time.perf_counter() - begin
        copy.unlink()
    return spent


def measure_store(args: argparse.Namespace) -> None:
    """Prints the ratios of one precision after the other."""
    setting = Setting(args)
    request = setting.head(args.head).features()
    for precision in PRECISIONS:
        ratios: dict[str, list[float]] = {"write": [], "read": [], "read, not in the cache": []}
        rates: dict[str, list[float]] = {name: [] for name in ratios}
        for number in range(args.rounds):
            with tempfile.TemporaryDirectory(dir=args.folder) as name:
                store, wrote = setting.store(Path(name) / "store", request, precision)
                paths = sorted(store.folder.glob("shard-*"))
                size = sum(path.stat().st_size for path in paths)
                plain = raw_write(paths, Path(name))
                batches = [batch for step in setting.plan.epoch(1 + number) for batch in step]
                tokens = [setting.tokens(batch) for batch in batches]

                def read(store: FeatureStore = store, tokens: list[TokenBatch] = tokens) -> float:
                    begin = time.perf_counter()
                    for own in tokens:
                        assert store.read(own) is not None
                    return time.perf_counter() - begin

                found = {"write": (wrote, plain)}
                raw_read(paths)
                found["read"] = (read(), raw_read(paths))
                forget(paths)
                cold = raw_read(paths)
                forget(paths)
                found["read, not in the cache"] = (read(FeatureStore(store.folder, store.identity, store.dtype)), cold)
            for key, (ours, raw) in found.items():
                ratios[key].append(raw / ours)
                rates[key].append(size / ours / 1e9)
        shown = {
            key: f"{statistics.median(v):.2f} of raw, {statistics.median(rates[key]):.2f} GB/s"
            for key, v in ratios.items()
        }
        print(json.dumps({"precision": precision, "MB": round(size / 1e6), **shown}), flush=True)


def fit(
    setting: Setting, head: DraftHead, memory: FeatureMemory, batches: list[list[list[int]]], rows: StoredRows | None
) -> int:
    """Trains on micro-batches; their tokens."""
    objective = Objective(LossConfig())
    teacher = Teacher(setting.target.unembedding, head.draft_unembedding(setting.target.unembedding), head.label_map())
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-4, fused=True)
    seen = 0
    for micro_batch in batches:
        tokens = setting.tokens(micro_batch)
        batch = build_draft_batch(tokens, memory.capture(rows.attach(tokens) if rows is not None else tokens))
        if not batch.anchors.numel():
            continue
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = objective(head(batch, setting.target.embed, setting.target.unembedding), batch, teacher).loss_sum
        (loss / batch.anchors.numel()).backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen += int(batch.num_tokens)
    return seen


def one_side(args: argparse.Namespace) -> None:
    """Prints tokens a second of an epoch after the first."""
    setting = Setting(args)
    head = setting.head(args.head)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        rows = None
        if args.side == "offline":
            rows = StoredRows(setting.store(Path(name), head.features(), args.precision)[0])
        memory = FeatureMemory(setting.target, head.features(), 0)
        batches = [batch for step in setting.plan.epoch(1) for batch in step]
        fit(setting, head, memory, batches[:3], rows)
        begin = time.perf_counter()
        seen = fit(setting, head, memory, batches, rows)
        print(json.dumps({"tokens_per_s": seen / (time.perf_counter() - begin)}))


def measure_training(args: argparse.Namespace) -> None:
    """Runs both sides in turn and prints the ratio of their medians."""
    found: dict[str, list[float]] = {"online": [], "offline": []}
    for _ in range(args.rounds):
        for side, rates in found.items():
            command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            rates.append(json.loads(out.splitlines()[-1])["tokens_per_s"])
            print(side, round(rates[-1]), flush=True)
    medians = {side: statistics.median(rates) for side, rates in found.items()}
    print(json.dumps({"tokens_per_s": medians, "ratio": round(medians["offline"] / medians["online"], 2)}))


@torch.no_grad()
def agreement(setting: Setting, head: DraftHead, held_out: list[list[list[int]]]) -> list[float]:
    """Share of the anchors per depth at which head and text agree, all depths before included, from the target's own states."""
    head.eval()
    teacher = Teacher(setting.target.unembedding, head.draft_unembedding(setting.target.unembedding), head.label_map())
    total = None
    for micro_batch in held_out:
        tokens = setting.tokens(micro_batch)
        batch = build_draft_batch(tokens, setting.target.capture(tokens, head.features()))
        stats = Objective(LossConfig())(
            head(batch, setting.target.embed, setting.target.unembedding), batch, teacher
        ).stats
        total = stats.pack() if total is None else total + stats.pack()
    assert total is not None
    return list(type(stats).unpack(total).agreement)


def measure_precision(args: argparse.Namespace) -> None:
    """Trains a head from a store of every precision and prints what it agrees with on rows it has not seen."""
    setting = Setting(args)
    count = len(setting.rows)
    order = list(range(count))
    random.Random(0).shuffle(order)
    held_out = [[[place] for place in order[start : start + BATCH_ROWS]] for start in range(0, count // 10, BATCH_ROWS)]
    kept = set(order[count // 10 + BATCH_ROWS :])
    batches: list[list[list[int]]] = []
    epoch = 0
    while len(batches) < args.steps:
        for step in setting.plan.epoch(epoch):
            batches += [own for batch in step if (own := [row for row in batch if row[0] in kept])]
        epoch += 1
    for precision in ("online", *PRECISIONS):
        head = setting.head(args.head)
        with tempfile.TemporaryDirectory(dir=args.folder) as name:
            rows = None
            if precision != "online":
                rows = StoredRows(setting.store(Path(name), head.features(), precision)[0])
            memory = FeatureMemory(setting.target, head.features(), 0)
            fit(setting, head, memory, batches[: args.steps], rows)
            found = [round(value, 4) for value in agreement(setting, head, held_out)]
            print(json.dumps({"precision": precision, "steps": args.steps, "agreement": found}), flush=True)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("store", "train", "precision"))
    parser.add_argument("--data", required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--head", default="eagle3")
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--folder", default=None, help="where stores are written; default: the system's temporary folder"
    )
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--side", choices=("online", "offline"))
    args = parser.parse_args()
    if args.what == "store":
        measure_store(args)
    elif args.what == "precision":
        measure_precision(args)
    elif args.side:
        one_side(args)
    else:
        measure_training(args)


if __name__ == "__main__":
    main()
