"""A feature store against a raw copy of its bytes, and training from it against training with the target in the loop.

    python benchmarks/feature_store_speed.py store --data FOLDER [--target smollm2] [--rows 400] [--rounds 3]
    python benchmarks/feature_store_speed.py train --data FOLDER [--rows 400] [--head eagle3]
    python benchmarks/feature_store_speed.py precision --data FOLDER [--rows 1000] [--steps 400]

FOLDER is prepared data (a folder under outputs/data, made by `specdraft prepare`).

store: bytes a second of writing (checksums and sync included) and of reading by training's shuffled batches (checksums
included), over those of writing, reading and copying the same files one after the other; with the files in the system's
cache, and out of it.
train: tokens a second of training, online and offline once the store is there, each in a process of its own.
precision: agreement per depth on rows that were not trained on, of heads trained from stores of every precision, same seed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
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
from specdraft.data.features import StoredRows
from specdraft.data.prepared import load_prepared, token_counts
from specdraft.heads._vocab import choose_draft_vocab
from specdraft.heads.base import DraftHead, head_config
from specdraft.losses._config import LossConfig
from specdraft.losses.alignment import build_draft_batch
from specdraft.losses.metrics import StepStats
from specdraft.losses.objectives import Objective, Teacher
from specdraft.targets._config import TargetConfig
from specdraft.targets.hf import HFTarget, load_target
from specdraft.train._config import OptimConfig, TrackerConfig, TrainerConfig
from specdraft.train.inputs import TrainInputs, make_accelerator
from specdraft.train.loop import train
from specdraft.train.trackers import build_tracker

BLOCK = 8 << 20
SHARD_BYTES = 64 << 20
HELD_OUT = 100
"""Rows at the end of the data that no head is trained on."""


class Setting:
    """Target, rows, and a head of one kind."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(args.threads)
        self.target: HFTarget = load_target(TargetConfig(name=args.target, dtype="bfloat16"))
        data = load_prepared(Path(args.data))
        self.manifest = data.manifest
        self.rows: list[TokenRow] = data.rows(range(min(args.rows, len(data) - HELD_OUT)))
        self.held_out: list[TokenRow] = data.rows(range(len(data) - HELD_OUT, len(data)))
        self.counts = token_counts(data, self.target.spec.vocab_size)
        self._captured: dict[FeatureRequest, list[tuple[TokenBatch, Features]]] = {}
        self.depth, self.vocabulary = args.depth, args.vocabulary
        self.plan = BatchPlan(lengths=[len(row.input_ids) for row in self.rows], batch_size=args.batch_rows)

    def head(self, kind: str) -> DraftHead:
        """An untrained head, the same each time."""
        torch.manual_seed(0)
        settings = {"num_draft_tokens": self.depth, "draft_vocab_size": self.vocabulary}
        head = head_config(kind, settings).build(self.target.spec)
        assert head.vocab is not None
        head.vocab.set_tokens(choose_draft_vocab(self.counts, self.vocabulary, self.target.spec.eos_token_ids))
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
    """Seconds to read files one after the other, into memory that stays."""
    begin = time.perf_counter()
    kept = [path.read_bytes() for path in paths]
    spent = time.perf_counter() - begin
    del kept
    return spent


def raw_write(paths: list[Path], folder: Path) -> float:
    """Seconds to write the bytes of files, which are in memory, to as many new files, synced."""
    spent = 0.0
    for path in paths:
        data, copy = memoryview(path.read_bytes()), folder / "copy"
        begin = time.perf_counter()
        with copy.open("wb", buffering=0) as file:
            for start in range(0, len(data), BLOCK):
                file.write(data[start : start + BLOCK])
            os.fsync(file.fileno())
        spent += time.perf_counter() - begin
        copy.unlink()
    return spent


def raw_copy(paths: list[Path], folder: Path) -> float:
    """Seconds to copy files one after the other, synced."""
    begin = time.perf_counter()
    for path in paths:
        shutil.copyfile(path, folder / path.name)
        with (folder / path.name).open("rb") as file:
            os.fsync(file.fileno())
    spent = time.perf_counter() - begin
    for path in paths:
        (folder / path.name).unlink()
    return spent


def measure_store(args: argparse.Namespace) -> None:
    """Prints the ratios of one precision after the other."""
    setting = Setting(args)
    request = setting.head(args.head).features()
    for precision in args.precisions:
        found: dict[str, list[float]] = {}
        for number in range(args.rounds):
            with tempfile.TemporaryDirectory(dir=args.folder) as name:
                own = measure_once(setting, Path(name), precision, request, number)
                size = own.pop("bytes")
                for key, seconds in own.items():
                    found.setdefault(key, []).append(seconds)
        medians = {key: statistics.median(values) for key, values in found.items()}
        shown = {
            "write, of a raw write": medians["raw write"] / medians["write"],
            "write, of a raw copy": medians["raw copy"] / medians["write"],
            "read, of a raw read": medians["raw read"] / medians["read"],
            "read, of a raw copy": medians["raw copy"] / medians["read"],
            "read out of the cache, of a raw read": medians["raw read out of the cache"]
            / medians["read out of the cache"],
        }
        rates = {f"{key} GB/s": size / medians[key] / 1e9 for key in ("write", "read", "read out of the cache")}
        rounded = {key: round(value, 2) for key, value in (shown | rates).items()}
        print(json.dumps({"precision": precision, "MB": round(size / 1e6), **rounded}), flush=True)


