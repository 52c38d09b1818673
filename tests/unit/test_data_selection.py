"""Which conversations are kept: shares by weight, overlap with held-out prompts, near-duplicates, limits."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdraft.core.errors import ConfigError, DataError
from specdraft.data import near_duplicates as near
from specdraft.data._config import DataConfig
from specdraft.data.chat import ChatRenderer
from specdraft.data.collect import Collected, collect, open_sources
from specdraft.data.mixture import draw, select, shares
from specdraft.data.overlap import BUILTIN_HELD_OUT, HeldOut, load_held_out, open_held_out, split_words
from specdraft.data.sources import load_conversations, open_source
from tests.tiny import tiny_tokenizer
from tests.unit import data_helpers as h

FOX = "the quick brown fox jumps over the lazy dog and then runs far away from the hunter in the wood"


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def collected(folder: Path, sources: list[str], **settings: Any) -> Collected:
    config = DataConfig(sources=sources, **{"regenerate": False, **settings})
    folder.mkdir()
    return collect(config, open_sources(config), ChatRenderer(tiny_tokenizer()), folder)


def test_shares_follow_the_weights_as_far_as_the_rows_reach() -> None:
    assert shares([100, 100], [1, 1]) == [100, 100]
    assert shares([100, 100], [3, 1]) == [100, 33]
    assert shares([100, 100], [3, 1], limit=10) == [8, 2]
    assert shares([5, 1000], [0.5, 0.5]) == [5, 5]
    assert shares([0, 10], [1, 1]) == [0, 0]
    assert shares([7, 7, 7], [1, 1, 1], limit=2) == [1, 1, 0]


def test_a_larger_limit_gives_no_source_less() -> None:
    given = [shares([40, 70, 20], [0.5, 0.3, 0.2], limit) for limit in range(1, 81)]
    assert all(a <= b for one, two in pairwise(given) for a, b in zip(one, two, strict=True))
    assert [sum(row) for row in given] == list(range(1, 81))


def test_draws_are_nested_and_ordered() -> None:
    assert list(draw(5, 9, 0)) == list(range(5))
    assert set(draw(100, 10, 3)) < set(draw(100, 30, 3))
    assert list(draw(100, 30, 3)) == sorted(draw(100, 30, 3))
    kept = select([10, 10], [1, 3], None, 0)
    assert Counter(place // 10 for place in kept) == {0: 3, 1: 10}
    assert list(select([4, 4], None, None, 0)) == list(range(8))


def test_sources_are_mixed_by_weight(tmp_path: Path) -> None:
    names = [
        write(tmp_path / f"{name}.jsonl", *({"prompt": f"{name} {i}", "category": name} for i in range(count)))
        for name, count in (("a", 30), ("b", 12))
    ]
    found = collected(tmp_path / "w", names, weights=[1.0, 2.0])
    assert Counter(row.category for row in found.conversations) == {"a": 6, "b": 12}
    assert [report["num_conversations"] for report in found.reports] == [30, 12]
    same = load_conversations([names[0]], 7).conversations
    assert list(collected(tmp_path / "x", [names[0]], limit=7).conversations) == same


def test_words_of_any_script() -> None:
    assert split_words("Hello, WORLD! it's 3.5") == ["hello", "world", "it", "s", "3", "5"]
    assert split_words("日本語 です") == ["日", "本", "語", "で", "す"]
    assert split_words("\uff46ull\u3000width") == ["full", "width"]
    assert split_words("مرحبا، كيف الحال؟") == ["مرحبا", "كيف", "الحال"]
    assert split_words("नमस्ते दुनिया") == ["नमस्ते", "दुनिया"]
    assert split_words("ไทย") == ["ไ", "ท", "ย"]
    assert split_words("  … — ") == []


def test_overlap_is_a_run_of_words_or_a_short_prompt_as_a_whole() -> None:
    held_out = HeldOut(13)
    held_out.add([FOX, "short follow-up"])
    held_out.add(["What is up?"])
    run = FOX.split()[2:15]
    assert held_out.overlaps(["hello", "so: " + ", ".join(run).upper() + " it is"])
    assert not held_out.overlaps([" ".join([*run[:12], "other", *run[12:]])])
    assert held_out.overlaps(["what is up"])
    assert not held_out.overlaps(["what is up now"])
    assert not held_out.overlaps(["hello", "what is up"])
    assert not held_out.overlaps(["short follow up"])


def test_builtin_prompts_do_not_overlap_with_those_held_out() -> None:
    held_out = load_held_out(13, open_held_out([]))
    assert not [row.id for row in load_conversations(["builtin"]).conversations if held_out.overlaps(row.user_turns)]
    for name in BUILTIN_HELD_OUT:
        assert all(held_out.overlaps(row.user_turns) for row in load_conversations([name]).conversations)


def test_conversations_that_overlap_are_dropped_and_counted(tmp_path: Path) -> None:
    leaked = load_conversations(["builtin#heldout"]).conversations[0].user_turns[0]
    rows = [
        {"messages": h.talk(f"Please answer: {leaked} Thanks.", "yes")},
        {"messages": h.talk("tell me", FOX)},
        {"messages": h.talk("other", "thing")},
    ]
    source = write(tmp_path / "a.jsonl", *rows)
    mine = write(tmp_path / "mine.jsonl", {"question": FOX + " again"})
    found = collected(tmp_path / "one", [source], held_out=[mine])
    assert found.reports[0]["dropped"] == {"overlaps a held-out prompt": 2}
    assert [row.user_turns for row in found.conversations] == [["other"]]
    # Answers that will be written anew do not count.
    assert len(collected(tmp_path / "two", [source], held_out=[mine], regenerate=True).conversations) == 2
    assert len(collected(tmp_path / "three", [source], overlap_words=0).conversations) == 3


def test_held_out_rows_in_the_columns_of_benchmarks(tmp_path: Path) -> None:
    rows = [{"prompt": ["one two three four five", "more"]}, {"problem": FOX}, {"messages": []}]
    held_out = load_held_out(5, open_held_out([write(tmp_path / "a.jsonl", *rows)]))
    assert held_out.overlaps(["and one two three four five"]) and held_out.overlaps([FOX])
    with pytest.raises(DataError, match=r"^data\.held_out: line 1 of .* is no prompt"):
        load_held_out(5, [open_source(write(tmp_path / "b.jsonl", {"id": 3}))])
    with pytest.raises(DataError, match=r"^data\.held_out: no such file"):
        open_held_out(["missing.jsonl"])


def test_long_conversations_are_dropped_by_characters(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", {"messages": h.talk("é" * 6, "é" * 4)}, {"messages": h.talk("é" * 7, "é" * 4)})
    found = collected(tmp_path / "one", [source], max_characters=10)
    assert len(found.conversations) == 1
    assert found.reports[0]["dropped"] == {"longer than data.max_characters": 1}


def test_near_duplicates_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near.importlib.util, "find_spec", lambda name: None)
    near.check_datasketch(DataConfig())
    with pytest.raises(ConfigError, match=r"^data\.near_duplicates: needs the package datasketch, got 0\.8.*\[dedup\]"):
        near.check_datasketch(DataConfig(near_duplicates=0.8))


def changed(words: list[str], *places: int) -> str:
    return " ".join("changed" if i in places else word for i, word in enumerate(words))


def test_near_duplicates_are_kept_once(tmp_path: Path) -> None:
    pytest.importorskip("datasketch")
    words = [f"word{i}" for i in range(200)]
    texts = [
        changed(words),
        "quite another text of some words",
        changed(words, 150),
        "short",
        changed(words, 199),
        "short",
    ]
    source = write(
        tmp_path / "a.jsonl", *({"messages": h.talk(text, f"a{i}"), "id": i} for i, text in enumerate(texts))
    )
    other = write(tmp_path / "b.jsonl", {"messages": h.talk(changed(words, 3), "b"), "id": "b"})
    found = collected(tmp_path / "one", [source, other], near_duplicates=0.8)
    assert [row.id for row in found.conversations] == ["0", "1", "3", "5"]
    assert [report["dropped"] for report in found.reports] == [{"near duplicate": 2}, {"near duplicate": 1}]
    assert [report["num_conversations"] for report in found.reports] == [4, 0]
    assert not list((tmp_path / "one").glob("*signatures*"))
    regenerated = collected(tmp_path / "two", [source], near_duplicates=0.8, regenerate=True, max_length=4096)
    assert [row.id for row in regenerated.conversations] == ["0", "1", "3"]


def test_signatures_estimate_the_similarity_and_bands_find_it() -> None:
    pytest.importorskip("datasketch")
    generator = np.random.default_rng(0)
    words = [str(word) for word in generator.integers(0, 10**6, 400)]
    texts = []
    for size in (0, 4, 12, 60, 400):
        own = list(words)
        own[:size] = [str(word) for word in generator.integers(10**6, 10**7, size)]
        texts.append(" ".join(own))
    signatures = np.stack([near.signature([text]) for text in texts])
    shared = [1.0, 392 / 400, 384 / 408, 336 / 456, 0.0]
    assert (signatures == signatures[0]).mean(1) == pytest.approx(shared, abs=0.12)
    assert near.find_duplicates(signatures, 0.85).tolist() == [False, True, True, False, False]
    assert near.find_duplicates(signatures[:1], 0.85).tolist() == [False]
