"""The index of prompt lookup and the suffix automaton against plain rescans of the text, with fixed seeds."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch

from specdraft.core.errors import ConfigError
from specdraft.core.types import DraftContext, Features
from specdraft.decode._proposer_config import PromptLookupConfig, SuffixConfig
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.prompt_lookup import NGramIndex, PromptLookupProposer
from specdraft.decode.suffix import EarlierOutputs, SuffixProposer, SuffixRow, arrange
from specdraft.decode.suffix_automaton import Candidate, Cursor, SuffixAutomaton
from tests.decode.oracle import prompt_ids
from tests.tiny import tiny_target

CPU = torch.device("cpu")


def random_text(rng: random.Random, length: int) -> list[int]:
    """Random tokens of a small alphabet with copied passages and loops in between."""
    size = rng.choice([1, 2, 3, 8])
    text: list[int] = []
    while len(text) < length:
        kind = rng.random()
        if text and kind < 0.3:
            start = rng.randrange(len(text))
            text += text[start : start + rng.randrange(1, 12)]
        elif text and kind < 0.4:
            text += text[-rng.randrange(1, 4) :] * rng.randrange(2, 6)
        else:
            text.append(rng.randrange(size))
    return text[:length]


def pieces(rng: random.Random, text: list[int]) -> list[list[int]]:
    """``text`` cut as a decoder commits it: some tokens at a time."""
    cut, result = 0, []
    while cut < len(text):
        step = rng.randrange(1, 6)
        result.append(text[cut : cut + step])
        cut += step
    return result


def rescan(text: list[int], lengths: range, count: int, max_matches: int) -> list[list[int]]:
    """What ``NGramIndex.continuations`` gives, by comparing every place of the text."""
    found: dict[int, list[int]] = {}
    for length in reversed(lengths):
        for place in range(len(text) - 1, length - 1, -1):
            if text[place - length : place] == text[len(text) - length :] and len(found) < max_matches:
                longer = list(text)
                for i in range(count):
                    longer.append(longer[place + i])
                found.setdefault(text[place], longer[len(text) :])
    return list(found.values())


@pytest.mark.parametrize("seed", range(12))
def test_incremental_index_equals_a_rescan(seed: int) -> None:
    rng = random.Random(seed)
    min_ngram = rng.choice([1, 2])
    max_ngram = min_ngram + rng.randrange(3)
    matches = rng.choice([1, 2, 4])
    index = NGramIndex(min_ngram, max_ngram)
    text: list[int] = []
    several = 0
    for part in pieces(rng, random_text(rng, 120)):
        index.extend(part)
        text += part
        count = rng.randrange(1, 9)
        found = index.continuations(count, matches)
        assert found == rescan(text, range(min_ngram, max_ngram + 1), count, matches)
        assert all(len(one) == count for one in found)
        several += bool(found)
    assert several > 5


def test_lookup_drafts_chains_that_part_at_the_root() -> None:
    proposer = PromptLookupProposer(
        PromptLookupConfig(num_draft_tokens=3, max_ngram=2, min_ngram=1, max_matches=2), CPU
    )
    state = proposer.begin(50)
    proposal = proposer.propose(state, context([5, 6, 7, 8, 9, 6, 3, 4, 5, 6]), 10)
    assert proposal is not None
    # After (5, 6) came 7; after 6 alone, last, 3.
    assert proposal.tree.parents == (-1, -1, 0, 1, 2, 3)
    assert proposal.tokens.tolist() == [[7, 3, 8, 4, 9, 5]]
    assert proposal.tree == proposer.tree
    shorter = proposer.propose(state, context([9]), 1)
    assert shorter is not None
    assert shorter.tokens.tolist() == [[6]]
    assert proposer.propose(proposer.begin(9), context([1, 2, 3]), 4) is None


def context(new_ids: list[int]) -> DraftContext:
    """What a proposer that needs the ids alone is given."""
    return DraftContext(torch.empty(1, 0), Features(torch.empty(0), None), 0, new_ids)


def occurrences(texts: list[list[int]], string: tuple[int, ...]) -> int:
    return sum(text[i : i + len(string)] == list(string) for text in texts for i in range(len(text) - len(string) + 1))


@pytest.mark.parametrize("seed", range(16))
def test_counts_equal_brute_force(seed: int) -> None:
    """Of several texts that grow by turns, at every length that is counted, absent strings included."""
    rng = random.Random(seed)
    max_match = rng.choice([1, 2, 4, 9])
    automaton = SuffixAutomaton(max_match)
    wanted = [random_text(rng, 40) for _ in range(rng.choice([1, 1, 3]))]
    todo = [(i, part) for i, text in enumerate(wanted) for part in pieces(rng, text)]
    todo.sort(key=lambda _: rng.random() if seed % 2 else 0)
    cursors = [Cursor() for _ in wanted]
    texts: list[list[int]] = [[] for _ in wanted]
    for i, part in todo:
        automaton.extend(cursors[i], part)
        texts[i] += part
        assert cursors[i].match == min(max_match + 1, len(texts[i]))
        for length in range(1, max_match + 2):
            strings = {tuple(text[k : k + length]) for text in texts for k in range(len(text) - length + 1)}
            strings.add(tuple(rng.randrange(9) for _ in range(length)))
            for string in strings:
                assert automaton.occurrences(string) == occurrences(texts, string)
    assert automaton.size == sum(map(len, texts)) == automaton.occurrences(())
    assert len(automaton._length) <= 2 * automaton.size


@pytest.mark.parametrize("seed", range(12))
def test_following_finds_the_longest_known_end(seed: int) -> None:
    rng = random.Random(seed)
    automaton, cursor, reader = SuffixAutomaton(6), Cursor(), Cursor()
    text, read = random_text(rng, 80), []
    for i, token in enumerate(random_text(rng, 80)):
        automaton.extend(cursor, text[i : i + 1])
        automaton.follow(reader, token)
        read.append(token)
        # What was added after the reader passed is not found again at once, what was there before is.
        known = [n for n in range(8) if n <= len(read) and occurrences([text[: i + 1]], tuple(read[len(read) - n :]))]
        assert reader.match in known
        if rng.random() < 0.5:
            fresh = Cursor()
            for one in read[-7:]:
                automaton.follow(fresh, one)
            assert fresh.match == max(known)


def estimate(text: list[int], drafted: list[int], token: int, max_match: int) -> tuple[Fraction, int]:
    """Probability of ``token`` after the text and what was drafted, by its definition, and the length of the match."""
    whole = [*text, *drafted]
    for length in range(min(max_match, len(whole)), 0, -1):
        end = whole[len(whole) - length :]
        follows = [text[i + length] for i in range(len(text) - length) if text[i : i + length] == end]
        if follows:
            return Fraction(follows.count(token)) / (len(follows) + Fraction(1, length)), length
    return Fraction(0), 0


@pytest.mark.parametrize("seed", range(12))
def test_drafts_follow_the_definition_of_the_estimate(seed: int) -> None:
    rng = random.Random(seed)
    max_match, least = rng.choice([2, 5]), rng.choice([0.05, 0.3])
    automaton, cursor = SuffixAutomaton(max_match), Cursor()
    text: list[int] = []
    sizes = []
    for part in pieces(rng, random_text(rng, 70)):
        automaton.extend(cursor, part)
        text += part
        nodes = automaton.draft(cursor, 12, 5, least, is_inside=True)
        sizes.append(len(nodes))
        assert [node.probability for node in nodes] == sorted((node.probability for node in nodes), reverse=True)
        paths: list[list[int]] = []
        for node in nodes:
            above = paths[node.parent] if node.parent >= 0 else []
            parent = nodes[node.parent].probability if node.parent >= 0 else 1.0
            step, _ = estimate(text, above, node.token, max_match)
            assert node.probability == pytest.approx(parent * float(step))
            assert node.probability >= least * (1 - 1e-9)
            assert node.depth == len(above) + 1 <= 5
            paths.append([*above, node.token])
        assert len({tuple(path) for path in paths}) == len(paths)
        if len(nodes) < 12:
            # Nothing likely enough was left out.
            for path in [[], *(path for path in paths if len(path) < 5)]:
                parent = nodes[paths.index(path)].probability if path else 1.0
                for token in set(text):
                    if parent * float(estimate(text, path, token, max_match)[0]) >= least * (1 + 1e-9):
                        assert [*path, token] in paths
    assert max(sizes) > 3


def test_longer_matches_are_drafted_further() -> None:
    """Of a passage that is repeated, the draft grows with the part that was repeated already."""
    passage = list(range(100))
    lengths = []
    for repeated in (1, 2, 4, 8, 16):
        automaton, cursor = SuffixAutomaton(32), Cursor()
        automaton.extend(cursor, [*passage, 999, *passage[:repeated]])
        nodes = automaton.draft(cursor, 64, 64, 0.2, is_inside=True)
        assert [node.token for node in nodes] == passage[repeated : repeated + len(nodes)]
        lengths.append(len(nodes))
    assert lengths == sorted(set(lengths))
    assert lengths[0] <= 4 < 16 <= lengths[-1]


def test_work_per_token_is_bounded() -> None:
    """A text of one token is the worst case of counting: its ends are as many as its tokens."""
    automaton, cursor = SuffixAutomaton(8), Cursor()
    automaton.extend(cursor, [7] * 3000)
    assert len(automaton._ends(cursor)) == 9
    assert [automaton.occurrences([7] * n) for n in (1, 2, 8)] == [3000, 2999, 2993]


def test_candidates_become_a_tree_level_by_level() -> None:
    nodes = [
        Candidate(4, -1, 1, 0.9, 1, 0),
        Candidate(5, 0, 2, 0.8, 1, 0),
        Candidate(6, -1, 1, 0.7, 1, 0),
        Candidate(8, 0, 2, 0.6, 1, 0),
        Candidate(7, 1, 3, 0.5, 1, 0),
    ]
    tree, tokens = arrange(nodes)
    assert tokens == [4, 6, 5, 8, 7]
    assert tree.parents == (-1, -1, 0, 0, 2)
    assert tree.ranks == (0, 1, 0, 1, 0)


def test_earlier_outputs_are_searched_and_bounded() -> None:
    config = SuffixConfig(num_draft_tokens=4, num_nodes=4, max_earlier_tokens=60, max_match=8)
    proposer = SuffixProposer(config, CPU)
    assert proposer.earlier is not None
    rng = random.Random(0)
    for _ in range(8):
        row = proposer.begin(100)
        written = [rng.randrange(50) for _ in range(30)]
        proposer.propose(row, context([1, 2, written[0]]), 4)
        for i in range(1, 30, 3):
            proposer.propose(row, context(written[i : i + 3]), 4)
        del row
        assert proposer.earlier.automaton.size <= 60
    row = proposer.begin(100)
    # Found only in what the last row wrote.
    proposal = proposer.propose(row, context([60, 61, *written[10:14]]), 4)
    assert proposal is not None
    assert proposal.tokens.tolist() == [written[14:18]]
    alone = SuffixProposer(SuffixConfig(num_draft_tokens=4, num_nodes=4), CPU)
    assert alone.propose(alone.begin(100), context([60, 61, *written[10:14]]), 4) is None


def test_the_last_step_of_a_row_enters_the_earlier_outputs() -> None:
    target = tiny_target("llama")
    proposer = SuffixProposer(SuffixConfig(max_earlier_tokens=1000), target.device)
    assert proposer.earlier is not None
    decoder = SpeculativeDecoder(target, proposer)
    prompts = [prompt_ids(6, seed) for seed in range(4)]
    written = []
    for prompt, length in zip(prompts, (9, 1, 2, 7), strict=True):
        written.append(decoder.generate(prompt, length, ignore_eos=True).tokens)
    proposer.begin(10)
    assert proposer.earlier.automaton.size == sum(map(len, written))
    for tokens in written:
        assert proposer.earlier.automaton.occurrences(tokens) >= 1
    ended = SpeculativeDecoder(target).generate(prompts[0], 9, ignore_eos=True).tokens[4]
    text = decoder.generate(prompts[0], 9, [ended]).tokens
    proposer.begin(10)
    assert text[-1] == ended
    assert proposer.earlier.automaton.size == sum(map(len, written)) + len(text)


@pytest.mark.parametrize("limit", [2, 3, 5, 8])
def test_few_earlier_tokens_are_the_newest(limit: int) -> None:
    earlier = EarlierOutputs(max_match=8, max_tokens=limit)
    texts = [[1, 2, 3, 4], [5], [6, 7, 8], [9, 1], [2, 3, 4, 5, 6, 7, 8, 9, 3]]
    for text in texts:
        row = SuffixRow(SuffixAutomaton(8))
        earlier.open(row)
        row.output.tokens += text
        earlier.open(SuffixRow(SuffixAutomaton(8)))
        assert 0 < earlier.automaton.size <= limit
        assert earlier.automaton.occurrences(text[-limit:]) == 1
    with pytest.raises(ConfigError, match=r"proposer.max_earlier_tokens: nothing follows a single token, got 1; use 0"):
        SuffixConfig(max_earlier_tokens=1)


def test_a_row_in_progress_is_known_to_the_next_one() -> None:
    earlier = EarlierOutputs(max_match=8, max_tokens=100)
    first, second = SuffixRow(SuffixAutomaton(8)), SuffixRow(SuffixAutomaton(8))
    earlier.open(first)
    first.output.tokens += [1, 2, 3, 4]
    earlier.open(second)
    assert earlier.automaton.occurrences([2, 3, 4]) == 1
    first.output.tokens += [5, 6]
    earlier.open(SuffixRow(SuffixAutomaton(8)))
    assert earlier.automaton.occurrences([3, 4, 5, 6]) == 1
    assert earlier.follow(second, [9, 4, 5]).match == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PromptLookupConfig(min_ngram=4), "proposer.min_ngram: must not exceed proposer.max_ngram (3), got 4"),
        (lambda: PromptLookupConfig(num_draft_tokens=0), "proposer.num_draft_tokens: must lie in 1..64, got 0"),
        (lambda: PromptLookupConfig(max_matches=9), "proposer.max_matches: must lie in 1..8, got 9"),
        (lambda: SuffixConfig(min_probability=0.0), "proposer.min_probability: must lie in (0, 1], got 0.0"),
        (lambda: SuffixConfig(num_nodes=0), "proposer.num_nodes: must lie in 1..256, got 0"),
    ],
)
def test_settings_out_of_range(make: object, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make()  # type: ignore[operator]
    assert message in str(error.value)
