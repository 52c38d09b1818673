"""``specdraft compare`` from its words to one table, on a tiny target."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from specdraft.cli import compare
from specdraft.cli.main import main
from specdraft.config.comparison import TRAINING_NAME, head_runs
from specdraft.config.head_schemas import head_schemas
from specdraft.config.overrides import prepare_overrides
from specdraft.config.schema import CompareRun
from specdraft.config.store import compose_config, to_run
from specdraft.core.errors import ConfigError, SpecDraftError
from specdraft.heads.storage import load_head
from specdraft.train.sizing import TOLERANCE, fit_size, num_parameters
from tests.cli import experiment_words, make_workspace
from tests.tiny import tiny_target
from tests.training import reset_accelerator

Captured = pytest.CaptureFixture[str]
TWO = ["heads=[medusa, 'eagle name=hass loss=hass head.unroll_steps=2 data.batch_size=1']"]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("compare"))


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The heads that were trained or measured, in this process and an empty folder."""
    monkeypatch.chdir(tmp_path)
    names: list[str] = []

    def here(found: Any, settings: dict[str, Any]) -> None:
        reset_accelerator()
        names.append(found.name)
        assert compare.finish_head(found, settings) == 0

    monkeypatch.setattr(compare, "_in_own_process", here)
    return names


def words(workspace: Path, *more: str) -> list[str]:
    small = [word for word in experiment_words(workspace) if not word.startswith("trainer.epochs")]
    return ["compare", "name=both", *small, "head.num_draft_tokens=2", *more]


def composed(*more: str) -> CompareRun:
    run = to_run("compare", compose_config("compare", prepare_overrides("compare", ["name=x", *more])))
    assert isinstance(run, CompareRun)
    return run


def test_two_heads_at_as_many_tokens(workspace: Path, trained: list[str], capsys: Captured) -> None:
    call = words(workspace, *TWO, "compare.value=700")
    assert main(call) == 0
    assert trained == ["medusa", "hass"]
    found = json.loads(Path("outputs/both/comparison.json").read_text())
    assert found["budget"] == {"of": "tokens", "value": 700}
    assert [one["name"] for one in found["results"]] == trained
    for one in found["results"]:
        assert 700 <= one["training"]["tokens"] < 800
        assert one["training"]["seconds"] > 0 and one["training"]["peak_memory_gib"] > 0
        assert one["sets"]["asked"]["identical_outputs"] == 2
    assert found["results"][1]["head"]["settings"]["unroll_steps"] == 2
    assert load_head("outputs/both/hass/best").config.num_draft_tokens == 2
    table = Path("outputs/both/comparison.md").read_text()
    assert "Equal budget: 700 tokens for each head" in table
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows] == ["head", "medusa", "hass"]
    assert rows[1][3] == f"{found['results'][0]['head']['num_parameters']:,}"
    assert rows[1][-1] == "2/2"
    assert table.strip().splitlines()[-1].strip() in capsys.readouterr().out
    data = [path for path in Path("outputs/data").iterdir() if (path / "manifest.json").is_file()]
    assert len(data) == 1, "both heads read one data folder"


def test_what_is_finished_is_not_done_again(workspace: Path, trained: list[str], capsys: Captured) -> None:
    call = words(workspace, *TWO, "compare.value=100")
    assert main(call) == 0
    weights = Path("outputs/both/medusa/best/model.safetensors")
    written = weights.stat().st_mtime_ns
    assert main(call) == 0
    assert trained == ["medusa", "hass"]
    assert "head 2 of 2: hass is finished" in capsys.readouterr().out
    assert main([*call, "eval.limit=1"]) == 0
    assert trained == ["medusa", "hass"] * 2, "measured again, on other prompts"
    assert weights.stat().st_mtime_ns == written, "and not trained again"
    Path("outputs/both/hass", TRAINING_NAME).unlink()
    assert main([*call, "eval.limit=1"]) == 0
    assert trained[4:] == ["hass"]
    third = [word if not word.startswith("heads=") else f"{word[:-1]}, mlp]" for word in call]
    assert main([*third, "eval.limit=1"]) == 0
    assert trained[5:] == ["mlp"], "a head that is added joins those that are there"
    capsys.readouterr()
    assert main([*call, "optim.lr=0.5"]) == 2
    found = capsys.readouterr()
    assert found.err == (
        "specdraft: error: name: the head medusa was trained with other settings, got another optim.lr for "
        "outputs/both/medusa; use the old ones, another name=, or remove that folder\n"
    )


