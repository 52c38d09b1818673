"""The command itself: help, Hydra's flags, sweeps, shorthands and exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import specdraft
from specdraft.cli import main as cli
from specdraft.cli.help import field_docs
from specdraft.cli.main import COMMANDS, main, train_main
from specdraft.config.head_schemas import head_schemas
from specdraft.config.schema import RUNS
from specdraft.core.errors import CheckpointError
from specdraft.train._config import OptimConfig

Started = list[tuple[str, Any]]
CODE = "import sys; from specdraft.cli.main import main; sys.exit(main(sys.argv[1:]))"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def in_process(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CODE, *words]
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=True)


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    """The commands that were started with their settings, in an empty folder, instead of running them."""
    monkeypatch.chdir(tmp_path)
    runs: Started = []
    monkeypatch.setattr(cli, "run_command", lambda command, run: runs.append((command, run)))
    return runs


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["-h"], ["help"]):
        assert main(words) == 0
        out = capsys.readouterr().out
        assert all(f"\n  {name} " in out for name in RUNS)
    assert main([]) == 2
    assert "usage: specdraft COMMAND" in capsys.readouterr().err
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"specdraft {specdraft.__version__}\n"


def test_every_command_has_a_module_settings_and_yaml() -> None:
    assert list(COMMANDS) == list(RUNS)
    for module, _ in COMMANDS.values():
        assert (Path(cli.__file__).parent / f"{module}.py").is_file()


@pytest.mark.parametrize("command", RUNS)
def test_help_names_every_setting(command: str, capsys: pytest.CaptureFixture[str], started: Started) -> None:
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert started == []
    for name, meaning in field_docs(RUNS[command]).items():
        assert f"\n{name}:" in out
        assert meaning.split()[0] in out
    for heading in ("== Configuration groups ==", "== Config =="):
        assert heading in out


def test_help_shows_the_settings_in_effect(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", "head=medusa", "optim.lr=0.25"]) == 0
    out = capsys.readouterr().out
    assert f"head: {', '.join(head_schemas())}\n" in out
    experiments = next(line for line in out.splitlines() if line.startswith("experiment: "))
    assert {"debug", "smollm2_eagle3"} <= set(experiments.removeprefix("experiment: ").split(", "))
    assert "  lr: 0.25 " in out
    assert "  num_layers: 1 " in out
    assert "aux_layers" not in out
    assert "name: ??? " in out
    assert field_docs(OptimConfig)["lr"] in " ".join(out.split())
    assert main(["eval", "--help"]) == 0
    out = capsys.readouterr().out
    assert "prompts=... for eval.prompts=..." in out
    assert "head: eagle" not in out


def test_cfg_prints_what_would_run(capsys: pytest.CaptureFixture[str], started: Started) -> None:
    assert main(["train", "--cfg", "job", "experiment=smollm2_eagle3", "optim.lr=0.25"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["name"] == "smollm2_eagle3"
    assert shown["optim"]["lr"] == 0.25
    assert shown["head"]["kind"] == "eagle3"
    assert "hydra" not in shown
    assert main(["train", "--cfg", "job", "-p", "optim"]) == 0
    assert "lr: 0.001" in capsys.readouterr().out
    assert main(["train", "--cfg", "hydra"]) == 0
    hydra = yaml.safe_load(capsys.readouterr().out)["hydra"]
    assert hydra["run"]["dir"] == "."
    assert hydra["output_subdir"] is None
    assert hydra["job"]["chdir"] is False
    assert started == []


def test_info_and_hydra_help(capsys: pytest.CaptureFixture[str], tmp_path: Path, started: Started) -> None:
    # Hydra prints this through logging, which pytest has set up in its own way.
    out = in_process("train", "--info", "searchpath", "--config-dir", str(tmp_path), cwd=tmp_path).stdout
    assert f"file://{tmp_path}" in out
    assert "| main " in out
    assert main(["train", "--hydra-help"]) == 0
    assert "--multirun" in capsys.readouterr().out
    assert "HYDRA_FULL_ERROR" not in os.environ
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["--config-dir", "hydra.searchpath"])
def test_yaml_of_ones_own(how: str, tmp_path: Path, started: Started) -> None:
    """Experiments and options that lie beside the package's, and a head option with part of the values."""
    for folder in ("experiment", "head"):
        (tmp_path / "my" / folder).mkdir(parents=True)
    (tmp_path / "my/experiment/mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /head: deep\nname: mine\noptim:\n  lr: 0.5\n"
    )
    (tmp_path / "my/head/deep.yaml").write_text("defaults: [base_medusa, _self_]\nkind: medusa\nnum_layers: 3\n")
    words = ["--config-dir", "my"] if how == "--config-dir" else ["hydra.searchpath=[file://my]"]
    assert main(["train", *words, "experiment=mine", "head.num_draft_tokens=2"]) == 0
    ((command, run),) = started
    assert command == "train"
    assert (run.name, run.optim.lr) == ("mine", 0.5)
    assert (run.head.kind, run.head.num_layers, run.head.num_draft_tokens) == ("medusa", 3, 2)


