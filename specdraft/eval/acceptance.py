"""What a head is worth: acceptance, speed and unchanged output on held-out prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specdraft.core.errors import DataError
from specdraft.core.tree import DraftTree, TreeGrowth
from specdraft.data.chat import ChatRenderer, TemplateRefusedError, tokenizer_hash
from specdraft.data.formats import Message
from specdraft.decode._config import DecodeConfig
from specdraft.decode._sampling_config import SamplingConfig
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.proposers import HeadProposer, verifier_in_use
from specdraft.eval._config import EvalConfig
from specdraft.eval.environment import environment
from specdraft.eval.prompts import Prompt, prompts_hash
from specdraft.eval.speed import Pair, PairedDecoder
from specdraft.eval.subjects import Subject, head_subject, memory_bytes
from specdraft.eval.summary import Bootstrap, Measurement, summarize
from specdraft.heads.base import DraftHead
from specdraft.targets.hf import HFTarget

SCHEMA = 1
WARMUP_TOKENS = 32


@dataclass(frozen=True)
class AcceptancePoint:
    """Acceptance alone, pooled over the steps of all prompts.

    acceptance_length: tokens per target forward, the bonus token included; 1.0 when no prompt had a step.
    acceptance_rate, survival: per depth; 0 where a depth was never reached. num_steps: speculative steps. num_tokens:
    tokens they emitted.
    """

    acceptance_length: float
    acceptance_rate: list[float]
    survival: list[float]
    num_steps: int
    num_tokens: int


def measure_acceptance(
    target: HFTarget,
    head: DraftHead,
    prompt_ids: Sequence[list[int]],
    tree: DraftTree | TreeGrowth | None = None,
    max_new_tokens: int = 64,
) -> AcceptancePoint:
    """Decodes prompts speculatively, without the plain baseline and the clock: for choosing the best head in training.

    Measured is a copy of ``head`` in the target's dtype, which is what ``evaluate_head`` measures later; ``head``
    itself is left alone. Prompts that fill the target's context are passed over.

    Args:
        target: the frozen model.
        head: of any dtype, in training or not.
        prompt_ids: token ids to continue, one list a prompt.
        tree: shape of the drafts; None = a chain of the head's depth.
        max_new_tokens: per prompt.
    """
    copy = head.config.build(head.spec).to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    copy.load_state_dict(head.state_dict())
    tree = tree or DraftTree.chain(head.config.num_draft_tokens)
    decoder = SpeculativeDecoder(target, HeadProposer(copy, target, tree))
    usable = [ids for ids in prompt_ids if len(ids) < target.spec.max_position_embeddings]
    results = [decoder.generate(ids, max_new_tokens) for ids in usable]
    num_steps = sum(r.num_steps for r in results)
    num_tokens = sum(r.step_tokens for r in results)
    depths = range(tree.max_depth)
    accepted = [sum(r.accepted_per_depth[k] for r in results if k < len(r.accepted_per_depth)) for k in depths]
    reached = [sum(r.reached_per_depth[k] for r in results if k < len(r.reached_per_depth)) for k in depths]
    return AcceptancePoint(
        acceptance_length=num_tokens / num_steps if num_steps else 1.0,
        acceptance_rate=[a / max(r, 1) for a, r in zip(accepted, reached, strict=True)],
        survival=[a / max(num_steps, 1) for a in accepted],
        num_steps=num_steps,
        num_tokens=num_tokens,
    )


def evaluate_head(
    target: HFTarget,
    head: DraftHead,
    prompt_sets: Mapping[str, Sequence[Prompt]],
    decode: DecodeConfig,
    config: EvalConfig,
    sampling: SamplingConfig | None = None,
    head_sha256: str | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """``evaluate`` of a trained head; ``head_sha256``, of its model.safetensors, tells an export whose results they are.

    Raises:
        DataError, ConfigError: see ``evaluate`` and ``head_subject``.
    """
    subject = head_subject(target, head, decode, head_sha256)
    return evaluate(target, subject, prompt_sets, decode, config, sampling, console)


def evaluate(
    target: HFTarget,
    subject: Subject,
    prompt_sets: Mapping[str, Sequence[Prompt]],
    decode: DecodeConfig,
    config: EvalConfig,
    sampling: SamplingConfig | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Decodes every prompt plainly and with ``subject``, in turns, and returns ``results.json`` (schema 1).

    Args:
        target: with its tokenizer; decoded both ways.
        subject: what drafts the second way.
        prompt_sets: name -> prompts, at least one set.
        decode: length of answers, and the shape of a head's drafts.
        config: repetitions and intervals.
        sampling: what tokens are drawn from; None = greedy. Drawn texts differ, so they are not compared.
        console: gets a progress bar if it is a terminal.

    Raises:
        DataError: the tokenizer has no chat template, or no prompt of a set fits the target's context.
    """
    if target.tokenizer is None:
        raise DataError("target.name: has no tokenizer, got a bare model; give one with a chat template")
    renderer = ChatRenderer(target.tokenizer)
    sampling = sampling or SamplingConfig()
    decoder = PairedDecoder(
        target, subject.proposer, decode.max_new_tokens, decode.ignore_eos, sampling, target.tokenizer
    )
    session = _Session(target, renderer, decoder, config)
    num_prompts = sum(len(prompts) for prompts in prompt_sets.values())
    sets = {}
    with _progress(console) as progress:
        task = progress.add_task("evaluating", total=num_prompts)
        session.warm_up([prompt for prompts in prompt_sets.values() for prompt in prompts])
        for name, prompts in prompt_sets.items():
            measurements, skipped = session.measure(name, prompts, lambda: progress.advance(task))
            sets[name] = _set_results(measurements, subject.shape.max_depth, config, compared=sampling.is_greedy)
            sets[name] |= {"prompts_hash": prompts_hash(prompts), "skipped": dict(skipped)}
    return {
        "schema": SCHEMA,
        "target": _target_identity(target, renderer),
        "head": subject.head,
        "proposer": {"kind": subject.kind, "settings": subject.settings},
        "decode": _decode_settings(target, decode, config, subject.shape) | _sampling_settings(sampling, subject),
        "sets": sets,
        "memory_bytes": memory_bytes(target, subject, session.longest * config.batch_size),
        "environment": environment(),
    }


