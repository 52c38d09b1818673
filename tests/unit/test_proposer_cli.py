"""`specdraft eval` and `generate` with proposers other than a trained head, and comparisons, on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdraft.cli.main import main
from specdraft.config.store import to_proposer
from specdraft.core.errors import ConfigError
from specdraft.decode._proposer_config import DraftModelConfig, NoProposerConfig, SuffixConfig
from specdraft.heads.storage import save_head
from specdraft.targets._config import TargetConfig
from specdraft.targets.hf import load_target
from tests.support import make_head
from tests.tiny import tiny_models, tiny_tokenizer

TARGET = ["target.name=target", "decode.max_new_tokens=12", "target.pack_weights=false"]
EVAL = ["eval", *TARGET, "prompts=questions.jsonl", "eval.limit=2", "eval.bootstrap_samples=100"]


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target, a draft model of its vocabulary, one of another, two heads and prompts in the present folder."""
    monkeypatch.chdir(tmp_path)
    models: dict[str, dict[str, Any]] = {"target": {}, "draft": {"num_hidden_layers": 1}, "other": {"vocab_size": 130}}
    for name, overrides in models.items():
        tiny_models["llama"](**overrides).save_pretrained(name)
        tokenizer = tiny_tokenizer()
        if name == "other":
            tokenizer.add_tokens(["zzz"])
        tokenizer.save_pretrained(name)
    target = load_target(TargetConfig(name="target"))
    for kind in ("medusa", "eagle3"):
        save_head(make_head(kind, target.spec, num_draft_tokens=2), f"heads/{kind}")
    rows = [{"question_id": i, "category": "abc"[i], "turns": [f"Say {i} {i} {i}."]} for i in range(3)]
    Path("questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["proposer=none"], "none"),
        (["proposer=prompt_lookup", "proposer.max_ngram=2"], "prompt_lookup"),
        (["proposer=suffix", "proposer.num_nodes=5"], "suffix"),
        (["proposer=draft_model", "proposer.name=draft"], "draft_model"),
    ],
)
def test_a_proposer_is_measured(words: list[str], kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*EVAL, *words]) == 0
    results = json.loads(Path("results.json").read_text())
    assert [results["schema"], results["head"], results["proposer"]["kind"]] == [1, None, kind]
    figures = results["sets"]["questions"]
    assert figures["identical_outputs"] == figures["num_prompts"] == 2
    assert figures["tokens_per_s"]["speculative"] > 0
    if kind == "none":
        assert figures["acceptance_length"]["value"] == 1.0
        assert figures["drafted_tokens"] == 0
    if kind == "draft_model":
        assert results["memory_bytes"]["head"] > 0
        assert results["proposer"]["settings"] == {
            "name": "draft",
            "revision": None,
            "layers": 1,
            "dtype": None,
            "num_draft_tokens": None,
            "tree": None,
            "min_probability": 0.0,
            "adaptive": True,
        }
    assert f"{kind} on target" in capsys.readouterr().out


def test_several_are_compared_in_one_table_and_one_file(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "proposers=[none,prompt_lookup,suffix,{kind: suffix, num_nodes: 3},{kind: draft_model, layers: 2}]",
        "heads=[heads/medusa,heads/eagle3]",
    ]
    assert main([*EVAL, *words]) == 0
    found = json.loads(Path("comparison.json").read_text())
    assert found["schema"] == 1
    names = [one["name"] for one in found["results"]]
    assert names == [
        "none",
        "prompt_lookup",
        "suffix",
        "suffix num_nodes=3",
        "draft_model layers=2",
        "medusa",
        "eagle3",
    ]
    assert [one["schema"] for one in found["results"]] == [1] * len(names)
    assert [one["proposer"]["settings"].get("num_nodes") for one in found["results"][2:4]] == [15, 3]
    assert found["results"][4]["memory_bytes"]["head"] == 0, "the first layers share the target's weights"
    assert [one["head"]["kind"] for one in found["results"][5:]] == ["medusa", "eagle3"]
    assert all(one["sets"]["questions"]["identical_outputs"] == 2 for one in found["results"])
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line.split("|")[1].strip() for line in table if "2/2" in line] == names
    assert not Path("heads/medusa/results.json").exists()


def test_a_comparison_with_a_head_that_does_not_fit_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    other = load_target(TargetConfig(name="draft"))
    save_head(make_head("medusa", other.spec, num_draft_tokens=2), "heads/other")
    assert main([*EVAL, "proposers=[none]", "heads=[heads/medusa,heads/other]"]) == 2
    assert main([*EVAL, "proposers=[none]", "heads=[heads/medusa]", "decode.num_draft_tokens=9"]) == 2
    found = capsys.readouterr()
    assert "measuring" not in found.out
    first, second = found.err.splitlines()
    assert "head: was trained for a target with num_hidden_layers 1, got 4 (target)" in first
    assert "decode.num_draft_tokens: deeper than the head drafts (2), got depth 9" in second


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{kind: draft_model, name: other}", "proposer.name: its vocabulary is not the target's"),
        ("{kind: draft_model, name: missing/}", "proposer.name: "),
        ("{kind: draft_model, layers: 9}", "proposer.layers: the model has 4, got 9; use fewer"),
    ],
)
def test_a_comparison_with_a_draft_model_that_does_not_fit_measures_nothing(
    bad: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*EVAL, f"proposers=[none,{bad}]"]) == 2
    found = capsys.readouterr()
    assert "measuring" not in found.out
    assert message in found.err
    assert found.err.count("\n") == 1


