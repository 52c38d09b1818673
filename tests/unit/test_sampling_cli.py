"""Sampling from the command line: eval and generate honour the settings, and say where a rule is lossy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdraft.cli.main import main
from specdraft.decode._sampling_config import SamplingConfig
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.heads.storage import save_head
from specdraft.targets._config import TargetConfig
from specdraft.targets.hf import load_target
from tests.support import make_head
from tests.tiny import tiny_models, tiny_tokenizer

HEAD = "outputs/x/best"
LOSSY = "lossy"


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a target, a head and a file of prompts; also the present folder."""
    monkeypatch.chdir(tmp_path)
    tiny_models["llama"]().save_pretrained("target")
    tiny_tokenizer().save_pretrained("target")
    target = load_target(TargetConfig(name="target"))
    save_head(make_head("eagle3", target.spec, num_draft_tokens=2), HEAD)
    rows = [{"question_id": i, "category": "ab"[i % 2], "turns": [f"Say {i}."]} for i in range(4)]
    Path("questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def evaluate(*words: str) -> dict[str, object]:
    fixed = [
        "prompts=questions.jsonl",
        "decode.max_new_tokens=8",
        "decode.ignore_eos=true",
        "eval.bootstrap_samples=100",
    ]
    assert main(["eval", f"head={HEAD}", *fixed, *words]) == 0
    found: dict[str, object] = json.loads(Path(f"{HEAD}/results.json").read_text())
    return found


def test_eval_of_drawn_text(capsys: pytest.CaptureFixture[str]) -> None:
    results = evaluate("sampling=sample", "sampling.top_p=0.9", "sampling.verifier=block")
    decode, figures = results["decode"], results["sets"]["questions"]  # type: ignore[index]
    assert [decode["temperature"], decode["verifier"], decode["lossless"]] == [1.0, "block", True]
    assert decode["sampling"] == {"temperature": 1.0, "top_p": 0.9, "verifier": "block"}
    assert figures["identical_outputs"] is None
    assert figures["by_category"]["a"]["identical_outputs"] is None
    assert figures["first_divergences"] == []
    assert figures["speedup"]["value"] > 0
    out = capsys.readouterr().out
    assert "temperature 1.0, top_p 0.9, drafts accepted by block" in out
    assert out.count("not applicable (sampled)") == 3
    assert LOSSY not in out
    assert main(["export", f"head={HEAD}", "export.license=mit"]) == 0
    card = Path("outputs/x/export-hf/README.md").read_text()
    assert "Sampled (temperature 1.0, top_p 0.9, verifier block) decoding of one prompt at a time" in card
    assert "not applicable (sampled)" in card


def test_eval_of_grown_trees_names_the_rule_that_holds() -> None:
    grown = ["decode.dynamic_total_tokens=4", "decode.dynamic_top_k=2", "eval.limit=1"]
    assert evaluate("sampling=sample", *grown)["decode"]["verifier"] == "point_mass"  # type: ignore[index]
    assert evaluate("sampling=sample", "eval.limit=1")["decode"]["verifier"] == "speculative_sampling"  # type: ignore[index]


def test_eval_with_penalties_compares_greedy_texts() -> None:
    results = evaluate("sampling.repetition_penalty=1.4")
    assert results["sets"]["questions"]["identical_outputs"] == 4  # type: ignore[index]
    plain = evaluate()
    assert plain["decode"]["sampling"] is None  # type: ignore[index]
    assert plain["decode"]["lossless"]  # type: ignore[index]


def test_typical_acceptance_is_called_lossy_wherever_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    results = evaluate("sampling=sample", "sampling.verifier=typical", "sampling.typical_epsilon=0.01")
    assert results["decode"]["lossless"] is False  # type: ignore[index]
    assert "(lossy: the text's distribution is not the target's)" in capsys.readouterr().out
    assert main(["export", f"head={HEAD}", "export.license=mit"]) == 0
    assert "**lossy**" in Path("outputs/x/export-hf/README.md").read_text()
    capsys.readouterr()
    words = ["generate", f"head={HEAD}", "prompt=hi", "sampling.temperature=1", "decode.max_new_tokens=6"]
    assert main([*words, "sampling.verifier=typical"]) == 0
    assert "(lossy: typical acceptance, the text's distribution is not the target's)" in capsys.readouterr().err
    assert main([*words, "sampling.verifier=speculative_sampling"]) == 0
    assert LOSSY not in capsys.readouterr().err


def test_generate_draws_by_its_seed_and_stops_at_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    target = load_target(TargetConfig(name="target"))
    assert target.tokenizer is not None
    ids = target.tokenizer("What is it?")["input_ids"]
    config = SamplingConfig(temperature=0.9, seed=4)
    tokens = SpeculativeDecoder(target).generate(ids, 20, ignore_eos=True, sampling=config).tokens
    text = target.tokenizer.decode(tokens, skip_special_tokens=True)
    words = ["prompt=What is it?", "raw=true", "decode.max_new_tokens=20", "decode.ignore_eos=true"]
    drawn = ["sampling.temperature=0.9", "sampling.seed=4"]
    assert main(["generate", "target.name=target", "target.dtype=float32", *words, *drawn]) == 0
    assert capsys.readouterr().out == f"{text}\n"
    fixed = ["sampling.verifier=point_mass", "target.dtype=float32"]
    assert main(["generate", f"head={HEAD}", *words, *drawn, *fixed]) == 0
    assert capsys.readouterr().out == f"{text}\n"
    stop = next(text[i : i + 2] for i in range(5, 12) if text[i : i + 2].isalnum())
    assert main(["generate", f"head={HEAD}", *words, *drawn, *fixed, f"sampling.stop=['{stop}']"]) == 0
    assert capsys.readouterr().out == text[: text.index(stop) + 2] + "\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sampling.temperature=2", "sampling.top_p=1.5"], "sampling.top_p: must lie above 0 and at most 1, got 1.5"),
        (["sampling.top_k=3"], "sampling.top_k: has no effect at temperature 0, got 3"),
        (["decode.temperature=1"], "decode.temperature: no such setting, got 1; did you mean sampling.temperature?"),
        (["sampling=sample", "sampling.verifier=block", "decode=tree"], "sampling.verifier: block takes a chain"),
        (
            ["sampling=sample", "sampling.verifier=speculative_sampling", "decode=dynamic"],
            "sampling.verifier: needs drafts that are drawn, which grown trees are not",
        ),
        (
            ["sampling=sample", "decode.tree=[[0],[2],[0,0]]"],
            "decode.tree: the ranks of siblings must be 0, 1, 2, ... where drafts are drawn, got [2] without [1]; add",
        ),
        (
            ["sampling.min_new_tokens=900"],
            "sampling.min_new_tokens: must not exceed decode.max_new_tokens (128), got 900",
        ),
        (
            ["sampling.min_new_tokens=2", "decode.ignore_eos=true"],
            "sampling.min_new_tokens: has no effect with decode.ig",
        ),
        (["sampling.logit_bias=[[500,1]]"], "sampling.logit_bias: the target has 97 tokens, got 500; use smaller ids"),
    ],
)
def test_mistakes_have_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", f"head={HEAD}", "prompt=hi", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_verifier_without_drafts_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "target.name=target", "prompt=hi", "sampling=sample", "sampling.verifier=block"]
    assert main(words) == 2
    assert "sampling.verifier: has no effect without drafts, got block; add head=FOLDER" in capsys.readouterr().err