@dataclass
class _Talk:
    """A prompt, its place in its set, and the target's answers to its turns so far."""

    index: int
    prompt: Prompt
    answers: list[str] = field(default_factory=list)


class _Session:
    """One target, one head, one clock: renders prompts, decodes them both ways, and compares."""

    def __init__(self, target: HFTarget, renderer: ChatRenderer, decoder: PairedDecoder, config: EvalConfig) -> None:
        self.target = target
        self.renderer = renderer
        self.decoder = decoder
        self.config = config
        self.longest = 0
        """Tokens of the longest row, prompt and answer."""

    def warm_up(self, prompts: Sequence[Prompt]) -> None:
        """Decodes the first prompts for a few tokens, untimed: allocations and kernels' first calls happen here."""
        limit = self.decoder.max_new_tokens
        self.decoder.max_new_tokens = min(limit, WARMUP_TOKENS)
        rendered = [self._render(_messages(prompt, 1))[0] for prompt in prompts[: self.config.warmup_prompts]]
        usable = [ids for ids in rendered if ids is not None]
        for begin in range(0, len(usable), self.config.batch_size):
            self.decoder.decode(usable[begin : begin + self.config.batch_size])
        self.decoder.max_new_tokens = limit

    def measure(self, name: str, prompts: Sequence[Prompt], advance: Any) -> tuple[list[Measurement], Counter[str]]:
        """Every turn of every prompt, and how many were left out for which reason."""
        measurements: list[Measurement] = []
        skipped: Counter[str] = Counter()
        talks = [_Talk(index, prompt) for index, prompt in enumerate(prompts)]
        for begin in range(0, len(talks), self.config.batch_size):
            batch = talks[begin : begin + self.config.batch_size]
            measurements += self._measure_batch(batch, skipped)
            for _ in batch:
                advance()
        if not measurements:
            reasons = ", ".join(f"{reason}: {count}" for reason, count in skipped.items()) or "no prompts"
            raise DataError(
                f"eval.prompts: no prompt of the set can be decoded, got {name} ({reasons}); use another set"
            )
        return measurements, skipped

    def _measure_batch(self, talks: list[_Talk], skipped: Counter[str]) -> list[Measurement]:
        """Turn by turn, the talks that have one together."""
        found: list[Measurement] = []
        for turn in count():
            rendered: list[tuple[_Talk, list[int]]] = []
            for talk in talks:
                if turn >= (len(talk.prompt.turns) if self.config.turns == "all" else 1):
                    continue
                ids, reason = self._render(_messages(talk.prompt, turn + 1, talk.answers))
                if ids is None:
                    skipped[reason] += 1
                else:
                    rendered.append((talk, ids))
            if not rendered:
                break
            pairs = self.decoder.decode([ids for _, ids in rendered], self.config.repeats)
            for (talk, ids), pair in zip(rendered, pairs, strict=True):
                self.longest = max(self.longest, len(ids) + len(pair.plain.result.tokens))
                same = pair.identical or not self.decoder.sampling.is_greedy
                divergence = None if same else self._divergence(talk.prompt, turn, ids, pair)
                found.append(Measurement(talk.index, talk.prompt.category, pair, divergence))
                talk.answers.append(self._text(pair.plain.result.tokens))
            talks = [talk for talk, _ in rendered]
        return found

    def _render(self, messages: list[Message]) -> tuple[list[int] | None, str]:
        """Token ids of the prompt, or None and why it cannot be decoded."""
        try:
            ids = self.renderer.prompt_ids(messages)
        except TemplateRefusedError:
            return None, "refused by the chat template"
        if len(ids) >= self.target.spec.max_position_embeddings:
            return None, "longer than the target's context"
        return ids, ""

    def _text(self, tokens: list[int]) -> str:
        """The answer as it goes into the history of the next turn."""
        text = self.renderer.tokenizer.decode(tokens, skip_special_tokens=True)
        assert isinstance(text, str)
        return text.strip()

    def _divergence(self, prompt: Prompt, turn: int, ids: list[int], pair: Pair) -> dict[str, Any]:
        """Where the two texts part, and how close the target's own choice was there: a near tie explains it."""
        plain, speculative = pair.plain.result.tokens, pair.speculative.result.tokens
        same = sum(1 for _ in _common_prefix(plain, speculative))
        return {
            "prompt": prompt.id,
            "turn": turn + 1,
            "position": same,
            "autoregressive": plain[same] if same < len(plain) else None,
            "speculative": speculative[same] if same < len(speculative) else None,
            "margin": self.decoder.margin([*ids, *plain[:same]]) if same < len(plain) else None,
        }


