"""Mistakes on the command line: one line on stderr, exit code 2, no traceback, and no torch for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdraft.cli import main as cli
from specdraft.cli.main import main
from specdraft.config.head_schemas import head_schemas

PREFIX = "specdraft: error: "
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(command: str, run: object) -> None:
        pytest.fail(f"{command} was started")

    monkeypatch.setattr(cli, "run_command", refuse)


TABLE = [
    # the sub-command and its words
    ("trian name=x", "command: no such command, got trian; did you mean train?"),
    (
        "xyz",
        "command: no such command, got xyz; use one of plan, doctor, prepare, train, eval, tune, generate, export, import, run",
    ),
    (
        "train smollm2_eagle",
        "smollm2_eagle: is no setting, got a word without key=value; write experiment=smollm2_eagle",
    ),
    ("train name", "name: is no setting, got a word without key=value; write key=value"),
    ("train =x", "=x: is no setting, got a word without key=value; write key=value"),
    ("train name=x --nope", "command line: cannot be read, got unrecognized arguments: --nope; see specdraft --help"),
    ("train name=x --cfg jib", "command line: cannot be read, got argument --cfg/-c: invalid choice: 'jib'"),
    # unknown keys
    ("train nmae=x", "nmae: no such setting, got x; did you mean name?"),
    ("train name=x lr=1e-3", "lr: no such setting, got 1e-3; did you mean optim.lr?"),
    ("train name=x optim.lrr=1", "optim.lrr: no such setting, got 1; did you mean optim.lr?"),
    ("train name=x hed.num_layers=1", "hed.num_layers: no such setting, got 1; did you mean head.num_layers"),
    (
        "train name=x head=medusa head.num_layer=2",
        "head.num_layer: no such setting, got 2; did you mean head.num_layers",
    ),
    ("train name=x head=medusa head.aux_layers=[1]", "head.aux_layers: no such setting, got [1]; "),
    ("train name=x foo/bar=1", "foo/bar: no such setting, got 1; use one of name, seed, output_dir"),
    ("eval head=x trainer.epochs=1", "trainer.epochs: no such setting, got 1; "),
    # keys added by force
    ("train name=x +typo=1", "typo: no such setting, got 1; use one of name, seed"),
    ("train name=x +head.num_layer=1", "head.num_layer: no such setting, got 1; "),
    ("train name=x ++optim.lrr=1", "optim.lrr: no such setting, got 1; did you mean optim.lr?"),
    ("train name=x +optim.lr=1", "+optim.lr: exists already, got +optim.lr=1; write optim.lr=1"),
    ("train name=x +head=medusa", "+head: exists already, got +head=medusa; write head=medusa"),
    ("train name=x ++head=medusa", "++head: is a choice, got ++head=medusa; write head=medusa"),
    ("train name=x +experiment=debug", "+experiment: exists already, got +experiment=debug; write experiment=debug"),
    # keys left out
    ("train name=x ~optim", "~optim: cannot be left out, got ~optim; set it to another value instead"),
    ("train name=x ~optim.lr", "~optim.lr: cannot be left out, got ~optim.lr; set it to another value instead"),
    ("train name=x ~loss.terms.sft_ce", "~loss.terms.sft_ce: there is nothing to leave out"),
    # options of groups
    ("train name=x head=medus", "head: no such option, got medus; did you mean medusa?"),
    ("train experiment=nope", "experiment: no such option, got nope; use one of debug, smollm2_dflash,"),
    ("train name=x optim=sgd", "optim: no such option, got sgd; use one of adamw"),
    ("train name=x optim=3", "optim: no such option, got 3; use one of adamw"),
    ("train name=x target=null", "target: no such option, got null; use one of from_head, hub, smollm2"),
    ("train name=x head=", f"head: no such option, got ''; use one of {', '.join(head_schemas())}"),
    ("train name=x head.kind=medusa", "head.kind: comes with the option of head, got medusa; write head=medusa"),
    ("train name=x head.kind=nope", f"head.kind: no such option, got nope; use one of {', '.join(head_schemas())}"),
    # types
    ("train name=x optim.lr=fast", "optim.lr: must be a number, got fast; use e.g. 0.001"),
    ("train name=x optim.lr=", "optim.lr: must be a number, got ''; use e.g. 0.001"),
    ("train name=x trainer.epochs=2.5", "trainer.epochs: must be a whole number, got 2.5; use e.g. 1"),
    ("train name=x seed=null", "seed: must have a value, got null; use e.g. 0"),
    (
        "train name=x trainer.skip_nonfinite=maybe",
        "trainer.skip_nonfinite: must be true or false, got maybe; use e.g. false",
    ),
    ("train name=x data.sources=builtin", "data.sources: must be a list, got builtin; write data.sources=[builtin]"),
    ("train name=x optim.betas=[a,b]", "optim.betas[0]: must be a number, got [a,b]"),
    ("train name=x loss.terms=3", "loss.terms: must be a dictionary, got 3; correct it"),
    ("train name=x optim.lr.x=3", "optim.lr: must be one value, got "),
    (
        "train name=x loss.terms.hard_ce=1",
        "loss.terms.hard_ce: is not in the dictionary yet, got 1; add it with +loss.terms.hard_ce=1",
    ),
    ("train name=x decode.tree=[[0],[one]]", "decode.tree[1]: must be a whole number, got [[0],[one]]"),
    # missing
    ("train", "name: is needed, got nothing; add name=..."),
    ("run head=medusa", "name: is needed, got nothing; add name=..."),
    ("eval", "head: is needed, got null; add head=FOLDER or a Hub id"),
    ("export", "head: is needed, got null; add head=FOLDER or a Hub id"),
    ("tune", "head: is needed, got null; add head=FOLDER or a Hub id"),
    ("tune head=x batch_size=0", "tune.batch_size: must be at least 1, got 0; use more"),
    ("tune head=x prompts=[a,a] tune.max_nodes=0", "tune.max_nodes: must lie in 1..128, got 0"),
    ("generate head=x", "prompt: is needed, got nothing; add prompt=..."),
    ("train name=x target=hub", "target.name: must not be empty, got ''; give a Hub id, a folder or smollm2"),
    ("train name=x data=files", "data.sources: must name at least one source, got []; use e.g. [builtin]"),
    # heads, losses and drafts that do not fit each other
    (
        "train name=x head=eagle3 loss=dspark",
        "loss.terms.confidence: this head estimates no acceptance, got head.kind eagle3; remove the term",
    ),
    (
        "train name=x head=dflash head.confidence_head=true",
        "head.confidence_head: is trained by loss.terms.confidence alone, got true without it; use loss=dspark",
    ),
    ("train name=x decode.min_confidence=0.3", "decode.min_confidence: needs a head with a confidence head, got 0.3"),
    (
        "eval head=x decode=tree decode.min_confidence=0.3",
        "decode.min_confidence: cuts chains alone, got 0.3; set decode.tree and",
    ),
    ("train name=x head.draft_vocab_coverage=2", "head.draft_vocab_coverage: must lie in (0, 1] or be null, got 2"),
    # values against a rule
    (
        "train name=a/b",
        "name: must be one folder name of letters, digits, '.', '_' and '-', got 'a/b'; use e.g. my_run",
    ),
    ("train name=..", "name: must be one folder name"),
    ("train name=data", "name: is the folder of the prepared data, got 'data'; use another name"),
    ("train name=x output_dir=", "output_dir: must not be empty, got ''; use e.g. outputs"),
    ("train name=x resume=yes", "resume: unknown, got 'yes'; use never, auto, must"),
    ("train name=x resume=must", "resume: no checkpoint under outputs/x, got must; use resume=auto"),
    ("train name=x trainer.epochs=0", "trainer.epochs: must be at least 1, got 0; use 1 or more"),
    ("train name=x head.num_draft_tokens=40", "head.num_draft_tokens: must lie in 1..32, got 40"),
    (
        "train name=x data.max_length=5",
        "data.max_length: must be at least head.num_draft_tokens + 2 (6), got 5; use longer rows",
    ),
    (
        "train name=x data.max_length=128",
        "data.max_new_tokens: leaves no room for a prompt in data.max_length (128), got 128",
    ),
    (
        "train name=x loss.step_weights=[1.0,0.5]",
        "loss.step_weights: must be one for each of the 4 depths that the head trains, got [1.0, 0.5]; give 4 or null",
    ),
    (
        "train name=x decode.num_draft_tokens=5",
        "decode.num_draft_tokens: must not exceed head.num_draft_tokens (4), got 5",
    ),
    (
        "train name=x decode=tree head.num_draft_tokens=3",
        "decode.tree: must not be deeper than head.num_draft_tokens (3), got a path of 4",
    ),
    (
        "train name=x trainer.eval_prompts=0 trainer.eval_every=5",
        "trainer.eval_every: has no effect without trainer.eval_prompts, got 5",
    ),
    ("train name=x target.name=from_head", "target.name: there is no trained head yet, got 'from_head'"),
    ("doctor rows=0", "rows: must be at least 1, got 0"),
    ("doctor examples=17", "examples: must lie in 0..rows (16), got 17"),
    ("doctor only=[masks] skip=[leak]", "skip: contradicts only (['masks']), got ['leak']; give one of them"),
    ("doctor check=lossless html=x.html", "html: has no effect with check=lossless, got x.html; use check=setup"),
    ("doctor html=-", "html: needs a file, got -; use e.g. doctor.html"),
    ("plan steps=2", "steps: too few to measure by, got 2; use 0 or e.g. 20"),
    ("plan processes=0", "processes: must be at least 1, got 0"),
    ("plan json=", "json: must not be empty, got ''; use null or plan.json"),
    ("generate prompt=hi", "target.name: there is no head to take it from, got 'from_head'; add target.name=smollm2"),
    (
        "generate prompt=hi target=smollm2 decode.show=true",
        "decode: show, head_dtype and the draft's shape have no effect, got no head",
    ),
    (
        "generate prompt=hi target=smollm2 decode.head_dtype=bfloat16",
        "decode: show, head_dtype and the draft's shape have no effect, got no head",
    ),
    ("generate prompt= head=x", "prompt: must not be empty, got ''; write prompt='...'"),
    (
        "generate prompt=hi head.revision=main target=smollm2",
        "head.revision: has no effect without a Hub id, got 'main'; remove it",
    ),
    ("export head=x format=gguf2", "export.format: unknown, got 'gguf2'"),
    ("export head=x format=[hf,all]", "export.format: unknown, got 'all'; use all, or "),
    ("export head=x target=", "target.name: must not be empty, got ''; give a folder or a Hub id"),
    ("export head=x target.revision=v1", "target.revision: has no effect without a Hub id, got 'v1'; remove it"),
    ("import", "source: is needed, got nothing; add source=..."),
    ("import source=", "source: must not be empty, got ''; give a folder or a Hub id"),
    ("import source=a/b num_draft_tokens=0", "num_draft_tokens: must lie in 1..32, got 0"),
    ("import source=a/b output=", "output: must not be empty, got ''; use null or a folder"),
    ("import source=. revision=v1", "revision: has no effect without a Hub id, got 'v1'"),
    ("export head=x push_to=me", "export.push_to: is not of the form user/name, got 'me'"),
    ("export head=x private=true", "export.private: has no effect without push_to, got true"),
    # Hydra's own
    ("train name=x hydra.run.dir=y", "hydra.run.dir: has no effect without --multirun, got y; use output_dir and name"),
    ("train name=x hydra/job_logging=stdout", "hydra/job_logging: has no effect without --multirun, got stdout"),
    ("train name=a,b", "name: several values, got a,b; write [a,b] for a list"),
    ("train name='x", "name: cannot be read, got 'x; quote special characters"),
    (
        "train name=x optim.lr=${nope}",
        "optim.lr: its interpolation has no result, got Interpolation key 'nope' not found",
    ),
    ("train name=x --config-dir nowhere", "--config-dir: no such folder, got nowhere; give a folder with YAML"),
    ("train name=x --config-name nope", "--config-name: no such file, got nope.yaml; give --config-dir"),
    ("train name=x hydra.searchpath=[file://nowhere]", "hydra.searchpath: no such folder, got nowhere"),
    ("train name=x optim@foo=adamw", "configuration: cannot be composed, got Could not override 'optim@foo'."),
    # through Hydra's own entry
    ("train name=x --cfg job head=medus", "head: no such option, got medus; did you mean medusa?"),
    ("train name=x --cfg job optim.lrr=3", "optim.lrr: no such setting, got 3; did you mean optim.lr?"),
    ("train name=x,y --multirun optim.lr=fast", "optim.lr: must be a number, got fast; use e.g. 0.001"),
    ("train name=x,y --multirun trainer.epochs=0", "trainer.epochs: must be at least 1, got 0"),
]


def one_line(text: str) -> str:
    assert text.startswith(PREFIX)
    assert text.endswith("\n")
    assert text.count("\n") == 1
    return text.removeprefix(PREFIX).rstrip("\n")


@pytest.mark.parametrize(("line", "expected"), TABLE, ids=[line for line, _ in TABLE])
def test_one_clear_line(line: str, expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(line.split(" ")) == 2
    captured = capsys.readouterr()
    message = one_line(captured.err)
    assert message.startswith(expected)
    assert captured.out == ""
    # <key>: <what>, got <value>; <what to do>
    assert ", got " in message
    assert "; " in message
    assert [path.name for path in tmp_path.iterdir()] in ([], ["multirun.yaml"])


def test_mistakes_in_yaml_name_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine" / "experiment"
    folder.mkdir(parents=True)
    header = "# @package _global_\nname: x\n"
    files = {
        "key": (
            header + "optim:\n  lrr: 1\n",
            "optim.lrr: no such setting, got it in experiment/key.yaml; did you mean optim.lr?",
        ),
        "kind": (
            header + "optim:\n  lr: fast\n",
            "optim.lr: must be a number, got fast (in experiment/kind.yaml); use e.g. 0.001",
        ),
        "torn": (header + "optim: [1\n", "torn.yaml: is no YAML, got "),
        "rule": (header + "optim:\n  lr: -1\n", "optim.lr: must be positive, got -1"),
        "group": (
            "# @package _global_\ndefaults:\n  - override /head: none\nname: x\n",
            "head: no such option, got none",
        ),
    }
    for name, (text, expected) in files.items():
        (folder / f"{name}.yaml").write_text(text)
        assert main(["train", "--config-dir", "mine", f"experiment={name}"]) == 2
        assert one_line(capsys.readouterr().err).startswith(expected)


def test_an_occupied_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "outputs" / "x"
    run.mkdir(parents=True)
    started: list[str] = []
    monkeypatch.setattr(cli, "run_command", lambda command, _: started.append(command))
    assert main(["train", "name=x"]) == 0, "an empty folder is free"
    (run / "config.yaml").touch()
    for command in ("train", "run"):
        assert main([command, "name=x"]) == 2
        expected = (
            "resume: the run's folder outputs/x is not empty, got never; use resume=auto to continue it, another name="
        )
        assert one_line(capsys.readouterr().err).startswith(expected)
    assert main(["prepare", "name=x"]) == main(["doctor", "name=x"]) == main(["train", "name=x", "resume=auto"]) == 0
    assert main(["train", "name=x", "resume=must"]) == 2
    (run / "checkpoints" / "step-000010").mkdir(parents=True)
    assert main(["train", "name=x", "resume=must"]) == 0
    assert started == ["train", "prepare", "doctor", "train", "train"]
    (tmp_path / "outputs" / "y").touch()
    capsys.readouterr()
    assert main(["train", "name=y"]) == 2
    assert one_line(capsys.readouterr().err).startswith("name: a file is in the way of the run's folder, got outputs/y")
    assert main(["train", "name=z", "output_dir=outputs/y"]) == 2
    assert one_line(capsys.readouterr().err).startswith("output_dir: cannot be written, got outputs/y")


def test_only_the_first_process_reports_and_looks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outputs" / "x" / "best").mkdir(parents=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert main(["train", "name=x"]) == 2
    one_line(capsys.readouterr().err)
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "name=x", "optim.lrr=1"]) == 2
    assert capsys.readouterr().err == ""
    started: list[str] = []
    monkeypatch.setattr(cli, "run_command", lambda command, _: started.append(command))
    assert main(["train", "name=x"]) == 0, "the first process may have begun to write"
    assert started == ["train"]


def test_no_sweep_in_several_processes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for flag in ("--multirun", "-m"):
        assert main(["train", "name=x,y", flag]) == 2
        expected = "--multirun: every process would sweep on its own, got WORLD_SIZE=2; launch once per combination"
        assert one_line(capsys.readouterr().err) == expected


LIGHT = """
import sys
from specdraft.cli.main import main
code = main(sys.argv[1:])
heavy = {"torch", "transformers", "numpy", "accelerate", "datasets", "rich"} & set(sys.modules)
print("\\nheavy:", *sorted(heavy))
raise SystemExit(code)
"""


@pytest.mark.parametrize(
    ("line", "code", "hydra"),
    [
        ("--help", 0, False),
        ("trian", 2, False),
        ("train name", 2, False),
        ("train --help", 0, True),
        ("train name=x +typo=1", 2, True),
        ("train name=occupied", 2, True),
        ("generate prompt=hi", 2, True),
    ],
)
def test_answers_without_torch(line: str, code: int, hydra: bool, tmp_path: Path) -> None:
    (tmp_path / "outputs" / "occupied" / "best").mkdir(parents=True)
    script = LIGHT.replace("heavy = {", 'heavy = {"hydra", ' if not hydra else "heavy = {")
    result = subprocess.run(
        [sys.executable, "-c", script, *line.split()], cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT
    )
    assert result.returncode == code
    assert result.stdout.splitlines()[-1] == "heavy:"
    if code:
        one_line(result.stderr)
    else:
        assert result.stderr == ""