def measure_once(
    setting: Setting, folder: Path, precision: str, request: FeatureRequest, number: int
) -> dict[str, float]:
    """Seconds of everything, and the bytes of the store."""
    store, wrote = setting.store(folder / "store", request, precision)
    paths = sorted(store.folder.glob("shard-*"))
    batches = [setting.tokens(batch) for step in setting.plan.epoch(1 + number) for batch in step]

    def read(store: FeatureStore) -> float:
        begin = time.perf_counter()
        for tokens in batches:
            if store.read(tokens) is None:
                raise RuntimeError("a row is missing")
        return time.perf_counter() - begin

    found = {"bytes": float(sum(path.stat().st_size for path in paths)), "write": wrote}
    found |= {"raw write": raw_write(paths, folder), "raw copy": raw_copy(paths, folder)}
    found |= {"raw read": raw_read(paths), "read": read(store)}
    forget(paths)
    found["raw read out of the cache"] = raw_read(paths)
    forget(paths)
    found["read out of the cache"] = read(FeatureStore(store.folder, store.identity, store.dtype))
    return found


def fit(setting: Setting, head: DraftHead, steps: int, store: FeatureStore | None, folder: Path) -> dict[str, float]:
    """Trains for some steps as `specdraft train` does; see ``Meter.totals``."""
    trainer = TrainerConfig(
        max_steps=steps, epochs=1 + steps // setting.plan.num_steps(0), log_every=max(1, steps // 4)
    )
    inputs = TrainInputs(
        accelerator=make_accelerator(trainer, "cpu"),
        target=setting.target,
        head=head,
        objective=Objective(LossConfig()),
        rows=setting.of,
        plan=setting.plan,
        pad_id=0,
        optim=OptimConfig(lr=5e-4),
        trainer=trainer,
        tracker=build_tracker(TrackerConfig(kind="none"), folder, True),
        folder=folder / "run",
        settings={},
        provenance={},
        store=None if store is None else StoredRows(store),
    )
    with contextlib.redirect_stdout(sys.stderr):
        return train(inputs).totals


def one_side(args: argparse.Namespace) -> None:
    """Prints tokens a second, and the share of time that training waits for its batches."""
    setting = Setting(args)
    head = setting.head(args.head)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        store = None
        if args.side == "offline":
            store = setting.store(Path(name) / "store", head.features(), args.precision)[0]
        begin = time.process_time()
        totals = fit(setting, head, args.steps, store, Path(name))
        spent = time.process_time() - begin
        rates = {name: totals["tokens"] / seconds for name, seconds in (("", totals["seconds"]), ("cpu_", spent))}
        print(json.dumps({f"tokens_per_{name}s": rate for name, rate in rates.items()} | totals))


def measure_training(args: argparse.Namespace) -> None:
    """Runs both sides in turn and prints the ratio of their medians."""
    found: dict[str, list[dict[str, float]]] = {"online": [], "offline": []}
    for _ in range(args.rounds):
        for side, results in found.items():
            command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            results.append(json.loads(out.splitlines()[-1]))
            print(side, {name: round(value, 4) for name, value in results[-1].items()}, flush=True)
    for name in ("tokens_per_s", "tokens_per_cpu_s"):
        medians = {side: statistics.median(own[name] for own in results) for side, results in found.items()}
        print(json.dumps({name: medians, "ratio": round(medians["offline"] / medians["online"], 2)}))


@torch.no_grad()
def agreement(setting: Setting, head: DraftHead, held_out: list[TokenRow]) -> list[float]:
    """Share of the anchors of every depth at which the head has the text's token, from the target's own states."""
    head.eval()
    teacher = Teacher(setting.target.unembedding, head.draft_unembedding(setting.target.unembedding), head.label_map())
    total = StepStats.zeros(head.config.num_draft_tokens)
    for start in range(0, len(held_out), 8):
        tokens = collate(held_out[start : start + 8], 0)
        batch = build_draft_batch(tokens, setting.target.capture(tokens, head.features()))
        steps = head(batch, setting.target.embed, setting.target.unembedding)
        total = total + Objective(LossConfig())(steps, batch, teacher).stats
    return total.agreement


def measure_precision(args: argparse.Namespace) -> None:
    """Trains a head from a store of every precision and prints what it agrees with on rows it has not seen."""
    setting = Setting(args)
    held_out = setting.held_out
    for precision in ("online", "fp8", "int8"):  # bf16 is exact for this target
        head = setting.head(args.head)
        with tempfile.TemporaryDirectory(dir=args.folder) as name:
            store = None
            if precision != "online":
                store = setting.store(Path(name) / "store", head.features(), precision)[0]
            fit(setting, head, args.steps, store, Path(name))
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
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--batch-rows", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--folder", default=None, help="where stores are written; default: the system's temporary folder"
    )
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS))
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
