"""Sources -> answers -> rows -> disk: all that comes before training, done once for the same settings."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from specdraft.core.errors import ConfigError, DataError
from specdraft.data._config import DataConfig
from specdraft.data.chat import ChatRenderer, TemplateRefusedError, TokenRow, join_turns, tokenizer_hash
from specdraft.data.journal import AnswerJournal
from specdraft.data.prepared import MANIFEST_NAME, PreparedData, load_prepared, save_prepared
from specdraft.data.regenerate import answered_turns, first_prompt_ids, regenerate
from specdraft.data.sources import Conversation, LoadedSources, load_conversations

if TYPE_CHECKING:
    from specdraft.targets.hf import HFTarget

POLL_S = 1.0
"""Seconds between two looks at what the other processes wrote."""
IDLE_LIMIT_S = 3600.0
"""Seconds without any progress of the other processes before waiting for them is given up."""


def prepare(
    config: DataConfig,
    source: HFTarget | PreTrainedTokenizerBase,
    folder: Path,
    *,
    rank: int = 0,
    world_size: int = 1,
) -> PreparedData:
    """The data set that ``config`` describes, from ``folder`` if it was prepared before, else made now.

    ``source`` is the target, or its tokenizer alone where ``config.regenerate`` is false. Every process calls
    this; the processes must share ``folder``. A data set lives in ``folder/<hash>``, so other sources,
    targets or settings never mix with it; regenerated answers live beside it and serve data sets that differ
    in limit, max_length or loss_on.

    manifest.json holds: identity (what the hash is of: conversations, tokenizer, template, target, settings),
    sources (rows, files and their checksums), responses (who wrote the answers), dropped (rows by reason),
    mask_sources (turns by how their answer was found), num_conversations, num_rows, num_tokens,
    num_supervised_tokens, supervised_share, length_histogram (rows by tokens, "<=64" and so on), categories
    (conversations by category).

    Raises:
        ConfigError: regeneration without a target, or a setting the chat template does not know.
        DataError: a source cannot be read, nothing would be supervised, or the files cannot be written or
        read.
    """
    tokenizer, target = _parts(source)
    if config.regenerate and target is None:
        raise ConfigError("data.regenerate: the target must be loaded to write answers, got a tokenizer; use false")
    renderer = ChatRenderer(tokenizer, system=config.system, enable_thinking=config.enable_thinking)
    loaded = load_conversations(config.sources, config.limit, config.seed)
    identity = _identity(config, renderer, loaded.conversations, target)
    place = folder / _digest(identity)
    if (place / MANIFEST_NAME).exists():
        return load_prepared(place, renderer)
    dropped = loaded.dropped
    conversations = _renderable(loaded.conversations, renderer, config, dropped)
    journal = None
    if target is not None and config.regenerate:
        journal = AnswerJournal(folder / f"answers-{_digest(identity['answers'])}", rank)
        regenerate(conversations, renderer, target, journal, config, rank=rank, world_size=world_size)
    if rank != 0:
        _wait((place / MANIFEST_NAME).exists, journal, f"the first process to write {place}")
        return load_prepared(place, renderer)
    if journal is not None and world_size > 1:
        _wait(
            _all_answered(conversations, journal),
            journal,
            f"the answers of {world_size} processes in {folder}",
        )
    rows = _rows(conversations, renderer, config, journal, dropped)
    return save_prepared(place, rows, _manifest(config, identity, loaded, rows, dropped, renderer))


def _parts(
    source: HFTarget | PreTrainedTokenizerBase,
) -> tuple[PreTrainedTokenizerBase, HFTarget | None]:
    """(tokenizer, target or None)."""
    if isinstance(source, PreTrainedTokenizerBase):
        return source, None
    if source.tokenizer is None:
        raise DataError(f"target.name: has no tokenizer, got {source.spec.name}; load it with its tokenizer")
    return source.tokenizer, source


def _identity(
    config: DataConfig, renderer: ChatRenderer, conversations: Sequence[Conversation], target: HFTarget | None
) -> dict[str, Any]:
    """All that decides the rows. Data sets with equal identities are the same data set."""
    tokenizer, template = tokenizer_hash(renderer.tokenizer), renderer.template_hash
    answers: dict[str, Any] = {"by": "dataset"}
    if config.regenerate and target is not None:
        answers = {
            "by": "target",
            "target": target.spec.fingerprint,
            "dtype": str(target.dtype).removeprefix("torch."),
            "tokenizer": tokenizer,
            "template": template,
            "max_new_tokens": config.max_new_tokens,
            "temperature": config.temperature,
            "seed": config.seed if config.temperature > 0 else None,
        }
    asked = [[c.messages if answers["by"] == "dataset" else _prompts_only(c)] for c in conversations]
    return {
        "conversations": _digest(asked),
        "tokenizer": tokenizer,
        "template": template,
        "answers": answers,
        "max_length": config.max_length,
        "loss_on": config.loss_on,
    }


def _prompts_only(conversation: Conversation) -> list[dict[str, str | None]]:
    return [message for message in conversation.messages if message["role"] != "assistant"]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _renderable(
    conversations: Sequence[Conversation], renderer: ChatRenderer, config: DataConfig, dropped: Counter[str]
) -> list[Conversation]:
    """The conversations whose prompt the template takes and a row can hold; the others are counted."""
    kept = []
    for conversation in conversations:
        try:
            prompt = first_prompt_ids(conversation, renderer)
        except TemplateRefusedError:
            dropped["refused by the chat template"] += 1
            continue
        if len(prompt) >= config.max_length:
            dropped["prompt longer than data.max_length"] += 1
            continue
        kept.append(conversation)
    return kept


def _rows(
    conversations: Sequence[Conversation],
    renderer: ChatRenderer,
    config: DataConfig,
    journal: AnswerJournal | None,
    dropped: Counter[str],
) -> list[TokenRow]:
    """Rows of all conversations, cut to the maximal length; those with nothing supervised are counted.

    Raises:
        DataError: no row is left.
    """
    answers = None if journal is None else journal.read()
    rows = []
    for conversation in conversations:
        try:
            turns = renderer.turns(conversation.messages) if answers is None else answered_turns(conversation, answers)
        except TemplateRefusedError:
            dropped["refused by the chat template"] += 1
            continue
        if not turns:
            dropped["no answer (set data.regenerate=true)" if answers is None else "no room for an answer"] += 1
            continue
        if answers is not None:
            renderer.mask_sources["written by the target"] += len(turns)
        for row in join_turns(turns, config.loss_on):
            cut = row.truncate(config.max_length)
            if cut is None:
                dropped["nothing supervised within data.max_length"] += 1
            else:
                rows.append(cut)
    if not rows:
        why = ", ".join(f"{reason}: {n}" for reason, n in dropped.most_common())
        raise DataError(f"data.sources: nothing would be supervised, got 0 rows ({why}); change what drops them")
    return rows


def _manifest(
    config: DataConfig,
    identity: dict[str, Any],
    loaded: LoadedSources,
    rows: Sequence[TokenRow],
    dropped: Counter[str],
    renderer: ChatRenderer,
) -> dict[str, Any]:
    tokens = sum(len(row.input_ids) for row in rows)
    supervised = sum(sum(row.loss_mask) for row in rows)
    return {
        "identity": identity,
        "settings": asdict(config),
        "sources": [report.as_dict() for report in loaded.reports],
        "responses": identity["answers"]["by"],
        "dropped": dict(dropped.most_common()),
        "mask_sources": dict(renderer.mask_sources),
        "num_conversations": len(loaded.conversations),
        "num_rows": len(rows),
        "num_tokens": tokens,
        "num_supervised_tokens": supervised,
        "supervised_share": supervised / tokens,
        "length_histogram": length_histogram([len(row.input_ids) for row in rows]),
        "categories": dict(sorted(Counter(c.category for c in loaded.conversations).items())),
    }


def length_histogram(lengths: Sequence[int]) -> dict[str, int]:
    """Rows by length, in bins that double: ``{"<=64": 10, "<=128": 3}``."""
    bins: Counter[int] = Counter(max(64, 1 << (length - 1).bit_length()) for length in lengths)
    return {f"<={top}": bins[top] for top in sorted(bins)}


def _all_answered(conversations: Sequence[Conversation], journal: AnswerJournal) -> Callable[[], bool]:
    """A question: have all processes together answered every conversation?"""

    def ready() -> bool:
        answers = journal.read()
        return all(answered_turns(conversation, answers) is not None for conversation in conversations)

    return ready


def _wait(ready: Callable[[], bool], journal: AnswerJournal | None, what: str) -> None:
    """Returns when ``ready`` is true. No collective call: those time out long before a slow share is done.

    Raises:
        DataError: nothing was written for ``IDLE_LIMIT_S`` seconds, e.g. because the folder is not shared.
    """
    size, since = -1, time.monotonic()
    while not ready():
        now = 0 if journal is None else journal.size_bytes()
        if now != size:
            size, since = now, time.monotonic()
        if time.monotonic() - since > IDLE_LIMIT_S:
            raise DataError(
                f"data.cache_dir: waited {IDLE_LIMIT_S:.0f} s in vain, got nothing new from {what}; all "
                "processes must share the folder"
            )
        time.sleep(POLL_S)
