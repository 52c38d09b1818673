"""What a tuned shape is: grown trees beside fixed ones, batches, and decode.json."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from specdraft.core.errors import CheckpointError
from specdraft.core.tree import DraftTree, TreeGrowth
from specdraft.decode._config import DecodeConfig
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.proposers import HeadProposer
from specdraft.eval._config import TuneConfig
from specdraft.eval.costs import CostTable
from specdraft.eval.grown import GrownText, grow_text, growths, replay_grown
from specdraft.eval.report import write_results
from specdraft.eval.shapes import PLAIN, is_plain, shape_json
from specdraft.eval.tune import Tuner, batches, finalists, predict
from specdraft.eval.tuned import machine, read_tuned, with_known_batches, with_tuned_shape
from specdraft.heads.storage import save_head
from specdraft.targets.hf import HFTarget
from tests.tiny import tiny_target
from tests.unit.test_tune import KINDS, TREE, drawn_texts, head_of


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target("llama")


@pytest.mark.parametrize("kind", KINDS)
def test_replay_of_grown_trees_counts_what_decoding_counts(kind: str, target: HFTarget) -> None:
    head = head_of(kind, target, 60)
    if not head.grows:
        pytest.skip("drafts fixed trees only")
    accepted = 0
    for prompt in ([5], list(range(20, 50))):
        answer = SpeculativeDecoder(target).generate(prompt, 30, ignore_eos=True).tokens
        text = grow_text(target, head, prompt, answer, 60)
        assert {len(rows) for rows in text.places.values()} == {29}
        for growth in (TreeGrowth(3, 8, 60), TreeGrowth(2, 8, 50), TreeGrowth(3, 2, 6), TreeGrowth(2, 4, 4)):
            decoder = SpeculativeDecoder(target, HeadProposer(head, target, growth))
            result = decoder.generate(prompt, 30, ignore_eos=True)
            found = replay_grown([text], growth)
            assert (found.num_steps, found.num_tokens) == (result.num_steps, result.step_tokens), growth
            accepted += result.accepted_tokens
    assert accepted > 5
    assert grow_text(target, head, [5], [6], 60) == GrownText({2: [], 4: [], 8: []})


def test_grown_shapes_compete_with_fixed_ones(target: HFTarget) -> None:
    text = GrownText({top_k: [((0,), (0, 1))] * 99 for top_k in (2, 4, 8)})
    assert {growth.depth for growth in growths(2, 24)} == {2}
    assert all(growth.total_tokens <= 24 for growth in growths(5, 24))
    table = CostTable(
        {1: 10.0, 100: 10.0},
        {1: 30.0, 2: 30.0, 3: 30.0},
        {1: 0.0},
        0.0,
        0.0,
        {(2, k): k / 10 for k in (2, 4, 8)},
        0.5,
        4,
    )
    best = predict(drawn_texts(), table, 14, 2, [text], 2)[0]
    assert best.shape == TreeGrowth(2, 2, 2)
    assert best.tokens_per_s == pytest.approx(1e3 * 4 * best.acceptance_length / (10 + 0.2 + 0.5))
    assert best.acceptance_length == pytest.approx(3.0)
    assert is_plain(finalists([best, *predict(drawn_texts(), table, 14, 2)], 1)[0].shape)


def test_batches_are_full_and_hold_every_prompt() -> None:
    assert batches(3, 1) == [[0], [1], [2]]
    assert batches(5, 4) == [[0, 1, 2, 3], [4, 0, 1, 2]]
    assert batches(2, 4) == [[0, 1, 0, 1], [0, 1, 0, 1]]


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_tuning_for_a_batch(kind: str, target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TuneConfig(max_new_tokens=12, max_nodes=5, num_ranks=3, rounds=1, batch_size=3)
    sizes: list[int] = []
    inner = target.forward_cached

    def spy(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(input_ids.shape[0])
        return inner(input_ids, *args, **kwargs)

    monkeypatch.setattr(target, "forward_cached", spy)
    said: list[str] = []
    body = Tuner(target, head_of(kind, target, None), [[5, 6], [7, 8, 9]], config, said.append).run()
    assert sizes.count(3) > 20
    assert body["costs"]["batch_size"] == 3
    assert any(run["dynamic_total_tokens"] for run in body["verified"])
    assert all(run["identical_outputs"] == 6 for run in body["verified"])
    assert any(line.startswith("measured: a grown tree") for line in said)


HERE = machine(torch.device("cpu"), torch.float32, torch.float32)


def tuned_body(shape: dict[str, Any]) -> dict[str, Any]:
    return {
        "shape": shape,
        "measured": {"speedup": 1.5},
        "verified": [{"plain": True, "tokens_per_s": 10.0}, {"plain": False, "tokens_per_s": 8.0}],
    }


def write_tuned(folder: Any, shape: dict[str, Any], batch_size: int = 1, **changes: Any) -> None:
    from specdraft.core.files import file_sha256

    value = {
        "schema": 2,
        "machine": HERE,
        "head": {"sha256": file_sha256(folder / "model.safetensors")},
        "batches": {str(batch_size): tuned_body(shape)},
        **changes,
    }
    write_results(value, folder / "decode.json")


def test_a_tuned_shape_is_used_where_it_was_tuned(target: HFTarget, tmp_path: Any) -> None:
    folder = save_head(head_of("medusa", target, None), tmp_path / "head")
    decode = DecodeConfig(max_new_tokens=7)
    assert with_tuned_shape(folder, decode, HERE).note is None
    write_tuned(folder, shape_json(TREE))
    found = with_tuned_shape(folder, decode, HERE)
    assert (found.decode.tree, found.decode.max_new_tokens, found.plain) == (TREE.paths(), 7, False)
    assert found.note == "decode.json: a tree of 5 nodes, tuned for this machine (1.50x plain decoding)"
    found = with_tuned_shape(folder, decode, HERE, needs_chain=True)
    assert (found.decode, found.note) == (
        decode,
        "decode.json: not used, it holds a tree and the verifier takes a chain",
    )
    given = DecodeConfig(num_draft_tokens=2)
    assert with_tuned_shape(folder, given, HERE).decode is given
    write_tuned(folder, shape_json(DraftTree.chain(2)))
    assert with_tuned_shape(folder, decode, HERE, needs_chain=True).decode.num_draft_tokens == 2
    for key, value in (("dtype", "bfloat16"), ("threads", 99), ("processor", "other")):
        other = with_tuned_shape(folder, decode, {**HERE, key: value})
        assert other.decode is decode
        assert (
            other.note == f"decode.json: not used, it was tuned for {key} {HERE[key]}, not {value}; run specdraft tune"
        )
    write_tuned(folder, shape_json(PLAIN))
    found = with_tuned_shape(folder, decode, HERE)
    assert (found.decode, found.plain) == (decode, True)
    assert found.note == "decode.json: plain decoding is the fastest here (best draft 0.80x)"
    write_tuned(folder, shape_json(TREE), head={"sha256": "0"})
    assert "tuned for another head" in str(with_tuned_shape(folder, decode, HERE).note)


def test_every_batch_size_has_a_shape_of_its_own(target: HFTarget, tmp_path: Any) -> None:
    folder = save_head(head_of("medusa", target, None), tmp_path / "head")
    path, decode = folder / "decode.json", DecodeConfig()
    write_tuned(folder, shape_json(TREE))
    first = read_tuned(path)
    write_tuned(folder, shape_json(TreeGrowth(3, 2, 5)), batch_size=8)
    write_results(with_known_batches(path, first), path)
    assert list(read_tuned(path)["batches"]) == ["1", "8"]
    assert with_tuned_shape(folder, decode, HERE).decode.tree == TREE.paths()
    found = with_tuned_shape(folder, decode, HERE, batch_size=8)
    assert (found.decode.dynamic_depth, found.decode.dynamic_top_k, found.decode.dynamic_total_tokens) == (3, 2, 5)
    assert found.note == (
        "decode.json: a grown tree of 5 nodes, 3 levels of 2, tuned for this machine and batches of 8 "
        "(1.50x plain decoding)"
    )
    assert "not used, it holds a tree" in str(with_tuned_shape(folder, decode, HERE, True, batch_size=8).note)
    found = with_tuned_shape(folder, decode, HERE, batch_size=4)
    assert found.decode is decode
    assert found.note == "decode.json: not used, it was tuned for batches of 1, 8, not 4; run specdraft tune"
    # What was tuned on another machine is not kept.
    other = {**first, "machine": {**HERE, "threads": 99}}
    assert list(with_known_batches(path, other)["batches"]) == ["1"]
    # A file of the first format holds one batch size.
    rest = {key: value for key, value in first.items() if key != "batches"}
    path.write_text(json.dumps({**rest, **first["batches"]["1"], "schema": 1, "batch_size": 1}))
    assert with_tuned_shape(folder, decode, HERE).decode.tree == TREE.paths()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"schema": 3}', "is not of schema 2"),
        ('{"schema": 1}', "cannot be read"),
    ],
)
def test_a_torn_shape_is_an_error(text: str, message: str, target: HFTarget, tmp_path: Any) -> None:
    folder = save_head(head_of("medusa", target, None), tmp_path / "head")
    (folder / "decode.json").write_text(text)
    with pytest.raises(CheckpointError, match=f"^head: decode.json {message}"):
        with_tuned_shape(folder, DecodeConfig(), HERE)


def test_a_shape_against_the_rules_is_an_error(target: HFTarget, tmp_path: Any) -> None:
    folder = save_head(head_of("medusa", target, None), tmp_path / "head")
    write_tuned(folder, {"plain": False, "num_draft_tokens": None, "tree": [[0], [1, 1]]})
    with pytest.raises(CheckpointError, match=r"^head: decode.json holds no shape"):
        with_tuned_shape(folder, DecodeConfig(), HERE)
