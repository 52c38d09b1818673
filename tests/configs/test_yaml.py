"""Every YAML under configs/, composed and converted; what each lists, and where settings come from."""

from __future__ import annotations

import re
import shlex
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml

from specdraft.config.head_schemas import head_schemas
from specdraft.config.overrides import prepare_overrides
from specdraft.config.paths import config_dir
from specdraft.config.schema import RUNS, ExperimentRun
from specdraft.config.sources import HeadSource, TargetSource
from specdraft.config.store import compose_config, save_resolved, to_run
from specdraft.core.errors import ConfigError
from specdraft.decode._proposer_config import PROPOSERS

FILES = sorted(
    path.relative_to(config_dir()).as_posix()
    for path in config_dir().rglob("*.yaml")
    if path.parent.name != "accelerate"  # of `accelerate launch`, see test_accelerate
)
NEEDED: dict[str, list[str]] = {
    "train": ["name=x"],
    "run": ["name=x"],
    "eval": ["head=outputs/x/best"],
    "tune": ["head=outputs/x/best"],
    "generate": ["head=outputs/x/best", "prompt=hello"],
    "export": ["head=outputs/x/best"],
    "import": ["source=user/repo"],
    "compare": ["name=x", "heads=[medusa]", "compare.value=1000"],
    "target/hub.yaml": ["target.name=owner/model"],
    "adapter/lora.yaml": ["head=medusa"],
    "loss/dspark.yaml": ["head=dflash", "head.confidence_head=true"],
    "data/files.yaml": ["data.sources=[chats.jsonl]"],
    "export/hf.yaml": ["push_to=user/repo"],
}
"""What a user has to add to a command or to an option."""


def resolve(command: str, *words: str) -> Any:
    return to_run(command, compose_config(command, prepare_overrides(command, words)))


def commands_of(file: str) -> list[str]:
    """The sub-commands that a file configures."""
    group, _, _ = file.rpartition("/")
    if not group:
        return [Path(file).stem]
    if group == "experiment":
        return [name for name, run in RUNS.items() if issubclass(run, ExperimentRun)]
    # prepare, doctor and run compose the same groups as train.
    commands = ("train", "eval", "tune", "generate", "export", "compare")
    commands = commands[1:] if file == "target/from_head.yaml" else commands
    return [name for name in commands if f"- {group}:" in (config_dir() / f"{name}.yaml").read_text()]


def cases() -> list[tuple[str, str]]:
    return [(command, file) for file in FILES for command in commands_of(file)]


def test_every_file_is_a_case() -> None:
    assert len(FILES) == sum(1 for p in config_dir().rglob("*") if p.is_file() and p.parent.name != "accelerate")
    assert {file for _, file in cases()} == set(FILES)
    assert len(FILES) >= 30


@pytest.mark.parametrize(("command", "file"), cases())
def test_composes_and_converts(command: str, file: str) -> None:
    group, _, _ = file.rpartition("/")
    words = [] if not group or group == "hydra" else [f"{group}={Path(file).stem}"]
    if group == "target" and command == "generate":
        words.append("head=outputs/x/best")
    needed = NEEDED.get(command, [])
    if group == "proposer" and file != "proposer/head.yaml":
        needed = [*(word for word in needed if not word.startswith("head=")), "target=smollm2"]
    run = resolve(command, *needed, *words, *NEEDED.get(file, []))
    assert type(run) is RUNS[command]


def owner(file: str) -> type:
    """The dataclass that an option of a group fills."""
    group, _, stem = file.partition("/")
    if group == "head":
        return head_schemas()[Path(stem).stem]
    if group == "proposer":
        return PROPOSERS[Path(stem).stem]
    found = {get_type_hints(run)[group] for run in RUNS.values() if group in get_type_hints(run)} - {
        HeadSource,
        TargetSource,
    }
    (only,) = found
    return only


@pytest.mark.parametrize(
    "file", [file for file in FILES if file.split("/")[0] not in ("experiment", "hydra") and "/" in file]
)
def test_an_option_lists_every_setting_in_order(file: str) -> None:
    listed = [key for key in yaml.safe_load((config_dir() / file).read_text()) if key != "defaults"]
    expected = [field.name for field in fields(owner(file))]
    if not file.startswith("loss/"):
        assert listed == expected
    assert set(listed) == set(expected)


@pytest.mark.parametrize("command", RUNS)
def test_a_primary_config_lists_every_setting_of_its_own(command: str) -> None:
    text = yaml.safe_load((config_dir() / f"{command}.yaml").read_text())
    groups = {next(iter(entry)) for entry in text["defaults"] if isinstance(entry, dict)}
    assert {key for key in text if key != "defaults"} | (groups - {"hydra", "experiment"}) == set(
        get_type_hints(RUNS[command])
    )


