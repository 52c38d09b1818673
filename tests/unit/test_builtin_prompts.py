"""Checks of the prompts shipped in the package: schema, counts, and no leak from training into held-out rows."""

import json
import re
from collections import Counter, defaultdict
from importlib.resources import files
from typing import Any

import pytest

CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SPLITS = ("train", "dev", "heldout")
MIN_TRAIN_PER_CATEGORY = 52
HELDOUT_PER_CATEGORY = 10
DEV_PER_CATEGORY = 4
SHINGLE_WORDS = 4
SHARED_RUN_WORDS = 8
MAX_JACCARD_ACROSS = 0.3
MAX_JACCARD_WITHIN = 0.5

Row = dict[str, Any]


def read_split(split: str) -> list[Row]:
    """Rows of one shipped file, in file order."""
    path = files("specdraft.data") / "builtin" / f"{split}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def user_turns(row: Row) -> list[str]:
    """The user turns of a row in either of the two formats."""
    if "turns" in row:
        return list(row["turns"])
    return [message["content"] for message in row["messages"]]


def words(text: str) -> list[str]:
    """Lower-case words and numbers; punctuation and spacing never hide a copy."""
    return re.findall(r"[a-z0-9]+", text.lower())


def shingles(text: str, length: int) -> set[tuple[str, ...]]:
    """All runs of `length` words; a shorter text is one run of all its words."""
    tokens = words(text)
    return {tuple(tokens[i : i + length]) for i in range(max(1, len(tokens) - length + 1))}


def near_duplicates(left: list[str], right: list[str], limit: float) -> list[tuple[int, int, float]]:
    """Index pairs (left, right) whose shingle Jaccard similarity is at least `limit`."""
    right_sets = [shingles(text, SHINGLE_WORDS) for text in right]
    holders: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for j, grams in enumerate(right_sets):
        for gram in grams:
            holders[gram].append(j)
    found = []
    for i, text in enumerate(left):
        grams = shingles(text, SHINGLE_WORDS)
        shared = Counter(j for gram in grams for j in holders.get(gram, ()))
        for j, both in shared.items():
            similarity = both / (len(grams) + len(right_sets[j]) - both)
            if similarity >= limit:
                found.append((i, j, similarity))
    return found


def same_normalised(left: list[str], right: list[str]) -> set[str]:
    """Texts present on both sides once case, punctuation and spacing are ignored."""
    return {" ".join(words(text)) for text in left} & {" ".join(words(text)) for text in right}


def shared_runs(left: list[str], right: list[str]) -> set[tuple[str, ...]]:
    """Runs of SHARED_RUN_WORDS words that occur on both sides."""
    left_runs = {run for text in left for run in shingles(text, SHARED_RUN_WORDS)}
    right_runs = {run for text in right for run in shingles(text, SHARED_RUN_WORDS)}
    return left_runs & right_runs


@pytest.fixture(scope="module")
def rows() -> dict[str, list[Row]]:
    return {split: read_split(split) for split in SPLITS}


@pytest.fixture(scope="module")
def texts(rows: dict[str, list[Row]]) -> dict[str, list[str]]:
    return {split: ["\n".join(user_turns(row)) for row in rows[split]] for split in SPLITS}


def test_counts_per_category(rows: dict[str, list[Row]]) -> None:
    train = Counter(row["category"] for row in rows["train"])
    heldout = Counter(row["category"] for row in rows["heldout"])
    assert set(train) == set(CATEGORIES)
    assert min(train.values()) >= MIN_TRAIN_PER_CATEGORY
    assert heldout == dict.fromkeys(CATEGORIES, HELDOUT_PER_CATEGORY)
    assert Counter(row["category"] for row in rows["dev"]) == dict.fromkeys(CATEGORIES, DEV_PER_CATEGORY)


def test_ids_are_unique_and_name_split_and_category(rows: dict[str, list[Row]]) -> None:
    ids = [row["id"] for split in SPLITS for row in rows[split]]
    assert len(ids) == len(set(ids))
    for split in SPLITS:
        for row in rows[split]:
            assert re.fullmatch(rf"{split}-{row['category']}-\d{{3}}", row["id"])


@pytest.mark.parametrize("split", SPLITS)
def test_schema(rows: dict[str, list[Row]], split: str) -> None:
    for row in rows[split]:
        if "turns" in row:
            assert set(row) == {"id", "category", "turns"}
            assert len(row["turns"]) == 2
        else:
            assert set(row) == {"id", "category", "messages"}
            assert [set(message) for message in row["messages"]] == [{"role", "content"}]
            assert row["messages"][0]["role"] == "user"
        for turn in user_turns(row):
            assert isinstance(turn, str)
            assert turn == turn.strip()
            assert words(turn)
            assert turn.isascii(), row["id"]


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_about_a_tenth_has_two_turns(rows: dict[str, list[Row]], split: str) -> None:
    share = sum("turns" in row for row in rows[split]) / len(rows[split])
    assert 0.08 <= share <= 0.14


@pytest.mark.parametrize(("left", "right"), [("heldout", "train"), ("dev", "train"), ("heldout", "dev")])
def test_no_split_repeats_another(texts: dict[str, list[str]], left: str, right: str) -> None:
    assert same_normalised(texts[left], texts[right]) == set()
    assert near_duplicates(texts[left], texts[right], MAX_JACCARD_ACROSS) == []
    assert shared_runs(texts[left], texts[right]) == set()


@pytest.mark.parametrize("split", SPLITS)
def test_rows_of_a_file_differ_from_each_other(texts: dict[str, list[str]], split: str) -> None:
    pairs = near_duplicates(texts[split], texts[split], MAX_JACCARD_WITHIN)
    assert [(i, j) for i, j, _ in pairs if i != j] == []


def test_detector_catches_a_planted_near_duplicate(texts: dict[str, list[str]]) -> None:
    source = max(range(len(texts["train"])), key=lambda i: len(words(texts["train"][i])))
    tokens = texts["train"][source].split()
    tokens[len(tokens) // 2] = "zebra"
    planted = " ".join(tokens)
    heldout = [*texts["heldout"], planted]
    assert same_normalised([planted], texts["train"]) == set()
    caught = near_duplicates(heldout, texts["train"], MAX_JACCARD_ACROSS)
    assert [(i, j) for i, j, _ in caught] == [(len(heldout) - 1, source)]
    assert shared_runs(heldout, texts["train"])


def test_detector_catches_a_copy_that_differs_in_case_and_punctuation(texts: dict[str, list[str]]) -> None:
    original = texts["train"][0]
    disguised = original.upper().replace(".", " !").replace(" ", "  ")
    assert disguised != original
    assert same_normalised([disguised], texts["train"]) == {" ".join(words(original))}


def test_detector_lets_unrelated_texts_pass() -> None:
    left = ["Name three rivers that flow through more than one country."]
    right = ["Name three painters who worked in more than one city."]
    assert near_duplicates(left, right, MAX_JACCARD_ACROSS) == []
    assert same_normalised(left, right) == set()
    assert shared_runs(left, right) == set()
