"""Plain decoding here against transformers' generate(): same weights, dtype and prompts, in turns in one process.

    python benchmarks/decode_speed.py [--dtype bfloat16] [--target smollm2] [--new-tokens 64] [--prompts 4] [--threads 2]

Two threads need two idle cores: a busy neighbour makes every parallel product wait for it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.result import DecodeResult
from specdraft.targets._config import TargetConfig
from specdraft.targets.hf import HFTarget, load_target

TEXT = (
    "Explain to a new colleague how a compiler turns a program into machine code.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "What should I pay attention to when I buy a used bicycle?",
    "Give me a recipe for a vegetable soup and say why each step matters.",
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--target", default="smollm2", help="Hub id, folder, or smollm2")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=len(TEXT), help=f"1 to {len(TEXT)}")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def prompt(target: HFTarget, text: str) -> torch.Tensor:
    """``[1, P]`` int64."""
    assert target.tokenizer is not None
    if target.tokenizer.chat_template is None:
        return target.tokenizer(text, return_tensors="pt").input_ids.to(target.device)
    messages = [{"role": "user", "content": text}]
    encoded = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    return encoded["input_ids"].to(target.device)


def measure(run: Callable[[], object]) -> float:
    """Milliseconds."""
    begin = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - begin)


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    # The peer runs a copy of its own, untouched by the layers and weights that are rearranged for ours.
    peer = load_target(TargetConfig(name=args.target, dtype=args.dtype, pack_weights=False))
    target = load_target(TargetConfig(name=args.target, dtype=args.dtype))
    peer.model.generation_config.eos_token_id = None
    decoder = SpeculativeDecoder(target)
    rows, count = [], args.new_tokens
    for text in TEXT[: args.prompts]:
        ids = prompt(target, text)
        results: list[DecodeResult] = []
        written: list[torch.Tensor] = []

        def ours(ids: torch.Tensor = ids, results: list[DecodeResult] = results) -> None:
            results.append(decoder.generate(ids, count, ignore_eos=True))

        def theirs(ids: torch.Tensor = ids, written: list[torch.Tensor] = written) -> None:
            mask = torch.ones_like(ids)
            written.append(
                peer.model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
            )

        if not rows:
            ours()
            theirs()
        times = [(measure(theirs), measure(ours)) for _ in range(3)]
        best = [min(column) / count for column in zip(*times, strict=True)]
        parts = results[-1].time_ms
        steps = sum(parts[name] for name in ("target", "draft", "verify", "other"))
        same = results[-1].tokens == written[-1][0, ids.shape[1] :].tolist()
        rows.append((ids.shape[1], *best, best[0] / best[1], (parts["verify"] + parts["other"]) / steps, same))
    title = f"{args.target}, {args.dtype}, {torch.get_num_threads()} threads, {count} new tokens, best of 3 in turns"
    table = Table(title=title)
    for name in (
        "prompt tokens",
        "generate() ms/token",
        "here ms/token",
        "ratio",
        "outside target and draft",
        "same text",
    ):
        table.add_column(name, justify="right")
    for length, theirs_ms, ours_ms, ratio, outside, same in rows:
        table.add_row(
            str(length), f"{theirs_ms:.1f}", f"{ours_ms:.1f}", f"{ratio:.2f}", f"{outside:.1%}", "yes" if same else "no"
        )
    Console(width=110).print(table)
    Console(width=110).print(f"median ratio {statistics.median(row[3] for row in rows):.2f}")


if __name__ == "__main__":
    main()
