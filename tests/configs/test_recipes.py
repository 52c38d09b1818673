"""Every recipe is whole: its script calls the command with settings that compose, and its figures say what was measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdraft.config.comparison import head_runs
from specdraft.config.overrides import prepare_overrides
from specdraft.config.schema import CompareRun, PipelineRun
from specdraft.config.store import compose_config, to_run

ROOT = Path(__file__).resolve().parents[2]
COMPARISON = ROOT / "recipes/smollm2_compare"
PEERS = ROOT / "recipes/smollm2_peers"
SCRIPTS = sorted(path.parent for path in (ROOT / "recipes").glob("*/run.sh"))
RECIPES = [folder for folder in SCRIPTS if folder not in (COMPARISON, PEERS)]


def called_with(recipe: Path, folder: Path, **environment: str) -> list[str]:
    """The words with which ``run.sh`` calls ``specdraft``."""
    fake = folder / "specdraft"
    fake.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    fake.chmod(0o755)
    variables = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", **environment}
    script = [str(recipe / "run.sh"), "trainer.epochs=1" if recipe in RECIPES else "data.seed=7"]
    output = subprocess.run(script, cwd=folder, env=variables, check=True, capture_output=True, text=True).stdout
    words: list[str] = json.loads(output)
    return words


def settings(words: list[str]) -> PipelineRun:
    assert words[0] == "run"
    run = to_run("run", compose_config("run", prepare_overrides("run", words[1:])))
    assert isinstance(run, PipelineRun)
    return run


def test_there_are_recipes() -> None:
    assert {path.name for path in RECIPES} >= {"smollm2_medusa", "smollm2_eagle", "smollm2_eagle3"}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_the_script_composes(recipe: Path, tmp_path: Path) -> None:
    run = settings(called_with(recipe, tmp_path))
    assert (run.data.sources, run.eval.prompts, run.trainer.epochs) == (["builtin"], ["mt_bench"], 1)
    assert run.name == f"recipe_{recipe.name}"
    own = settings(called_with(recipe, tmp_path, PROMPTS="my.jsonl", EVAL="held.jsonl"))
    assert (own.data.sources, own.eval.prompts) == (["my.jsonl"], ["held.jsonl"])


@pytest.mark.parametrize("size", ["full", "small"])
def test_the_comparison_composes_with_every_kind(size: str, tmp_path: Path) -> None:
    prompts = tmp_path / "my.jsonl"
    prompts.write_text("".join(f"{i}\n" for i in range(5000)))
    for source, own in (
        ({}, "builtin"),
        ({"PROMPTS": str(prompts)}, f"outputs/first_{4000 if size == 'full' else 200}.jsonl"),
    ):
        words = called_with(COMPARISON, tmp_path, SIZE=size, **source)
        assert words[0] == "compare"
        run = to_run("compare", compose_config("compare", prepare_overrides("compare", words[1:])))
        assert isinstance(run, CompareRun)
        runs = head_runs(run)
        assert [one.name for one in runs] == ["medusa", "hydra_chain", "eagle", "eagle3", "peagle", "dflash", "mlp"]
        assert {(one.data.sources[0], one.data.seed, one.head.num_draft_tokens) for one in runs} == {(own, 7, 5)}
        assert {one.trainer.max_tokens for one in runs} == {2_000_000 if size == "full" else 60_000}
        assert runs[0].eval.prompts == ["mt_bench", "humaneval", "gsm8k"]
        assert runs[0].data.limit == (200 if size == "small" and not source else None)
        best = settings(["run", "experiment=smollm2_eagle3"])
        assert (runs[3].optim, runs[3].loss) == (best.optim, best.loss)
        if source:
            lines = (tmp_path / own).read_text().split()
            assert lines == [str(i) for i in range(len(lines))]
            assert len(lines) == (4000 if size == "full" else 200)


def test_the_settings_of_the_peers_differ_in_nothing_else(tmp_path: Path) -> None:
    words = called_with(PEERS, tmp_path)
    run = to_run("compare", compose_config("compare", prepare_overrides("compare", words[1:])))
    assert isinstance(run, CompareRun)
    runs = {one.name: one for one in head_runs(run)}
    assert list(runs) == ["specdraft", "speculators", "specforge", "eagle"]
    assert {one.trainer.max_tokens for one in runs.values()} == {812_816}
    assert {(one.head.kind, one.head.draft_vocab_size, one.head.layer_init) for one in runs.values()} == {
        ("eagle3", 8192, "auto"),
        ("eagle3", 8192, "random"),
    }
    assert [one.optim.optimizer for one in runs.values()] == ["muon", "muon", "adamw", "adamw"]
    assert [one.loss.step_decay for one in runs.values()] == [0.45, 1.0, 0.8, 0.8]
    assert [one.optim.lr for one in runs.values()] == [1e-3, 1e-3, 1e-4, 5e-5]
    # What this project calls best is one thing in all places.
    mine, experiment = runs["specdraft"], settings(["run", "experiment=smollm2_eagle3"])
    assert (mine.optim, mine.loss) == (experiment.optim, experiment.loss)
    assert mine.head.aux_layers == experiment.head.aux_layers


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_the_figures_are_the_ones_in_the_text(recipe: Path) -> None:
    expected = json.loads((recipe / "expected.json").read_text())
    text = (recipe / "README.md").read_text()
    assert expected["sets"]
    for name, figures in expected["sets"].items():
        assert name in text
        low, high = figures["acceptance_length"]["ci95"]
        assert low <= figures["acceptance_length"]["value"] <= high
        assert f"{figures['acceptance_length']['value']:.2f} [{low:.2f}, {high:.2f}]" in text
        low, high = figures["speedup"]["ci95"]
        assert f"{figures['speedup']['value']:.2f}x [{low:.2f}, {high:.2f}]" in text
        assert f"{figures['identical_outputs']}/{figures['num_prompts']}" in text
