"""Decoding methods here against the same methods of transformers' generate(): one process, prompt by prompt, in turns.

    python benchmarks/methods_speed.py --prompts mt_bench.jsonl [--limit 20] [--new-tokens 128] [--dtype bfloat16]
                                       [--layers 20] [--draft-tokens 4] [--repeats 1] [--threads 2]

The draft model is the target's first layers (--layers), or another model (--draft-model), the same for both. Two threads
need two idle cores: a busy neighbour makes every parallel product wait for it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table

from specdraft.data.chat import ChatRenderer
from specdraft.decode._proposer_config import DraftModelConfig, PromptLookupConfig, SuffixConfig
from specdraft.decode.draft_model import draft_model_proposer
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.prompt_lookup import PromptLookupProposer
from specdraft.decode.proposers import Proposer
from specdraft.decode.suffix import SuffixProposer
from specdraft.eval.prompts import load_sets
from specdraft.targets._config import TargetConfig
from specdraft.targets.hf import HFTarget, load_target


@dataclass
class Method:
    """One way to decode, and what it took. steps: forwards of the target after the prompt's, 0 = not known."""

    name: str
    peer: str | None
    run: Callable[[list[int]], tuple[list[int], int]]
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    steps: int = 0
    same: int = 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", default="builtin", help="a set or a file, as for specdraft eval")
    parser.add_argument("--limit", type=int, default=20, help="prompts")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--target", default="smollm2", help="Hub id, folder, or smollm2")
    parser.add_argument("--draft-model", help="Hub id or folder; none = the first layers of the target")
    parser.add_argument("--layers", type=int, help="layers of the draft model that are kept; none = three quarters")
    parser.add_argument("--draft-tokens", type=int, default=4, help="depth of the draft model's chain")
    parser.add_argument("--lookup-tokens", type=int, default=10, help="depth of prompt lookup, here and there")
    parser.add_argument("--min-probability", type=float, default=0.0, help="of a token of the draft model, here")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["plain", "lookup", "suffix", "assistant", "draft model"],
        help="parts of names; plain is always in",
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no prompt is begun after so long")
    parser.add_argument("--repeats", type=int, default=1, help="runs of every prompt; the fastest counts")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def cut_copy(model: Any, num_layers: int) -> Any:
    """A model of the first layers of ``model``, as generate() takes it for an assistant; the weights are the same."""
    config = type(model.config).from_dict(model.config.to_dict())
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    config._attn_implementation = model.config._attn_implementation
    with torch.device("meta"):
        cut = type(model)(config)
    kept = {name: tensor for name, tensor in model.state_dict().items() if name in cut.state_dict()}
    cut.load_state_dict(kept, assign=True)
    # Tables that are in no state dict, such as the rotary frequencies.
    for name, buffer in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        cut.get_submodule(owner).register_buffer(leaf, buffer, persistent=False)
    cut.generation_config = transformers.GenerationConfig.from_dict(model.generation_config.to_dict())
    return cut.eval()


def theirs(model: Any, count: int, **settings: Any) -> Callable[[list[int]], tuple[list[int], int]]:
    """``model.generate`` with ``settings``. Steps are counted by the calls of the model."""
    calls = [0]
    model.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))

    def run(ids: list[int]) -> tuple[list[int], int]:
        calls[0] = 0
        prompt = torch.tensor([ids], device=model.device)
        mask = torch.ones_like(prompt)
        out = model.generate(
            prompt, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0, **settings
        )
        return out[0, len(ids) :].tolist(), calls[0] - 1

    return run


def ours(target: HFTarget, proposer: Proposer | None, count: int) -> Callable[[list[int]], tuple[list[int], int]]:
    """The decoder with ``proposer``."""
    decoder = SpeculativeDecoder(target, proposer)

    def run(ids: list[int]) -> tuple[list[int], int]:
        result = decoder.generate(ids, count, ignore_eos=True)
        return result.tokens, result.num_steps

    return run