def test_a_head_that_changes_its_target_is_named(workspace: Path, trained: list[str], capsys: Captured) -> None:
    pytest.importorskip("peft", reason="adapters are trained through peft, which is not installed")
    assert main(words(workspace, "heads=['medusa name=two adapter=lora adapter.rank=2']", "compare.value=200")) == 0
    table = Path("outputs/both/comparison.md").read_text()
    assert "| two (adapted target, lossy) |" in table
    assert "two: the target is no longer the original" in table
    (one,) = json.loads(Path("outputs/both/comparison.json").read_text())["results"]
    assert one["drift"]["kl"]["value"] > -1e-6


def test_heads_of_one_size(workspace: Path, trained: list[str], capsys: Captured) -> None:
    call = words(workspace, "heads=[medusa, eagle3]", "compare.budget=parameters", "compare.value=40000")
    assert main([*call, "trainer.max_steps=2"]) == 0
    results = json.loads(Path("outputs/both/comparison.json").read_text())["results"]
    sizes = [one["head"]["num_parameters"] for one in results]
    assert all(abs(size - 40000) <= 4000 for size in sizes)
    assert all(one["training"]["steps"] == 2 for one in results)
    assert "medusa: head.num_layers=" in capsys.readouterr().out
    assert main([*call, "trainer.max_steps=2"]) == 0
    assert trained == ["medusa", "eagle3"], "a fitted head is recognised"
    assert main([*call[:-1], "compare.value=41000", "trainer.max_steps=2"]) == 2
    assert "got another compare.value for outputs/both/medusa" in capsys.readouterr().err


@pytest.mark.parametrize("kind", head_schemas())
def test_every_kind_comes_near_a_size(kind: str) -> None:
    spec = tiny_target("llama").spec
    config = head_schemas()[kind](kind=kind, num_draft_tokens=3, draft_vocab_size=40)
    wanted = 3 * num_parameters(config, spec)
    fitted = fit_size(config, spec, wanted)
    real = fitted.build(spec).num_parameters
    assert real == num_parameters(fitted, spec)
    assert abs(real - wanted) <= TOLERANCE * wanted
    changed = {name for name in config.__dataclass_fields__ if getattr(config, name) != getattr(fitted, name)}
    assert changed == {config.size_setting}


def test_a_size_that_cannot_be_is_one_line() -> None:
    spec = tiny_target("llama").spec
    with pytest.raises(
        ConfigError, match=r"compare\.value: eagle comes no nearer than [\d,]+ parameters \(head\.inter"
    ):
        fit_size(head_schemas()["eagle"](kind="eagle"), spec, 10)


