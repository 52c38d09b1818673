"""Checks of the chat template and the tokenizer: where decoding starts, what is kept of answers, how they end."""

from __future__ import annotations

import re
from collections.abc import Iterator

from specdraft.data.chat import TemplateRefusedError
from specdraft.data.formats import Message
from specdraft.doctor.case import Case
from specdraft.doctor.findings import Finding, check

SENTINEL = "specdraftanswer"
THINKING = re.compile(r"\s*(<think>\s*</think>)?\s*")
MARKER = re.compile(r"<\|[\w/]+\|>|</?s>|<(?:start|end)_of_turn>")
"""Role and turn markers as they are commonly written; each must be one token."""


@check("template", 10)
def template(case: Case) -> Iterator[Finding]:
    """The prompt that decoding starts from is what an answer follows in training."""
    question: list[Message] = [{"role": "user", "content": "Hi there."}]
    answered: list[Message] = [*question, {"role": "assistant", "content": SENTINEL}]
    prompt, whole = case.render(question, prompt=True), case.render(answered, prompt=False)
    before, found, _ = whole.partition(SENTINEL)
    if not found:
        yield Finding(
            "generation prompt",
            "fault",
            f"the template alters answers: {SENTINEL!r} became {whole[-60:]!r}",
            "mend the target's chat_template.jinja so that it writes answers as they are",
        )
        return
    yield _generation_prompt(prompt, before)


def _generation_prompt(prompt: str, before: str) -> Finding:
    """``prompt``: what decoding starts from. ``before``: what stands before a finished answer."""
    name = "generation prompt"
    if before == prompt:
        return Finding(name, "ok", f"a finished answer follows the prompt directly, which ends in {prompt[-30:]!r}")
    if not before.startswith(prompt):
        return Finding(
            name,
            "warning",
            f"prompts end in {prompt[-40:]!r}, finished conversations have {before[-40:]!r} before the answer; answers are "
            "put behind the prompt as it is when decoding",
            "look at a row: specdraft doctor html=page.html; with a switch for thinking, set data.enable_thinking",
        )
    added = before[len(prompt) :]
    if not added.strip():
        return Finding(name, "ok", f"only whitespace ({added!r}) stands between the prompt and a finished answer")
    if THINKING.fullmatch(added):
        return Finding(
            name,
            "warning",
            f"the template puts {added!r} before finished answers and not into prompts; it is not supervised",
            "set data.enable_thinking=false, so that prompts hold it, or true to train on thinking",
        )
    return Finding(
        name,
        "fault",
        f"finished conversations have {added!r} before the answer, which prompts lack: decoding would start elsewhere than "
        "training",
        f"mend chat_template.jinja: with add_generation_prompt it must end in {added!r}",
    )


@check("answers kept", 11)
def answers_kept(case: Case) -> Iterator[Finding]:
    """The rows hold the whole text of the answers, thinking included."""
    if case.job.data.regenerate:
        yield Finding("answers kept", "ok", "the target writes the answers; its tokens are taken as they are")
        return
    lost, thinking, total = [], 0, 0
    for conversation in case.conversations:
        texts = [message["content"] or "" for message in conversation.messages if message["role"] == "assistant"]
        try:
            turns = case.renderer.turns(conversation.messages)
        except TemplateRefusedError:
            continue
        for text, turn in zip(texts, turns, strict=False):
            kept = _letters(str(case.tokenizer.decode(turn.answer_ids, skip_special_tokens=False)))
            total += 1
            if _letters(text) not in kept:
                lost.append(conversation.id)
                thinking += "</think>" in text and "</think>" not in kept
    numbers = {"answers": total, "lost": len(lost), "thinking_lost": thinking}
    if not lost:
        yield Finding("answers kept", "ok", f"the rows hold the whole text of {total} answers", numbers=numbers)
        return
    what = f", {thinking} of them their thinking" if thinking else ""
    yield Finding(
        "answers kept",
        "fault",
        f"{len(lost)} of {total} answers lose text in the template{what}, first conversation {lost[0]}",
        "set data.enable_thinking=true where the template has the switch, mend chat_template.jinja, or use "
        "data.regenerate=true",
        numbers,
    )


def _letters(text: str) -> str:
    """Text without whitespace and tags of templates, which tokenizers and templates may change."""
    return re.sub(r"\s+", "", text)


@check("tokenizer", 12)
def tokenizer(case: Case) -> Iterator[Finding]:
    """The tokenizer is the target's: its ids have rows in the model, and the template's markers are tokens of their own."""
    size = case.target.spec.vocab_size
    highest = max(case.tokenizer.get_vocab().values())
    numbers = {"highest_id": highest, "vocab_size": size}
    if highest >= size:
        yield Finding(
            "tokenizer",
            "fault",
            f"its highest id is {highest} and the target has {size} rows: it belongs to another model",
            "use the tokenizer files that came with the target's weights",
            numbers,
        )
        return
    split = []
    for marker in sorted(set(MARKER.findall(case.renderer.template))):
        ids = case.tokenizer(marker, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            split.append(f"{marker} ({len(ids)} tokens)")
    if split:
        yield Finding(
            "tokenizer",
            "fault",
            f"markers of the template are no tokens of their own: {', '.join(split)}; tokenizer and template are of two models",
            "use tokenizer.json and chat_template.jinja of one and the same target",
            numbers | {"split_markers": split},
        )
        return
    yield Finding(
        "tokenizer", "ok", f"{highest + 1:,} ids for {size:,} rows of the target, markers whole", numbers=numbers
    )


@check("stop", 13)
def stop(case: Case) -> Iterator[Finding]:
    """The token with which the template ends an answer is one that ends decoding."""
    ids, eos = case.renderer.end_of_turn_ids, case.target.spec.eos_token_ids
    if not eos:
        yield Finding(
            "stop",
            "fault",
            "the target has no EOS token: every answer runs to its limit",
            "set eos_token_id in the target's generation_config.json",
        )
        return
    names = ", ".join(repr(case.tokenizer.decode([token])) for token in eos)
    if not ids:
        yield Finding(
            "stop",
            "warning",
            f"the template writes nothing after an answer; decoding ends at {names}",
            "check that the template ends answers, or drafts never learn where they end",
        )
    elif not set(ids) & set(eos):
        yield Finding(
            "stop",
            "fault",
            f"the template ends answers with {case.tokenizer.decode(ids)!r}, decoding ends at {names} only: answers run on",
            f"add {ids[0]} to eos_token_id in the target's generation_config.json",
            {"end_of_turn_ids": ids, "eos_token_ids": list(eos)},
        )
    else:
        yield Finding("stop", "ok", f"answers end with {case.tokenizer.decode(ids)!r}, which ends decoding")