def methods(args: argparse.Namespace) -> tuple[HFTarget, list[Method]]:
    """The target of the decoder here, and all methods. The peer runs a copy of its own, with the layers it came with."""
    count = args.new_tokens
    peer = load_target(TargetConfig(name=args.target, dtype=args.dtype, pack_weights=False)).model
    peer.generation_config.eos_token_id = None
    target = load_target(TargetConfig(name=args.target, dtype=args.dtype))
    draft = DraftModelConfig(
        name=args.draft_model,
        layers=args.layers,
        num_draft_tokens=args.draft_tokens,
        min_probability=args.min_probability,
    )
    proposer = draft_model_proposer(draft, target)
    assistant = peer
    if args.draft_model is not None:
        assistant = load_target(TargetConfig(name=args.draft_model, dtype=args.dtype, pack_weights=False)).model
    assistant = cut_copy(assistant, proposer.model.spec.num_hidden_layers)
    constant = cut_copy(assistant, proposer.model.spec.num_hidden_layers)
    constant.generation_config.update(
        num_assistant_tokens=args.draft_tokens,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    lookup = PromptLookupConfig(num_draft_tokens=args.lookup_tokens)
    lookup_there = theirs(peer, count, prompt_lookup_num_tokens=args.lookup_tokens)
    return target, [
        Method("generate: plain", None, theirs(peer, count)),
        Method("here: plain", "generate: plain", ours(target, None, count)),
        Method("generate: prompt lookup", None, lookup_there),
        Method(
            "here: prompt lookup",
            "generate: prompt lookup",
            ours(target, PromptLookupProposer(lookup, target.device), count),
        ),
        Method(
            "here: suffix",
            "generate: prompt lookup",
            ours(target, SuffixProposer(SuffixConfig(), target.device), count),
        ),
        Method("generate: assistant", None, theirs(peer, count, assistant_model=assistant)),
        Method(f"generate: assistant, {args.draft_tokens} tokens", None, theirs(peer, count, assistant_model=constant)),
        Method("here: draft model", "generate: assistant", ours(target, proposer, count)),
    ]


def measure(method: Method, ids: list[int], repeats: int) -> list[int]:
    """Adds the fastest of ``repeats`` runs to the method's figures; returns its tokens."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        tokens, steps = method.run(ids)
        times.append(time.perf_counter() - begin)
    method.seconds.append(min(times))
    method.tokens.append(len(tokens))
    method.steps += steps
    return tokens


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    target, compared = methods(args)
    compared = [method for method in compared if any(part in method.name for part in ["plain", *args.methods])]
    assert target.tokenizer is not None
    renderer = ChatRenderer(target.tokenizer)
    (prompts,) = load_sets([args.prompts], args.limit, 0).values()
    texts = [renderer.prompt_ids([{"role": "user", "content": prompt.turns[0]}]) for prompt in prompts]
    for method in compared:
        method.run(texts[0])
    begin = time.perf_counter()
    for number, ids in enumerate(texts):
        if time.perf_counter() - begin > args.seconds:
            texts = texts[:number]
            break
        # Another method begins at every prompt, so that what drifts hits all alike.
        shift = number % len(compared)
        order = compared[shift:] + compared[:shift]
        written = {method.name: measure(method, ids, args.repeats) for method in order}
        for method in compared:
            method.same += written[method.name] == written["generate: plain"]
    console = Console(width=160, highlight=False)
    console.print(
        f"{args.target}, {args.dtype}, {target.device.type}, {torch.get_num_threads()} threads, {len(texts)} prompts of "
        f"{args.prompts}, {args.new_tokens} new tokens, batch 1, prefill included; draft model of "
        f"{compared_layers(target, args)}, transformers {transformers.__version__}"
    )
    console.print(table(compared, len(texts), console))


def compared_layers(target: HFTarget, args: argparse.Namespace) -> str:
    """The draft model in words."""
    kept = args.layers or (None if args.draft_model else target.spec.num_hidden_layers * 3 // 4)
    return f"{'all' if kept is None else f'the first {kept}'} layers of {args.draft_model or args.target}"


def table(compared: list[Method], num_prompts: int, console: Console) -> Table:
    found = Table(box=box.SIMPLE_HEAD if console.is_terminal else box.MARKDOWN)
    for i, name in enumerate(
        (
            "method",
            "tokens/s",
            "acceptance length",
            "over plain here",
            "over plain generate",
            "over the same there",
            "same text",
        )
    ):
        found.add_column(name, justify="left" if i == 0 else "right")
    rates = {method.name: sum(method.tokens) / sum(method.seconds) for method in compared}
    for method in compared:
        rate = rates[method.name]
        length = (sum(method.tokens) - num_prompts) / method.steps if method.steps else float("nan")
        found.add_row(
            method.name,
            f"{rate:.1f}",
            f"{length:.2f}",
            f"{rate / rates['here: plain']:.2f}",
            f"{rate / rates['generate: plain']:.2f}",
            "" if method.peer is None else f"{rate / rates[method.peer]:.2f}",
            f"{method.same}/{num_prompts}",
        )
    return found


if __name__ == "__main__":
    main()
