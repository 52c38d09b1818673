"""Decodes many tokens and prints, at every 1,000, memory and what a step takes besides target and draft.

python benchmarks/long_generation.py --tokens 10000                       # a tiny target with random weights
python benchmarks/long_generation.py --target smollm2 --tokens 7000 --head outputs/x/best
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdraft.decode._proposer_config import PromptLookupConfig
from specdraft.decode.cache import KVCache
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.prompt_lookup import PromptLookupProposer
from specdraft.decode.proposers import HeadProposer, Proposer
from specdraft.decode.result import DecodeResult
from specdraft.heads.storage import check_head_matches, load_head
from specdraft.targets._config import TargetConfig
from specdraft.targets.hf import HFTarget, load_target

EVERY = 1000
PROMPT = 64


def tiny(num_positions: int) -> HFTarget:
    """A Llama of 4 layers with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=num_positions,
        initializer_range=0.1,
    )
    return HFTarget.from_model(LlamaForCausalLM(config).eval(), name="tiny")


def resident_bytes() -> int:
    """Of this process now; the peak where the system does not tell."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def make_proposer(target: HFTarget, head: str | None) -> Proposer | None:
    if head == "none":
        return None
    if head is None:
        return PromptLookupProposer(PromptLookupConfig(), target.device)
    loaded = load_head(Path(head), device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    check_head_matches(loaded, target.spec)
    return HeadProposer(loaded, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="tiny", help="tiny, smollm2, a folder or a Hub id")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--head", default=None, help="folder of a head; none = plain decoding; default: prompt lookup")
    args = parser.parse_args()
    if args.target == "tiny":
        target = tiny(PROMPT + args.tokens + 1)
        target.pack()
    else:
        target = load_target(TargetConfig(name=args.target, dtype=args.dtype))
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, target.spec.vocab_size, (PROMPT,), generator=generator).tolist()
    decoder = SpeculativeDecoder(target, make_proposer(target, args.head))
    result = DecodeResult()
    print(f"{target.spec.name}, {target.dtype}, {torch.get_num_threads()} threads, {args.tokens} tokens")
    print(
        "| tokens | steps | MiB resident | MiB of keys and values | ms per step | of which target | draft | the rest |"
    )
    print("|---|---|---|---|---|---|---|---|")
    seen, steps, begin = dict(result.time_ms), 0, time.perf_counter()
    due = EVERY
    stream = decoder.stream(prompt, args.tokens, ignore_eos=True, result=result)
    for _ in stream:
        if len(result.tokens) < due and not result.finish_reason:
            continue
        count = max(result.num_steps - steps, 1)
        cache_bytes = sum(thing.num_bytes for thing in gc.get_objects() if isinstance(thing, KVCache))
        spent = {part: result.time_ms[part] - seen[part] for part in ("target", "draft", "verify", "other")}
        whole = sum(spent.values())
        rest = 100 * (spent["verify"] + spent["other"]) / whole
        print(
            f"| {len(result.tokens)} | {result.num_steps} | {resident_bytes() / 2**20:.1f} | {cache_bytes / 2**20:.1f} | "
            f"{whole / count:.2f} | {spent['target'] / count:.2f} | {spent['draft'] / count:.2f} | {rest:.1f} % |",
            flush=True,
        )
        seen, steps = dict(result.time_ms), result.num_steps
        due += EVERY
    print(
        f"{len(result.tokens)} tokens in {time.perf_counter() - begin:.1f} s, ended by {result.finish_reason}, "
        f"acceptance length {result.acceptance_length:.2f}"
    )


if __name__ == "__main__":
    main()
