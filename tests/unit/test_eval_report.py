"""Tables and results.json, from results of a tiny head."""

from __future__ import annotations

import io
import json
import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specdraft.core.errors import DataError
from specdraft.decode._config import DecodeConfig
from specdraft.eval._config import EvalConfig
from specdraft.eval.acceptance import evaluate_head
from specdraft.eval.prompts import Prompt
from specdraft.eval.report import comparison_table, print_results, report_console, write_results
from tests.support import make_head
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    target = tiny_target()
    head = make_head("medusa", target.spec, num_draft_tokens=3)
    prompts = [Prompt(str(i), "odd" if i % 2 else "even", (f"Say {i}.",)) for i in range(4)]
    config = EvalConfig(bootstrap_samples=100, warmup_prompts=0)
    return evaluate_head(target, head, {"builtin": prompts}, DecodeConfig(max_new_tokens=9), config)


def rendered(results: dict[str, Any], terminal: bool) -> str:
    console = Console(file=io.StringIO(), width=160, force_terminal=terminal, color_system=None)
    print_results(results, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_tables_show_the_figures(results: dict[str, Any], terminal: bool) -> None:
    text = rendered(results, terminal)
    figures = results["sets"]["builtin"]
    low, high = figures["acceptance_length"]["ci95"]
    assert f"{figures['acceptance_length']['value']:.2f} [{low:.2f}, {high:.2f}]" in text
    assert f"{figures['tokens_per_s']['speculative']:.1f}" in text
    assert f"{figures['speedup']['value']:.2f}x [" in text
    assert "4/4" in text
    for part in ("even", "odd"):
        assert f"{figures['by_category'][part]['acceptance_length']['value']:.2f}" in text
    for survival, tested in zip(figures["survival"], figures["reached_per_depth"], strict=True):
        assert not tested or f"{survival:.3f}" in text
    assert "medusa on tiny-llama: a chain of depth 3, greedy, float32 on cpu" in text


def test_depths_that_were_never_tested_are_not_listed(results: dict[str, Any]) -> None:
    changed = deepcopy(results)
    changed["sets"]["builtin"] |= {
        "reached_per_depth": [40, 7, 0],
        "accepted_per_depth": [7, 0, 0],
        "acceptance_rate": [0.175, 0.0, 0.0],
        "survival": [0.175, 0.0, 0.0],
    }
    table = rendered(changed, terminal=False).partition("by depth")[2].strip().partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:3]] for line in table.splitlines() if line.startswith("|")]
    assert cells[-2:] == [["1", "40"], ["2", "7"]]
    header = str(comparison_table([{**changed, "name": "medusa"}], report_console()).columns)
    assert "depth 2" in header
    assert "depth 3" not in header


def test_off_a_terminal_the_tables_are_markdown(results: dict[str, Any]) -> None:
    text = rendered(results, terminal=False)
    assert "\x1b" not in text
    assert [line for line in text.splitlines() if line.startswith("|---")]
    assert not [line for line in rendered(results, terminal=True).splitlines() if line.startswith("|")]


def test_a_piped_report_is_not_wrapped(capsys: pytest.CaptureFixture[str], results: dict[str, Any]) -> None:
    print_results(results, report_console())
    header = next(line for line in capsys.readouterr().out.splitlines() if "acceptance length" in line)
    assert "identical" in header


def test_differences_are_named(results: dict[str, Any]) -> None:
    changed = deepcopy(results)
    one = {"prompt": "2", "turn": 1, "position": 5, "autoregressive": 3, "speculative": 4, "margin": 2.5e-4}
    changed["sets"]["builtin"] |= {
        "first_divergences": [one] * 7,
        "identical_outputs": 3,
        "skipped": {"longer than the target's context": 2},
    }
    text = rendered(changed, terminal=False)
    assert "output differs for prompt 2, turn 1, from token 5; margin of the two best logits there 2.50e-04" in text
    assert "2 more differences are in the results file" in text
    assert "3/4" in text
    assert "2 prompts not decoded to their end (longer than the target's context)" in text


def test_missing_figures_are_dashes(results: dict[str, Any]) -> None:
    changed = deepcopy(results)
    changed["sets"]["builtin"]["acceptance_length"] = {"value": None, "ci95": None}
    changed["sets"]["builtin"]["acceptance_rate"][2] = None
    changed["sets"]["builtin"]["tokens_per_s"]["speculative"] = None
    assert " - |" in rendered(changed, terminal=False)


def test_several_heads_in_one_table(results: dict[str, Any]) -> None:
    other = deepcopy(results)
    other["head"]["kind"] = "eagle3"
    other["decode"]["num_draft_tokens"] = 5
    other["sets"]["builtin"]["survival"] = [0.911, 0.822, 0.733, 0.644, 0.555]
    other["sets"]["builtin"]["reached_per_depth"] = [9, 8, 7, 6, 5]
    console = Console(file=io.StringIO(), width=200)
    console.print(comparison_table([results, other], console))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    medusa, eagle3 = (next(line for line in lines if name in line) for name in ("medusa", "eagle3"))
    assert "0.555" in eagle3
    assert medusa.count("|") == eagle3.count("|")
    assert "4/4" in medusa
    with pytest.raises(DataError, match="not measured on the set, got mt_bench"):
        comparison_table([results], console, "mt_bench")


def test_results_file_is_whole_or_untouched(
    results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep" / "results.json"
    write_results(results, path)
    assert json.loads(path.read_text()) == results

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"results cannot be written.*No space left"):
        write_results({"schema": 1}, path)
    assert json.loads(path.read_text()) == results
    assert [file.name for file in path.parent.iterdir()] == ["results.json"]
