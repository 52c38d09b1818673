"""`specdraft prepare` with each writer of answers, and the check of answers that came with the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdraft.cli.main import main
from specdraft.cli.train import provenance
from specdraft.config.store import compose_config, to_run
from specdraft.data.chat import TokenRow
from specdraft.data.prepared import load_prepared
from specdraft.heads.storage import save_head
from specdraft.targets import hf
from tests.answer_server import answer_server
from tests.cli import experiment_words, make_workspace
from tests.support import make_head
from tests.tiny import tiny_target
from tests.unit.test_data_regenerate import greedy


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("workspace"))


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


Prepared = tuple[dict[str, Any], list[TokenRow]]


def prepared(folder: Path, *words: str) -> Prepared:
    """The manifest and the rows of `specdraft prepare`."""
    assert main(["prepare", *words, f"data.cache_dir={folder}"]) == 0
    (place,) = [path.parent for path in folder.glob("*/manifest.json")]
    data = load_prepared(place)
    return data.manifest, data.rows(range(len(data)))


@pytest.fixture(scope="module")
def plain(workspace: Path) -> Prepared:
    """With answers of the loaded target."""
    return prepared(workspace / "plain", *experiment_words(workspace), "data.regenerate=true")


def test_servers_write_what_the_target_writes(
    workspace: Path, plain: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*experiment_words(workspace), "data.regenerate=true"]
    (mine, rows), target = plain, tiny_target("llama")
    with answer_server(lambda prompt, count: greedy(target, prompt, count)) as server:
        served = [*words, "data.answers.by=server", f"data.answers.endpoints=[{server.url}]", "data.answers.model=tiny"]
        checked, same = prepared(tmp_path / "checked", *served, "data.answers.load_target=true")
        with monkeypatch.context() as patch:
            patch.setattr(hf, "load_target", None)  # calling it would fail
            unchecked, again = prepared(tmp_path / "unchecked", *served)
    assert rows == same == again
    assert checked["answers"]["ids_from"] == unchecked["answers"]["ids_from"] == {"server": 6}
    assert mine["answers"]["ids_from"] == {"target": 6}
    assert checked["answers"]["own"] == mine["answers"]["own"]
    assert checked["answers"]["own"]["share_suspect"] == 0.0
    assert "own" not in unchecked["answers"]
    assert checked["responses"] == "server"
    assert checked["identity"] == unchecked["identity"]
    assert prepared(tmp_path / "checked", *served)[0] == checked  # the server is gone
    run = to_run("train", compose_config("train", ["name=x", *served]))
    published = provenance(run, checked)
    assert server.url not in json.dumps(published)
    assert published["settings"]["data"]["answers"]["by"] == "server"


def test_a_head_leaves_the_rows_alone(
    workspace: Path, plain: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*experiment_words(workspace), "data.regenerate=true", f"data.answers.head={tmp_path / 'head'}"]
    save_head(make_head("medusa", tiny_target("llama").spec, num_draft_tokens=2), tmp_path / "head")
    drafted = prepared(tmp_path / "drafted", *words)
    assert drafted[1] == plain[1]
    assert drafted[0]["identity"] == plain[0]["identity"]
    save_head(make_head("medusa", tiny_target("llama", seed=1).spec, num_draft_tokens=2), tmp_path / "head")
    assert main(["prepare", *words]) == 2
    assert "head: was trained for tiny-llama" in capsys.readouterr().err


def test_answers_that_came_with_the_data_are_checked(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*experiment_words(workspace), "data.answers.load_target=true", "data.answers.max_suspect_share=0.1"]
    assert main(["prepare", *words]) == 2
    assert "data.answers.max_suspect_share: 100% of 6 answers are not the target's own" in capsys.readouterr().err


def test_vllm_that_is_not_installed_is_one_line(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", *experiment_words(workspace), "data.regenerate=true", "data.answers.by=vllm"]) == 2
    assert "data.answers.by: vLLM is not installed here" in capsys.readouterr().err