def test_a_comparison_says_which_shape_a_head_has(capsys: pytest.CaptureFixture[str]) -> None:
    tune = ["tune", "head=heads/medusa", "target.pack_weights=false", "prompts=questions.jsonl", "tune.limit=1"]
    assert main([*tune, "tune.max_new_tokens=8", "tune.max_nodes=2", "tune.rounds=1"]) == 0
    capsys.readouterr()
    assert main([*EVAL, "heads=[heads/medusa,heads/eagle3]"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("measuring medusa (decode.json: ") for line in lines)
    assert "measuring eagle3" in lines


def test_a_comparison_takes_the_target_of_its_heads(capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in EVAL if not word.startswith("target.name")]
    assert main([*words, "heads=[heads/medusa,heads/medusa/]", "output=two.json"]) == 0
    names = [one["name"] for one in json.loads(Path("two.json").read_text())["results"]]
    assert names == ["medusa heads/medusa", "medusa heads/medusa/"]


@pytest.mark.parametrize("words", [["proposer=prompt_lookup"], ["proposer=suffix"], ["proposer=draft_model"]])
def test_generate_writes_the_same_text(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", *TARGET, "prompt=Say 1 1 1.", "decode.ignore_eos=true"]
    assert main(command) == 0
    plain = capsys.readouterr()
    assert "plain decoding" in plain.err
    assert main([*command, *words]) == 0
    drafted = capsys.readouterr()
    assert drafted.out == plain.out
    assert "acceptance length" in drafted.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["proposer=prompt_lookup", "head=heads/medusa"], "head: has no effect with proposer=prompt_lookup"),
        (["proposer=lookup"], "proposer: no such option, got lookup; did you mean prompt_lookup?"),
        (
            ["proposer=[suffix,prompt_lookup]"],
            "proposer: takes one option, got [suffix,prompt_lookup]; compare several with proposers=[suffix,prompt_lookup]",
        ),
        (["proposer=suffix,none"], "got suffix,none; write proposers=[suffix,none] for a list"),
        (["proposer=suffix", "proposer.max_ngram=2"], "proposer.max_ngram: no such setting"),
        (
            ["proposer=suffix", "decode.num_draft_tokens=2"],
            "decode: the draft's shape and head_dtype are those of heads",
        ),
        (
            ["proposer=draft_model", "proposer.name=other"],
            "its vocabulary is not the target's (91 tokens, not 90), got other",
        ),
        (["proposer=draft_model", "proposer.layers=7"], "proposer.layers: the model has 4, got 7"),
        (["proposer=prompt_lookup", "target.name=from_head"], "target.name: there is no head to take it from"),
        (["proposers=[none]", "head=heads/medusa"], "heads, proposers: are in place of head and proposer"),
        (["proposers=[nothing]"], "proposers: no such option, got nothing"),
        (
            ["proposers=[{kind: suffix, num_nodes: many}]"],
            "error: proposers.num_nodes: must be a whole number, got many",
        ),
        (["proposers=[{kind: suffix, nodes: 3}]"], "error: proposers.nodes: no such setting"),
        (["proposers=[{num_nodes: 3}]"], "proposers: an entry lacks its kind, got {'num_nodes': 3}"),
        (["proposer=draft_model", "proposer.name=./absent"], "proposer.name: no such folder, got './absent'"),
        (["proposer=draft_model", "proposer.tree=[[0],[1,0]]"], "proposer.tree: the path [1, 0] lacks its beginning"),
        (["proposer=draft_model", "proposer.tree=[[]]"], "proposer.tree: a path is a non-empty list of ranks"),
        (["proposer=none", "decode.show=true"], "decode.show: has no effect where answers are not shown"),
        (
            ["proposers=[suffix]", "sampling.temperature=1.0", "sampling.verifier=speculative_sampling"],
            "sampling.verifier: needs drafts that are drawn, got speculative_sampling with proposers and no heads",
        ),
        (["proposers=[none]", "target.name=from_head"], "target.name: there is no head to take it from"),
        (["heads=[heads/medusa,heads/medusa]"], "heads: a head is empty or named twice"),
        (["proposer=none", "output=heads"], "output: is a folder"),
        (["proposers=[none]", "output=heads"], "output: is a folder"),
        (
            ["proposer=suffix", "sampling.temperature=1.0", "sampling.verifier=block"],
            "sampling.verifier: needs drafts that are drawn",
        ),
    ],
)
def test_a_mistake_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = [word for word in EVAL if word.partition("=")[0] not in {new.partition("=")[0] for new in words}]
    before = sorted(Path().rglob("*"))
    assert main([*given, *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert sorted(Path().rglob("*")) == before


def test_sampled_texts_with_a_seed_do_not_depend_on_the_proposer(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", *TARGET, "prompt=Say 1 1 1.", "decode.ignore_eos=true", "sampling.temperature=0.3"]
    texts = []
    for words in ([], ["proposer=prompt_lookup"], ["proposer=suffix"]):
        assert main([*command, *words]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2]


def test_entries_of_a_comparison() -> None:
    assert to_proposer("none") == NoProposerConfig()
    assert to_proposer({"kind": "suffix", "num_nodes": 4}) == SuffixConfig(num_nodes=4)
    assert to_proposer({"kind": "draft_model", "tree": [[0], [1]]}) == DraftModelConfig(tree=[[0], [1]])
    with pytest.raises(ConfigError, match="proposers: no such option, got head"):
        to_proposer("head")
