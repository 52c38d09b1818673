"""Regenerated answers: with a trained head against plain generation, in turns; and what the check of own answers separates.

    python benchmarks/answers.py speed --heads FOLDER ... [--prompts builtin] [--limit 64] [--batches 8 32] [--depths 1 2 4]
    python benchmarks/answers.py own [--limit 96] [--other FILE.jsonl ...]

``speed`` writes the same answers, prefill included, with ``generate()`` of transformers, with our decoder alone (what
``specdraft prepare`` does with data.answers.head=null), and with our decoder and each head. ``own`` scores answers that
the target wrote greedily and at several temperatures, and answers of other origin: those of ``--other`` (rows with
messages), the target's own with one token in eight or twenty replaced by its second choice, and those to other prompts.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table

from specdraft.core.tree import DraftTree
from specdraft.data._config import DataConfig
from specdraft.data.answering import AnswerWriter
from specdraft.data.chat import ChatRenderer, TokenRow
from specdraft.data.journal import Answer, AnswerJournal
from specdraft.data.local_answers import TargetWriter
from specdraft.data.own_answers import own_answers
from specdraft.data.regenerate import regenerate
from specdraft.data.sources import Conversation, load_conversations
from specdraft.decode.answers import DecoderWriter
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.proposers import HeadProposer
from specdraft.heads.storage import load_head
from specdraft.targets._config import TargetConfig
from specdraft.targets.hf import HFTarget, load_target


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "own"])
    parser.add_argument("--prompts", default="builtin", help="a source, as for data.sources")
    parser.add_argument("--limit", type=int, default=64, help="conversations")
    parser.add_argument("--heads", nargs="*", default=[], help="folders of heads of the target")
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--depths", nargs="+", type=int, default=[1, 2, 4], help="tokens drafted in a chain")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2, help="all methods in turns, so often; the best counts")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument(
        "--temperatures", nargs="+", type=float, default=[0.0, 0.7, 1.0, 1.3], help="the first is edited"
    )
    parser.add_argument("--other", nargs="*", default=[], help="conversations with answers of another origin")
    parser.add_argument("--cpu-time", action="store_true", help="of this process, for a busy machine and one thread")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def answers(
    writer: AnswerWriter,
    talks: Sequence[Conversation],
    renderer: ChatRenderer,
    config: DataConfig,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[Answer], float]:
    """The answers in order of their keys, and the seconds they took."""
    with tempfile.TemporaryDirectory() as folder:
        journal = AnswerJournal(Path(folder))
        begin = clock()
        regenerate(talks, renderer, writer, journal, config)
        seconds = clock() - begin
        return [journal[key] for key in sorted(journal)], seconds


def speed(args: argparse.Namespace, talks: list[Conversation]) -> Table:
    target = load_target(TargetConfig(name=args.target, dtype=args.dtype))
    # The peer runs a copy of its own, untouched by the layers and weights that are rearranged for ours.
    peer = load_target(TargetConfig(name=args.target, dtype=args.dtype, pack_weights=False))
    assert target.tokenizer is not None
    renderer = ChatRenderer(target.tokenizer)
    clock = time.process_time if args.cpu_time else time.perf_counter
    decoders = {"our decoder, plain": SpeculativeDecoder(target)}
    for folder in args.heads:
        head = load_head(folder, dtype=target.dtype).requires_grad_(False)
        for depth in args.depths:
            proposer = HeadProposer(head, target, DraftTree.chain(depth))
            decoders[f"{head.config.kind}, {depth} drafted"] = SpeculativeDecoder(target, proposer)
    table = Table(
        title=f"{args.target}, {args.dtype}, {torch.get_num_threads()} threads, {len(talks)} conversations of {args.prompts}, "
        f"at most {args.new_tokens} new tokens, greedy, best of {args.rounds}",
        box=box.MARKDOWN,
    )
    unit = "tokens/s of processor time" if args.cpu_time else "tokens/s"
    for name in ("batch", "writer", unit, "over generate()", "same answers"):
        table.add_column(name, justify="left" if name == "writer" else "right")
    for size in args.batches:
        config = DataConfig(max_new_tokens=args.new_tokens, generate_batch_size=size)
        writers: dict[str, AnswerWriter] = {"generate()": TargetWriter(peer, target.tokenizer, config)}
        writers |= {name: DecoderWriter(decoder, config) for name, decoder in decoders.items()}
        best: dict[str, float] = {}
        texts: dict[str, list[list[int]]] = {}
        for writer in writers.values():
            answers(writer, talks[:2], renderer, replace(config, max_new_tokens=8))
        for _ in range(args.rounds):
            for name, writer in writers.items():
                found, seconds = answers(writer, talks, renderer, config, clock)
                texts[name] = [answer.answer_ids for answer in found]
                rate = sum(map(len, texts[name])) / seconds
                best[name] = max(rate, best.get(name, 0.0))
        for name, rate in best.items():
            same = sum(a == b for a, b in zip(texts[name], texts["generate()"], strict=True))
            ratio = f"{rate / best['generate()']:.2f}"
            table.add_row(str(size), name, f"{rate:.0f}", ratio, f"{same}/{len(texts[name])}")
    return table


def as_row(answer: Answer) -> TokenRow:
    count = len(answer.answer_ids)
    return TokenRow([*answer.prompt_ids, *answer.answer_ids], [False] * len(answer.prompt_ids) + [True] * count)


@torch.no_grad()
def edited(target: HFTarget, rows: Sequence[TokenRow], every: int) -> list[TokenRow]:
    """The rows with about one answer token in ``every`` replaced by another likely one (the second best or the best)."""
    generator = random.Random(0)
    found = []
    for row in rows:
        ids = list(row.input_ids)
        best = target.model(torch.tensor([ids])).logits[0].topk(2).indices.tolist()
        for t, on in enumerate(row.loss_mask):
            if on and generator.random() < 1 / every:
                first, second = best[t - 1]
                ids[t] = second if ids[t] == first else first
        found.append(TokenRow(ids, row.loss_mask))
    return found


def own(args: argparse.Namespace, talks: list[Conversation]) -> None:
    target = load_target(TargetConfig(name=args.target, dtype=args.dtype))
    assert target.tokenizer is not None
    renderer = ChatRenderer(target.tokenizer)
    config = DataConfig(max_new_tokens=args.new_tokens, generate_batch_size=max(args.batches))
    columns = ("answers", "rows", "mean log-probability", "5%..95%", "excess", "5%..95%", "z", "5%..95%", "suspect")
    print(f"{args.target}, {args.dtype}, at most {args.new_tokens} new tokens\n")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")

    def tell(name: str, rows: Sequence[TokenRow]) -> None:
        found = own_answers(target, rows)
        cells = []
        for values in (found.mean_logprobs, found.excesses, found.z_scores):
            ordered = torch.tensor(values)
            low, high = ordered.quantile(0.05).item(), ordered.quantile(0.95).item()
            cells += [f"{ordered.mean().item():.2f}", f"{low:.2f}..{high:.2f}"]
        print(f"| {name} | {len(rows)} | {' | '.join(cells)} | {found.share_suspect:.0%} |", flush=True)

    drawn: dict[float, list[TokenRow]] = {}
    for temperature in args.temperatures:
        warm = replace(config, temperature=temperature)
        found, _ = answers(DecoderWriter(SpeculativeDecoder(target), warm), talks, renderer, warm)
        drawn[temperature] = [as_row(answer) for answer in found]
        tell(f"own, temperature {temperature:g}", drawn[temperature])
    for other in args.other:
        others = load_conversations([other], args.limit).conversations
        rows = [row.truncate(512) for talk in others for row in renderer.rows(talk.messages)]
        tell(f"of {Path(other).stem}", [row for row in rows if row is not None])
    greedy = drawn[args.temperatures[0]]
    prompts = [[token for token, on in zip(row.input_ids, row.loss_mask, strict=True) if not on] for row in greedy]
    texts = [[token for token, on in zip(row.input_ids, row.loss_mask, strict=True) if on] for row in greedy]
    shifted = zip(prompts, texts[1:] + texts[:1], strict=True)
    moved = [TokenRow([*prompt, *text], [False] * len(prompt) + [True] * len(text)) for prompt, text in shifted]
    tell("own, but to other prompts", moved)
    for every in (8, 20):
        tell(f"own, 1 token in {every} another", edited(target, greedy, every))


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    talks = load_conversations([args.prompts], args.limit).conversations
    if args.what == "own":
        own(args, talks)
    else:
        Console(width=170).print(speed(args, talks))


if __name__ == "__main__":
    main()