def _common_prefix(a: list[int], b: list[int]) -> Iterable[int]:
    for x, y in zip(a, b, strict=False):
        if x != y:
            return
        yield x


def _messages(prompt: Prompt, num_turns: int, answers: Sequence[str] = ()) -> list[Message]:
    """The first user turns of a prompt with the target's own answers between them."""
    messages: list[Message] = []
    if prompt.system is not None:
        messages.append({"role": "system", "content": prompt.system})
    for i, text in enumerate(prompt.turns[:num_turns]):
        messages.append({"role": "user", "content": text})
        if i < num_turns - 1:
            messages.append({"role": "assistant", "content": answers[i]})
    return messages


def _set_results(measurements: list[Measurement], max_depth: int, config: EvalConfig, compared: bool) -> dict[str, Any]:
    """Figures of a set and of each of its categories; ``identical_outputs`` is None where texts are not compared."""
    bootstrap = Bootstrap(config.bootstrap_samples, config.seed)
    categories = dict.fromkeys(m.category for m in measurements)
    by_category = {}
    for category in categories:
        rows = [m for m in measurements if m.category == category]
        by_category[category or "none"] = summarize(rows, max_depth, bootstrap)
        del by_category[category or "none"]["first_divergences"]
    figures = {**summarize(measurements, max_depth, bootstrap), "by_category": by_category}
    if not compared:
        for part in (figures, *by_category.values()):
            part["identical_outputs"] = None
    return figures


def _target_identity(target: HFTarget, renderer: ChatRenderer) -> dict[str, Any]:
    spec = target.spec
    return {
        "name": spec.name,
        "revision": spec.revision,
        "model_type": spec.model_type,
        "fingerprint": spec.fingerprint,
        "adapted": target.adapted,
        "num_parameters": sum(p.numel() for p in target.model.parameters()),
        "chat_template_hash": renderer.template_hash,
        "tokenizer_hash": tokenizer_hash(renderer.tokenizer),
    }


def _decode_settings(
    target: HFTarget, decode: DecodeConfig, config: EvalConfig, tree: DraftTree | TreeGrowth
) -> dict[str, Any]:
    """All that a measurement depends on besides target, head and prompts.

    tree: paths of ranks, None = a chain or a grown tree; dynamic: how it is grown, None = a fixed shape.
    """
    return {
        "num_draft_tokens": tree.max_depth,
        "tree": None if isinstance(tree, TreeGrowth) or tree == DraftTree.chain(len(tree)) else tree.paths(),
        "dynamic": asdict(tree) if isinstance(tree, TreeGrowth) else None,
        "batch_size": config.batch_size,
        "dtype": str(target.dtype).removeprefix("torch."),
        "head_dtype": decode.head_dtype or str(target.dtype).removeprefix("torch."),
        "device": target.device.type,
        "max_new_tokens": decode.max_new_tokens,
        "ignore_eos": decode.ignore_eos,
        "turns": config.turns,
        "repeats": config.repeats,
        "bootstrap_samples": config.bootstrap_samples,
        "seed": config.seed,
    }


def _sampling_settings(sampling: SamplingConfig, subject: Subject) -> dict[str, Any]:
    """temperature, the rule that accepts drafts and whether it is lossless; ``sampling``: what differs from greedy."""
    greedy = asdict(SamplingConfig())
    changed = {key: value for key, value in asdict(sampling).items() if value != greedy[key]}
    return {
        "temperature": sampling.temperature,
        "verifier": verifier_in_use(sampling, subject.proposer) or sampling.resolved_verifier,
        "lossless": sampling.is_lossless,
        "sampling": changed or None,
    }


def _progress(console: Console | None) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=console is None or not console.is_terminal,
    )
