"""``specdraft generate``: one answer on the terminal, token by token."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdraft.cli.trained import load_trained
from specdraft.config.schema import GenerateRun

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

    from specdraft.decode.engine import SpeculativeDecoder
    from specdraft.decode.result import StepOutput
    from specdraft.targets.hf import HFTarget

LOSSY = "lossy: typical acceptance, the text's distribution is not the target's"
ACCEPTED_STYLE = "green"
"""Of text that was drafted and accepted; the target's own tokens are plain."""


def run(cfg: GenerateRun) -> None:
    """Loads the target (and the head), streams the answer to stdout and closes with its figures on stderr.

    Raises:
        ConfigError, CheckpointError, DataError, UnsupportedTargetError: see the messages.
    """
    from rich.console import Console

    target, decoder = load(cfg)
    assert target.tokenizer is not None
    ids = prompt_ids(cfg, target.tokenizer)
    console = Console(highlight=False, soft_wrap=True)
    style = ACCEPTED_STYLE if cfg.decode.show else None
    figures = Figures()
    steps = decoder.stream(ids, cfg.decode.max_new_tokens, ignore_eos=cfg.decode.ignore_eos, sampling=cfg.sampling)
    stream_text(figures.watch(steps), target.tokenizer, console, style)
    is_drafted = decoder.proposer is not None
    lossy = "" if cfg.sampling.is_lossless or not is_drafted else f" ({LOSSY})"
    sys.stderr.write(figures.line(drafted=is_drafted) + lossy + "\n")


def load(cfg: GenerateRun) -> tuple[HFTarget, SpeculativeDecoder]:
    """The target and a decoder with the head, or a plain one without or where that was found to be the fastest."""
    from specdraft.decode.engine import SpeculativeDecoder
    from specdraft.decode.methods import make_proposer
    from specdraft.decode.proposers import HeadProposer, draft_tree
    from specdraft.eval.drift import LOSSY_TARGET
    from specdraft.eval.tuned import machine, with_tuned_shape
    from specdraft.heads.storage import resolve_head
    from specdraft.targets.hf import load_target

    if cfg.head.path is None:
        target = load_target(cfg.target)
        proposer = make_proposer(cfg.proposer, target) if cfg.proposer.kind != "head" else None
        return target, SpeculativeDecoder(target, proposer, target.tokenizer)
    folder = resolve_head(cfg.head.path, cfg.head.revision)
    trained = load_trained(folder, cfg.target, cfg.decode)
    target, head = trained.target, trained.head
    tuned = with_tuned_shape(
        folder, cfg.decode, machine(target.device, target.dtype, head.dtype), cfg.sampling.verifier == "block"
    )
    if trained.adapted:
        sys.stderr.write(f"{LOSSY_TARGET}\n")
    if tuned.note:
        sys.stderr.write(tuned.note + "\n")
    if tuned.plain:
        return target, SpeculativeDecoder(target, tokenizer=target.tokenizer)
    tree = draft_tree(tuned.decode, head.config.num_draft_tokens)
    return target, SpeculativeDecoder(
        target, HeadProposer(head, target, tree, tuned.decode.min_confidence), target.tokenizer
    )


def prompt_ids(cfg: GenerateRun, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of the prompt: through the chat template, or as it is with ``raw``.

    Raises:
        DataError: the tokenizer has no chat template.
    """
    from specdraft.data.chat import ChatRenderer
    from specdraft.data.formats import Message

    if cfg.raw:
        ids: list[int] = tokenizer(cfg.prompt)["input_ids"]
        return ids
    message: Message = {"role": "user", "content": cfg.prompt}
    return ChatRenderer(tokenizer).prompt_ids([message])


def stream_text(
    steps: Iterator[StepOutput], tokenizer: PreTrainedTokenizerBase, console: Console, style: str | None
) -> None:
    """Prints the text of the steps as it comes, the accepted drafts in ``style``, and ends the line."""
    from rich.text import Text

    text = IncrementalText(tokenizer)
    for step in steps:
        pieces = [(text.push(token), style if i < step.num_accepted else "") for i, token in enumerate(step.tokens)]
        console.print(Text.assemble(*((piece, look or "") for piece, look in pieces)), end="")
        console.file.flush()
    console.print(text.rest(), markup=False)


class IncrementalText:
    """Text of a growing list of tokens. A character that spans tokens appears with the last of them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Tokens are decoded together with those before them: some tokenizers write no space before the first one.
        self._context = 0
        self._shown = 0

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty inside a character and for special tokens."""
        self._ids.append(token)
        before, text = self._decode(self._shown), self._decode(len(self._ids))
        if len(text) <= len(before) or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return text[len(before) :]

    def rest(self) -> str:
        """What was held back at the end."""
        return self._decode(len(self._ids))[len(self._decode(self._shown)) :]

    def _decode(self, end: int) -> str:
        return str(self._tokenizer.decode(self._ids[self._context : end], skip_special_tokens=True))


@dataclass
class Figures:
    """Counts and seconds of one answer. The first output is the prefill's and counts in neither."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0

    def watch(self, steps: Iterator[StepOutput]) -> Iterator[StepOutput]:
        """The same steps; the time between asking for one and getting it is decoding, the rest is display."""
        start = time.perf_counter()
        for i, step in enumerate(steps):
            seconds = time.perf_counter() - start
            if i == 0:
                self.prefill_s = seconds
            else:
                self.decode_s += seconds
                self.num_steps += 1
                self.num_tokens += len(step.tokens)
            yield step
            start = time.perf_counter()

    def line(self, *, drafted: bool) -> str:
        """The closing line."""
        prefill = f"prefill {self.prefill_s * 1000:.0f} ms"
        if not self.num_steps:
            return f"one token, {prefill}"
        speed = f"{self.num_tokens / self.decode_s:.1f} tokens/s, {prefill}"
        if not drafted:
            return f"plain decoding, {speed}"
        length = self.num_tokens / self.num_steps
        return f"acceptance length {length:.2f} over {self.num_steps} steps, {speed}"