def test_settings_go_to_every_head_and_its_own_win() -> None:
    run = composed(
        "heads=[medusa, 'mlp optim.lr=0.5', 'experiment=smollm2_eagle name=e']",
        "compare.budget=minutes",
        "compare.value=0.5",
        "optim.lr=0.25",
        "optim.warmup_ratio=0.5",
        "head.draft_vocab_size=64",
        "output_dir=there",
        "data.system='a, b'",
    )
    with pytest.raises(ConfigError, match=r"heads: medusa and e differ in .*, which all must share"):
        head_runs(run)
    run.compare.heads.pop()
    runs = head_runs(run)
    assert [one.optim.lr for one in runs] == [0.25, 0.5]
    assert [one.optim.warmup_ratio for one in runs] == [0.5, 0.5]
    assert [one.head.draft_vocab_size for one in runs] == [64, 64]
    assert [one.trainer.max_minutes for one in runs] == [0.5, 0.5]
    assert [str(one.folder) for one in runs] == ["there/x/medusa", "there/x/mlp"]
    assert {str(one.data_dir) for one in runs} == {"there/data"}
    assert {one.data.system for one in runs} == {"a, b"}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (["heads=[]"], "heads: are needed, got none"),
        (["heads=[medusa]", "compare.value=null"], "compare.value: is needed and must be positive, got None"),
        (["heads=[medusa]", "compare.value=1.5"], "compare.value: must be a whole number of tokens, got 1.5"),
        (
            ["heads=[medusa]", "compare.budget=money"],
            "compare.budget: unknown, got 'money'; use tokens, minutes, parameters",
        ),
        (["heads=[meduza]"], "heads: meduza: head: no such option, got meduza; did you mean medusa?"),
        (["heads=['medusa loss=dspark']"], "heads: medusa loss=dspark: loss.terms.confidence: this head estimates no"),
        (["heads=['medusa head.num_layer=2']"], "did you mean head.num_layers?"),
        (["heads=['loss=soft_ce']"], "heads: names no head, got loss=soft_ce; begin with an option of head"),
        (["heads=['medusa name=\"a']"], "heads: cannot be read (No closing quotation)"),
        (["heads=[medusa, 'medusa head.num_layers=2']"], "heads: two are called medusa"),
        (["heads=[medusa, 'mlp data.limit=5']"], "heads: medusa and mlp differ in data.limit, which all must share"),
        (["heads=['medusa resume=must']"], "heads: resume is that of the comparison"),
        (["heads=['medusa name=a/b']"], "heads: medusa name=a/b: name: must be one folder name"),
        (["heads=[medusa]", "trainer.epochs=3"], "trainer.epochs: the budget says how long to train"),
        (["heads=['medusa trainer.max_steps=3']"], "trainer.max_steps: the budget says how long to train"),
        (["heads=[medusa]", "trainer.early_stop=3"], "trainer.early_stop: would leave part of the budget, got 3"),
        (["heads=[medusa]", "resume=auto"], "resume: has no effect, since a comparison always continues"),
        (["heads=[medusa]", "head=eagle"], "head: differs from head to head, got head=eagle"),
        (["heads=[medusa]", "optim.lrr=1"], "optim.lrr: no such setting, got 1; did you mean optim.lr"),
        (
            ["heads=[medusa]", "compare.budget=parameters", "head.draft_vocab_coverage=0.9"],
            "head.draft_vocab_coverage: leaves the size open",
        ),
    ],
)
def test_a_mistake_is_one_line_before_anything_loads(
    bad: list[str], message: str, trained: list[str], capsys: Captured
) -> None:
    value = [] if any("compare.value" in word for word in bad) else ["compare.value=100"]
    assert main(["compare", "name=x", "target.name=nowhere/", *value, *bad]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert trained == [] and list(Path().iterdir()) == []


def test_several_processes_are_refused(trained: list[str], capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["compare", "name=x", "heads=[medusa]", "compare.value=9"]) == 2
    assert "compare: trains one head after the other in a process of its own" in capsys.readouterr().err


def start(folder: Path, call: list[str], **options: Any) -> subprocess.Popen[str]:
    code = "import sys; from specdraft.cli.main import main; sys.exit(main(sys.argv[1:]))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code, *call], cwd=folder, env=environment, text=True, **options)


@pytest.mark.slow
def test_a_stop_leaves_a_checkpoint_and_the_same_command_continues(workspace: Path, tmp_path: Path) -> None:
    """Processes of their own: the stop goes on to the one that trains; then a short rest of the budget finishes it."""
    call = words(workspace, "heads=[medusa]", "compare.budget=minutes")
    first = start(tmp_path, [*call, "compare.value=60"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    metrics = tmp_path / "outputs/both/medusa/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.is_file() or metrics.stat().st_size == 0:
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    _, err = first.communicate(timeout=60)
    assert first.returncode == 130
    assert err.splitlines()[-1] == "specdraft: interrupted"
    assert "specdraft: stopped; the same command continues" in err
    checkpoints = list((tmp_path / "outputs/both/medusa/checkpoints").glob("step-*"))
    assert checkpoints and not (tmp_path / "outputs/both/medusa" / TRAINING_NAME).exists()
    second = start(tmp_path, [*call, "compare.value=0.0001"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out, _ = second.communicate(timeout=120)
    assert second.returncode == 0, out
    assert "acceptance length" in out
    (one,) = json.loads((tmp_path / "outputs/both/comparison.json").read_text())["results"]
    assert one["training"]["seconds"] > 0.006


def test_a_mistake_in_the_other_process_is_told_here(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = composed("heads=[medusa]", "compare.value=100", f"target.name={tmp_path}/nowhere", "eval.prompts=[builtin]")
    (found,) = head_runs(run)
    with pytest.raises(SpecDraftError, match=r"^heads: medusa: target\.name: no such folder"):
        compare._in_own_process(found, {})