def test_multirun_runs_each_combination(tmp_path: Path, started: Started, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "-m", "name=a,b", "optim.lr=0.5", "head=medusa"]) == 0
    assert [(run.name, run.optim.lr, run.head.kind) for _, run in started] == [
        ("a", 0.5, "medusa"),
        ("b", 0.5, "medusa"),
    ]
    assert Path.cwd() == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["multirun.yaml"]


def test_shorthands(started: Started) -> None:
    assert main(["eval", "head=outputs/x/best", "prompts=mt_bench"]) == 0
    assert main(["eval", "head=user/repo", "head.revision=v1", "prompts=[a.jsonl,builtin]", "eval.limit=3"]) == 0
    assert main(["export", "head=x", "push_to=user/repo", "private=true", "dry_run=true", "output=there"]) == 0
    assert main(["generate", "head=null", "target=smollm2", "prompt=hi"]) == 0
    assert main(["export", "head=x", "format=all", "target=here", "out=there"]) == 0
    assert main(["export", "head=x", "format=[eagle3,trtllm]"]) == 0
    assert main(["import", "source=user/repo", "target=here", "out=there"]) == 0
    one, several, export, plain, everything, two, brought = [run for _, run in started]
    assert (one.head.path, one.eval.prompts, one.target.name) == ("outputs/x/best", ["mt_bench"], "from_head")
    assert (several.head.path, several.head.revision) == ("user/repo", "v1")
    assert (several.eval.prompts, several.eval.limit) == (["a.jsonl", "builtin"], 3)
    assert (export.export.push_to, export.export.private, export.export.dry_run) == ("user/repo", True, True)
    assert export.export.output == "there"
    assert plain.head.path is None
    assert (everything.export.format, everything.target.name, everything.export.output) == (["all"], "here", "there")
    assert two.export.format == ["eagle3", "trtllm"]
    assert (brought.source, brought.target.name, brought.output) == ("user/repo", "here", "there")


@pytest.mark.parametrize("key", ["engines", "export.engines"])
def test_a_dictionary_that_is_empty_by_default(key: str, started: Started) -> None:
    word = f"{key}={{vllm: /a/python, llamacpp: /b/python}}"
    assert main(["export", "head=x", "format=eagle3", "verify=engine", word]) == 0
    ((_, run),) = started
    assert run.export.engines == {"vllm": "/a/python", "llamacpp": "/b/python"}


@pytest.mark.parametrize(
    "text",
    [
        "Why is the sky blue?",
        "Hello, how are you? (fine)",
        "it's",
        'say "hi"',
        "${name} and \\${x}",
        "back\\slash\\",
        "a\\'b",
        "{x: 1}",
        "[1,2]",
        "null",
        "3",
        "a=b",
        "two\nlines",
        "漢字 é 😀 #",
        " spaces ",
        "\\\\${y}\\\\",
        "'",
    ],
)
def test_a_prompt_is_taken_as_typed(text: str, started: Started) -> None:
    assert main(["generate", "head=x", f"prompt={text}"]) == 0
    assert started[0][1].prompt == text


def test_exit_codes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    def raising(error: BaseException) -> None:
        def run(command: str, settings: object) -> None:
            raise error

        monkeypatch.setattr(cli, "run_command", run)

    raising(CheckpointError("head: tensor fc is missing, got x; the file\nbelongs to another head"))
    assert main(["eval", "head=x"]) == 2
    assert capsys.readouterr().err == (
        "specdraft: error: head: tensor fc is missing, got x; the file belongs to another head\n"
    )
    raising(KeyboardInterrupt())
    assert main(["eval", "head=x"]) == 130
    assert "interrupted" in capsys.readouterr().err
    raising(ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError):
        main(["eval", "head=x"])
    raising(SystemExit(1))
    with pytest.raises(SystemExit):
        main(["doctor"])


def test_entry_of_launchers(monkeypatch: pytest.MonkeyPatch, started: Started) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "experiment=smollm2_eagle3"])
    assert train_main() == 0
    ((command, run),) = started
    assert (command, run.name) == ("train", "smollm2_eagle3")


def test_train_py_is_the_train_command(tmp_path: Path) -> None:
    script = Path(specdraft.__file__).parents[1] / "train.py"
    command = [sys.executable, str(script), "name=x", "optim.lr=fast"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "specdraft: error: optim.lr: must be a number, got fast; use e.g. 0.001\n"


def test_a_closed_pipe_is_no_fault(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CODE, "train", "--help"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, cwd=tmp_path, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1
