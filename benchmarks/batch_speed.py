"""Batches here, plain and with heads, against transformers' generate() of the same prompts, left-padded: one process, in turns.

    python benchmarks/batch_speed.py --prompts mt_bench.jsonl [--heads FOLDER ...] [--batches 1 2 4 8 16] [--limit 16]
                                     [--new-tokens 64] [--tree '[[0],[1]]'] [--dtype bfloat16] [--threads 2]

Every method decodes all prompts in batches of the size at hand. Two threads need two idle cores.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table

from specdraft.core.tree import DraftTree
from specdraft.data.chat import ChatRenderer
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.proposers import HeadProposer
from specdraft.eval.prompts import load_sets
from specdraft.heads.storage import load_head
from specdraft.targets._config import TargetConfig
from specdraft.targets.hf import HFTarget, load_target

Run = Callable[[list[list[int]], int], tuple[list[list[int]], float]]
"""(prompts, batch size) -> (texts, tokens a target step gave)."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", default="builtin", help="a set or a file, as for specdraft eval")
    parser.add_argument("--limit", type=int, default=16, help="prompts")
    parser.add_argument("--heads", nargs="*", default=[], help="folders of heads of the target")
    parser.add_argument("--tree", default="[[0],[1]]", help="paths of ranks, for every head and batch size")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--target", default="smollm2", help="Hub id, folder, or smollm2")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def theirs(peer: HFTarget, count: int) -> Run:
    """``generate()`` of left-padded batches."""

    def run(prompts: list[list[int]], size: int) -> tuple[list[list[int]], float]:
        texts = []
        for start in range(0, len(prompts), size):
            rows = prompts[start : start + size]
            longest = max(map(len, rows))
            ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
            mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
            out = peer.model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
            texts += out[:, longest:].tolist()
        return texts, 1.0

    return run


def ours(decoder: SpeculativeDecoder, count: int) -> Run:
    """``generate_batch``; with one row at a time, ``generate``."""

    def run(prompts: list[list[int]], size: int) -> tuple[list[list[int]], float]:
        if size == 1:
            results = [decoder.generate(prompt, count, ignore_eos=True) for prompt in prompts]
        else:
            results = decoder.generate_batch(prompts, count, ignore_eos=True, max_batch_size=size)
        steps = sum(result.num_steps for result in results)
        return [result.tokens for result in results], len(prompts) * (count - 1) / steps

    return run


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    # The peer runs a copy of its own, untouched by the layers and weights that are rearranged for ours.
    peer = load_target(TargetConfig(name=args.target, dtype=args.dtype, pack_weights=False))
    peer.model.generation_config.eos_token_id = None
    target = load_target(TargetConfig(name=args.target, dtype=args.dtype))
    methods = {
        "generate()": theirs(peer, args.new_tokens),
        "here: plain": ours(SpeculativeDecoder(target), args.new_tokens),
    }
    tree = DraftTree.from_paths(json.loads(args.tree))
    for folder in args.heads:
        head = load_head(folder, dtype=target.dtype).requires_grad_(False)
        proposer = HeadProposer(head, target, tree)
        name = f"here: {head.config.kind} ({Path(folder).resolve().parent.name})"
        methods[name] = ours(SpeculativeDecoder(target, proposer), args.new_tokens)
    assert target.tokenizer is not None
    renderer = ChatRenderer(target.tokenizer)
    (found,) = load_sets([args.prompts], args.limit, 0).values()
    prompts = [renderer.prompt_ids([{"role": "user", "content": prompt.turns[0]}]) for prompt in found]
    for run in methods.values():
        run(prompts[:2], 2)
    table = Table(
        title=f"{args.target}, {args.dtype}, {torch.get_num_threads()} threads, {len(prompts)} prompts of {args.prompts}, "
        f"{args.new_tokens} new tokens, tree {args.tree}, prefill included, transformers {transformers.__version__}",
        box=box.MARKDOWN,
    )
    columns = (
        "batch",
        "method",
        "tokens/s",
        "acceptance length",
        "over generate()",
        "over plain here",
        "same text as plain here",
    )
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 1 else "right")
    for size in args.batches:
        rates, lengths, texts = {}, {}, {}
        for name, run in methods.items():
            begin = time.perf_counter()
            texts[name], lengths[name] = run(prompts, size)
            rates[name] = len(prompts) * args.new_tokens / (time.perf_counter() - begin)
        for name, rate in rates.items():
            same = sum(a == b for a, b in zip(texts[name], texts["here: plain"], strict=True))
            table.add_row(
                str(size),
                name,
                f"{rate:.1f}",
                f"{lengths[name]:.2f}",
                f"{rate / rates['generate()']:.2f}",
                f"{rate / rates['here: plain']:.2f}",
                f"{same}/{len(prompts)}",
            )
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
