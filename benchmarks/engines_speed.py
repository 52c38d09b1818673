"""One head in vLLM, llama.cpp, OpenVINO GenAI and here: tokens/s plain and with drafts, on one machine, float32, batch 1.

    python benchmarks/engines_speed.py --head FOLDER [--engines ours vllm llamacpp openvino] [--prompts mt_bench.jsonl]
                                       [--limit 8] [--new-tokens 64] [--threads 2] [--rounds 2]

Every engine gets the same prompts as token ids and writes the same texts, whose lengths are those of our greedy texts; a
text that an engine ends otherwise is counted in the last column. Engines run one after the other, each plain and then with
drafts in one process, after a warm-up; of the rounds the best counts. They are those of scripts/engines.sh; one that is
absent, or that has no place for the head's kind, is left out. The clock runs over prompt and text.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from specdraft.core.errors import ExportError
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.proposers import HeadProposer
from specdraft.eval.prompts import load_sets
from specdraft.export.engines.checking import PREPARE, make_job
from specdraft.export.engines.environments import TITLES, find_python, run_engine
from specdraft.export.engines.ours import Row, our_rows
from specdraft.export.material import Material
from specdraft.export.registry import find_format
from specdraft.heads.storage import load_head
from specdraft.targets._config import TargetConfig
from specdraft.targets.hf import HFTarget, load_target

FORMATS = {
    "eagle3": {"vllm": "eagle3", "llamacpp": "gguf", "openvino": "openvino"},
    "eagle": {"vllm": "vllm_eagle"},
    "medusa": {"vllm": "medusa"},
}
"""Kind of head -> engine -> the format that it reads."""
MODES = ["plain", "speculative"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=Path, required=True, help="folder of a head in our own format")
    parser.add_argument("--engines", nargs="+", default=["ours", "vllm", "llamacpp", "openvino"])
    parser.add_argument("--prompts", default="builtin", help="a set or a file, as for specdraft eval")
    parser.add_argument("--limit", type=int, default=8, help="prompts")
    parser.add_argument("--new-tokens", type=int, default=64, help="of each text at most")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def ours(target: HFTarget, folder: Path, rows: list[Row]) -> dict[str, Any]:
    """One round of our decoder in the form of an engine's result."""
    head = load_head(folder, dtype=torch.float32).requires_grad_(False)
    found: dict[str, Any] = {}
    for mode in MODES:
        decoder = SpeculativeDecoder(target, None if mode == "plain" else HeadProposer(head, target))
        decoder.generate(rows[0].prompt, len(rows[0].tokens))
        found[mode] = []
        for row in rows:
            begin = time.perf_counter()
            result = decoder.generate(row.prompt, len(row.tokens))
            found[mode].append({"tokens": result.tokens, "seconds": time.perf_counter() - begin})
    return found


def theirs(engine: str, material: Material, rows: list[Row], scratch: Path, rounds: int) -> list[dict[str, Any]]:
    """The rounds of one engine, after its files have been written once."""
    name = FORMATS[material.kind][engine]
    folder = scratch / name
    folder.mkdir()
    find_format(name).write(material, folder)
    files = PREPARE[engine](material, name, folder, scratch, {})
    job = make_job(files, rows, material.head.config.num_draft_tokens, MODES, warm_up=True)
    return [run_engine(engine, find_python(engine, {}), job, scratch) for _ in range(rounds)]


def speed(results: list[dict[str, Any]], mode: str) -> float:
    """Tokens a second over all texts, of the best round."""
    return max(sum(len(row["tokens"]) for row in r[mode]) / sum(row["seconds"] for row in r[mode]) for r in results)


def main() -> None:
    args, console = arguments(), Console()
    torch.set_num_threads(args.threads)
    material = Material(args.head)
    settings = TargetConfig(name=material.target.name, revision=material.target.revision, device="cpu", dtype="float32")
    target = load_target(settings)
    (prompts,) = load_sets([args.prompts], limit=args.limit).values()
    head = load_head(args.head, dtype=torch.float32).requires_grad_(False)
    rows = our_rows(target, head, args.new_tokens, [prompt.turns[0] for prompt in prompts])
    steps, tokens = sum(row.steps for row in rows), sum(len(row.tokens) for row in rows)
    console.print(f"{len(rows)} texts, {tokens} tokens, {(tokens - len(rows)) / steps:.2f} tokens a step")

    table = Table("", "tokens/s plain", "tokens/s with drafts", "ratio", "texts unlike ours", box=box.MARKDOWN)
    with tempfile.TemporaryDirectory() as scratch:
        for engine in args.engines:
            try:
                if engine == "ours":
                    title, results = "here", [ours(target, args.head, rows) for _ in range(args.rounds)]
                elif engine not in FORMATS.get(material.kind, {}):
                    console.print(f"left out: {engine} has no place for {material.kind} heads")
                    continue
                else:
                    results = theirs(engine, material, rows, Path(scratch), args.rounds)
                    title = f"{TITLES[engine]} {results[0]['version']}"
            except ExportError as error:
                console.print(f"left out: {error}", markup=False)
                continue
            plain, drafted = (speed(results, mode) for mode in MODES)
            unlike = sum(
                row["tokens"] != own.tokens for mode in MODES for row, own in zip(results[0][mode], rows, strict=True)
            )
            table.add_row(title, f"{plain:.1f}", f"{drafted:.1f}", f"{drafted / plain:.2f}", str(unlike))
    console.print(table)


if __name__ == "__main__":
    main()
