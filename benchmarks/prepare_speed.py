"""Preparing data: rendering and masking against a loop over rows, and resident memory by the number of rows.

    python benchmarks/prepare_speed.py speed [--prompts FILE.jsonl] [--rows 12000]
    python benchmarks/prepare_speed.py memory [--rows 10000 100000 1000000]

Speed: conversations with the built-in prompts (or those of a file) and made-up answers. The loop calls
``apply_chat_template`` for the prompt and for the whole of every turn, and supervises what the second has more. Memory:
made-up conversations, prepared and then read as training reads them, each step in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdraft.data._config import DataConfig
from specdraft.data.assemble import Rendering
from specdraft.data.batch_render import BatchRenderer
from specdraft.data.batching import BatchPlan, collate
from specdraft.data.chat import ChatRenderer, TokenRow, join_turns
from specdraft.data.collect import RENDER_BATCH, collect, open_sources
from specdraft.data.prepare import prepare
from specdraft.data.prepared import held_out_counts, load_prepared, token_counts
from specdraft.data.shards import TokenShard
from specdraft.data.sources import load_conversations
from specdraft.targets._config import TargetConfig
from specdraft.targets.loading import load_tokenizer

MAX_LENGTH = 1024
WORDS = [
    "the",
    "of",
    "a",
    "to",
    "and",
    "in",
    "is",
    "that",
    "it",
    "for",
    "was",
    "on",
    "are",
    "as",
    "with",
    "they",
    "at",
    "be",
    "this",
    "have",
    "from",
    "or",
    "one",
    "had",
    "by",
    "word",
    "but",
    "not",
    "what",
]
MIB = 1 << 20


def conversations(prompts: str, rows: int) -> list[list[dict[str, Any]]]:
    """Messages with the prompts in turn and answers of 20 to 300 words."""
    asked = [row.user_turns for row in load_conversations([prompts]).conversations]
    generator = random.Random(0)
    made = []
    for number in range(rows):
        messages = []
        for turn in asked[number % len(asked)]:
            answer = " ".join(generator.choices(WORDS, k=generator.randint(20, 300))).capitalize() + "."
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
        made.append(messages)
    return made


def loop(tokenizer: Any, data: list[list[dict[str, Any]]]) -> list[TokenRow]:
    """The plain way."""
    rows = []
    for messages in data:
        ids: list[int] = []
        mask: list[bool] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True)["input_ids"]
            whole = tokenizer.apply_chat_template(messages[: i + 1])["input_ids"]
            mask += [False] * (len(prompt) - len(ids)) + [True] * (len(whole) - len(prompt))
            ids = whole
        rows.append(TokenRow(ids[:MAX_LENGTH], mask[:MAX_LENGTH]))
    return rows


def batches(renderer: ChatRenderer, data: list[list[dict[str, Any]]]) -> list[TokenRow]:
    """What Rendering does between reading and writing."""
    parts = (data[start : start + RENDER_BATCH] for start in range(0, len(data), RENDER_BATCH))
    found = (turns for part in BatchRenderer(renderer).stream(parts) for turns in part)
    return [row.truncate(MAX_LENGTH) for turns in found for row in join_turns(turns or ())]


def speed(prompts: str, num_rows: int, rounds: int) -> None:
    tokenizer = load_tokenizer(TargetConfig())
    data = conversations(prompts, num_rows)
    loop(tokenizer, data[:200])
    batches(ChatRenderer(tokenizer), data[:200])
    times: dict[str, list[float]] = {"loop": [], "batches": [], "shards": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rows.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in data))
        config = DataConfig(sources=[str(folder / "rows.jsonl")], regenerate=False, max_length=MAX_LENGTH)
        (folder / "work").mkdir()
        start = time.perf_counter()
        collected = collect(config, open_sources(config), ChatRenderer(tokenizer), folder / "work")
        print(f"reading, overlap and storing: {1e6 * (time.perf_counter() - start) / num_rows:.0f} us/row", flush=True)
        for _ in range(rounds):
            start = time.perf_counter()
            slow = loop(tokenizer, data)
            times["loop"].append(time.perf_counter() - start)
            start = time.perf_counter()
            quick = batches(ChatRenderer(tokenizer), data)
            times["batches"].append(time.perf_counter() - start)
            task = Rendering(folder / "work", folder, tokenizer, None, None, MAX_LENGTH, "all")
            start = time.perf_counter()
            for number, (first, behind) in enumerate(collected.conversations.groups()):
                task((number, first, behind))
            times["shards"].append(time.perf_counter() - start)
            # The loop supervises the line break after an answer, which no target writes.
            assert all(b.input_ids == a.input_ids[: len(b.input_ids)] for a, b in zip(slow, quick, strict=True))
            shard = TokenShard(folder / "rows-00000.arrow")
            assert shard.row(7).input_ids == quick[7].input_ids
        print(
            f"{num_rows:,} rows, {sum(len(row.input_ids) for row in quick) / num_rows:.0f} tokens each, {rounds} rounds"
        )
        for way, taken in times.items():
            best, ratio = min(taken), statistics.median(a / b for a, b in zip(times["loop"], taken, strict=True))
            print(f"{way:8} {1e6 * best / num_rows:7.0f} us/row {ratio:6.2f}x the loop")


def memory(sizes: list[int]) -> None:
    for size in sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with (folder / "rows.jsonl").open("w") as file:
                for line in synthetic(size):
                    file.write(line)
            for step in ("prepare", "train"):
                command = [sys.executable, __file__, "step", step, str(folder)]
                out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                print(f"{size:>9,} rows  {step:8} {out.strip()}", flush=True)


def synthetic(count: int) -> Iterator[str]:
    """Lines of JSON: a prompt of 3 to 10 words and an answer of 5 to 20."""
    generator = random.Random(0)
    for number in range(count):
        prompt = f"{number} " + " ".join(generator.choices(WORDS, k=generator.randint(3, 10)))
        answer = " ".join(generator.choices(WORDS, k=generator.randint(5, 20)))
        yield json.dumps({"prompt": prompt, "completion": answer}) + "\n"


def step(name: str, folder: Path) -> None:
    """One step of ``memory``; prints what it took above what it began with."""
    tokenizer = load_tokenizer(TargetConfig())
    before, start = peak(), time.perf_counter()
    if name == "prepare":
        config = DataConfig(sources=[str(folder / "rows.jsonl")], regenerate=False, num_workers=1)
        prepare(config, tokenizer, folder / "data")
        rows = 0
    else:
        (place,) = (path for path in (folder / "data").iterdir() if not path.name.startswith("."))
        data = load_prepared(place)
        token_counts(data, 49152)
        held_out_counts(data, 49152)
        plan = BatchPlan(lengths=data.lengths, batch_size=8)
        rows = 0
        for micro_batches in plan.epoch(0):
            for batch in micro_batches:
                ids = [place for row in batch for place in row]
                rows += collate(data.rows(ids), 0, ids).input_ids.shape[0]
        assert rows == len(data)
    seconds, disk = time.perf_counter() - start, sum(path.stat().st_size for path in folder.rglob("*.arrow"))
    print(
        f"peak {peak() / MIB:6.0f} MiB, {(peak() - before) / MIB:5.0f} more than before; {seconds:6.1f} s; "
        f"shards {disk / MIB:,.0f} MiB"
    )


def peak() -> int:
    """The most that was resident so far, pages of files included, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fast = commands.add_parser("speed")
    fast.add_argument("--prompts", default="builtin")
    fast.add_argument("--rows", type=int, default=12000)
    fast.add_argument("--rounds", type=int, default=3)
    small = commands.add_parser("memory")
    small.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    one = commands.add_parser("step")
    one.add_argument("name")
    one.add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.command == "speed":
        speed(given.prompts, given.rows, given.rounds)
    elif given.command == "memory":
        memory(given.rows)
    else:
        step(given.name, given.folder)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    main()