def test_values_equal_the_defaults_of_the_code() -> None:
    """Leaving a value out of a user's own YAML gives what ours has, apart from what an option is there to change."""
    differing = set()
    for file in FILES:
        if "/" not in file or file.split("/")[0] in ("experiment", "hydra", "loss"):
            continue
        values = yaml.safe_load((config_dir() / file).read_text())
        for field in fields(owner(file)):
            default = field.default_factory() if callable(field.default_factory) else field.default
            if values[field.name] != (asdict(default) if is_dataclass(default) else default):
                differing.add(f"{file}: {field.name}")
    assert differing == {
        "adapter/lora.yaml: rank",
        "data/files.yaml: sources",
        "decode/dynamic.yaml: dynamic_total_tokens",
        "features/hybrid.yaml: mode",
        "features/offline.yaml: mode",
        "decode/tree.yaml: tree",
        *(f"head/{kind}.yaml: kind" for kind in head_schemas()),
        "optim/muon.yaml: optimizer",
        "sampling/sample.yaml: temperature",
        "target/from_head.yaml: name",
        "target/hub.yaml: dtype",
        "target/hub.yaml: name",
        "tracker/none.yaml: kind",
        "tracker/tensorboard.yaml: kind",
        "tracker/trackio.yaml: kind",
        "tracker/wandb.yaml: kind",
        "trainer/default.yaml: epochs",
    }


def test_one_yaml_per_kind_of_proposer() -> None:
    kinds = {Path(file).stem for file in FILES if file.startswith("proposer/")}
    assert kinds == set(PROPOSERS)
    for kind in kinds - {"head"}:
        for words in (["eval"], ["generate", "prompt=hello"]):
            run = resolve(*words, f"proposer={kind}", "target=smollm2")
            assert run.proposer.kind == kind
            assert type(run.proposer) is PROPOSERS[kind]


def test_one_yaml_per_kind_of_head() -> None:
    kinds = {Path(file).stem for file in FILES if file.startswith("head/")}
    assert kinds == set(head_schemas())
    for kind in kinds:
        run = resolve("train", "name=x", f"head={kind}")
        assert run.head.kind == kind
        assert type(run.head) is head_schemas()[kind]


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith("experiment/")])
def test_an_experiment_begins_with_its_command(file: str) -> None:
    lines = (config_dir() / file).read_text().splitlines()
    assert lines[0] == "# @package _global_"
    _, program, command, *words = shlex.split(lines[1])
    assert program == "specdraft"
    run = resolve(command, *words)
    assert run.name == Path(file).stem
    assert f"experiment={run.name}" in words


@pytest.mark.parametrize("file", FILES)
def test_nothing_in_yaml_is_executed(file: str) -> None:
    text = (config_dir() / file).read_text()
    assert not re.search(r"_target_|_partial_|\$\{hydra:|\$\{oc\.|!!", text)


@pytest.mark.parametrize("words", [["experiment=smollm2_eagle3"], ["name=x", "head=medusa", "data.system='a ${b} c'"]])
def test_resolved_config_composes_to_itself(words: list[str], tmp_path: Path) -> None:
    if words[-1].startswith("data.system"):
        words = [*words[:-1], r"data.system='a \${b} c'"]
    run = resolve("train", *words, "optim.lr=3e-4", "decode.tree=[[0], [1], [0, 0]]", "+loss.terms.smooth_l1=0.5")
    path = save_resolved(run, tmp_path / "outputs")
    again = compose_config("train", [], config_dirs=[str(path.parent)], config_name="config")
    assert to_run("train", again) == run
    save_resolved(to_run("train", again), tmp_path / "twice")
    assert (tmp_path / "twice" / "config.yaml").read_bytes() == path.read_bytes()
    assert [item.name for item in path.parent.iterdir()] == ["config.yaml"]
    changed = compose_config("train", ["name=y"], config_dirs=[str(path.parent)], config_name="config")
    assert to_run("train", changed).name == "y"


def test_a_resolved_config_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    path = save_resolved(resolve("train", "name=x"), tmp_path)
    path.write_text(path.read_text() + "epochs: 3\n")
    config = compose_config("train", [], config_dirs=[str(tmp_path)], config_name="config")
    with pytest.raises(ConfigError, match=r"^epochs: no such setting, got 3; did you mean trainer\.epochs\?$"):
        to_run("train", config)


def test_groups_of_a_run_are_slots_dataclasses() -> None:
    """Without slots, a key added by force would become an attribute that nothing reads."""
    seen = 0
    for run in RUNS.values():
        for kind in (run, *get_type_hints(run).values()):
            if is_dataclass(kind):
                assert "__slots__" in vars(kind)
                seen += 1
    assert seen > 40
