"""Repositories on the Hub: branches, whose they are, uploads that go on, and cards whose figures are refreshed."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from rich.console import Console

from specdraft.cli.main import main
from specdraft.core.errors import ConfigError, ExportError
from specdraft.core.files import file_sha256
from specdraft.export._config import ExportConfig
from specdraft.export.exporting import Source, export_head
from specdraft.export.refresh import refresh_results
from specdraft.heads.storage import WEIGHTS_NAME, load_head, save_head
from tests.hub_server import FakeHub, card_errors
from tests.support import SPEC, make_head
from tests.unit.test_export_hub import contents, hub  # noqa: F401 - a fixture

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
REPO = "me/my-head"


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return save_head(make_head("medusa", SPEC, num_draft_tokens=2), tmp_path / "run" / "best")


def push(head: Path, **settings: Any) -> str:
    """Exports, and gives the address of the commit."""
    (export,) = export_head(Source(head), ExportConfig(push_to=REPO, **settings))
    assert export.url is not None
    return export.url


def figures(length: float) -> dict[str, Any]:
    """One set of results.json."""
    return {
        "num_prompts": 3,
        "acceptance_length": {"value": length, "ci95": None},
        "acceptance_rate": [0.5, None],
        "survival": [0.5, 0.0],
        "reached_per_depth": [7, 0],
        "identical_outputs": 3,
        "tokens_per_s": {"speculative": 20.0, "autoregressive": 10.0},
        "speedup": {"value": 2.0, "ci95": None},
        "by_category": {},
    }


def evaluated(head: Path, length: float, **sets: dict[str, Any]) -> None:
    """Puts a results.json beside the head."""
    results = {
        "schema": 1,
        "head": {"sha256": file_sha256(head / WEIGHTS_NAME)},
        "decode": {
            "tree": None,
            "device": "cpu",
            "num_draft_tokens": 2,
            "max_new_tokens": 8,
            "dtype": "float32",
            "temperature": 0.0,
        },
        "environment": {
            "cpu": "a processor",
            "accelerators": [],
            "num_threads": 1,
            "libraries": {"torch": "2", "transformers": "5"},
        },
        "sets": {"builtin": figures(length), **sets},
    }
    (head / "results.json").write_text(json.dumps(results))


def refresh(head: Path | str, console: Console | None = None, **settings: Any) -> list[str]:
    return refresh_results(Source(head), ExportConfig(push_to=REPO, results_only=True, **settings), console=console)


def test_a_branch_is_made_and_main_left_alone(head: Path, hub: FakeHub) -> None:  # noqa: F811
    push(head)
    whole = dict(hub.repos[REPO])
    url = push(head, revision="v2", license="mit")
    assert hub.repos[REPO] == whole
    assert url.endswith(hub.sha(REPO, "v2"))
    assert hub.branches[REPO]["v2"] == contents(head.parent / "export-hf")
    card = hub.branches[REPO]["v2"]["README.md"].decode()
    assert f'head={REPO} head.revision=v2 prompt="' in card
    assert f'load_head("{REPO}", revision="v2", device' in card
    assert load_head(REPO, revision="v2").config == load_head(head).config
    push(head, revision="v2")
    assert hub.calls.count("branch") == 1


def test_formats_as_branches_and_what_an_earlier_export_left(
    head: Path,
    hub: FakeHub,  # noqa: F811
    tmp_path: Path,
) -> None:
    from tests.exports import save_target, saved_head

    trained = saved_head(tmp_path / "head", save_target(tmp_path / "target"), "medusa")
    config = ExportConfig(format=["hf", "medusa"], push_to=REPO, layout="branches", output=str(tmp_path / "out"))
    exports = export_head(Source(trained), config)
    assert hub.repos[REPO] == contents(tmp_path / "out" / "hf")
    # The new branch began as main, whose files are no part of it.
    assert hub.branches[REPO]["medusa"] == contents(tmp_path / "out" / "medusa")
    assert exports[1].url is not None and exports[1].url.endswith(hub.sha(REPO, "medusa"))
    serve = (tmp_path / "out" / "medusa" / "SERVE.md").read_text()
    assert f"`hf download {REPO} --revision medusa --local-dir medusa`" in serve
    evaluated(trained, 2.25)
    urls = refresh(trained, layout="branches")
    assert len(urls) == 2
    assert b"2.250" in hub.repos[REPO]["README.md"] and b"2.250" in hub.branches[REPO]["medusa"]["README.md"]
    assert "results.json" in hub.repos[REPO] and "results.json" not in hub.branches[REPO]["medusa"]
    # Another format at the root takes the place of the first.
    hub.repos[REPO]["notes.txt"] = b"mine"
    (export,) = export_head(
        Source(trained), ExportConfig(format=["medusa"], push_to=REPO, output=str(tmp_path / "one"))
    )
    assert hub.repos[REPO] == {**contents(tmp_path / "one"), "notes.txt": b"mine"}
    assert export.format == "medusa"


@pytest.mark.parametrize("branch", [None, "v2"])
def test_a_repository_of_someone_else_is_refused(branch: str | None, head: Path, hub: FakeHub) -> None:  # noqa: F811
    theirs = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"x", ".gitattributes": b""}
    hub.repos[REPO] = dict(theirs)
    with pytest.raises(
        ExportError, match=r"^export\.push_to: is there and holds no draft head .*my-head \(branch main"
    ) as e:
        push(head, revision=branch)
    assert "\n" not in str(e.value)
    assert hub.repos[REPO] == theirs
    assert REPO not in hub.branches
    assert not {"preupload", "put", "commit", "branch"} & set(hub.calls)
    hub.repos[REPO] = {".gitattributes": b""}
    push(head)
    assert set(hub.repos[REPO]) == {".gitattributes", *contents(head.parent / "export-hf")}


def test_an_upload_that_was_cut_off_goes_on(head: Path, hub: FakeHub) -> None:  # noqa: F811
    hub.fail["commit"] = 503
    with pytest.raises(ExportError, match="the upload failed"):
        push(head)
    assert hub.calls.count("put") == 1
    hub.fail.clear()
    push(head)
    assert hub.calls.count("put") == 1
    assert hub.repos[REPO] == contents(head.parent / "export-hf")


def test_no_token_is_one_clear_line(head: Path, hub: FakeHub) -> None:  # noqa: F811
    hub.fail["create"] = 401
    with pytest.raises(
        ExportError, match=r"^export\.push_to: .*401.*; the export is whole in .*; check network, token"
    ) as e:
        push(head)
    assert "\n" not in str(e.value)


def test_only_the_figures_are_refreshed(head: Path, hub: FakeHub) -> None:  # noqa: F811
    push(head, license="mit")
    card = hub.repos[REPO]["README.md"].decode()
    assert "Not evaluated" in card
    owned = card.replace("## Training", "## From me\n\nKept.\n\n## Training").replace("tags:\n", "tags:\n- mine\n")
    hub.repos[REPO]["README.md"] = owned.encode()
    weights, config = hub.repos[REPO][WEIGHTS_NAME], hub.repos[REPO]["config.json"]
    for length in (2.125, 2.5):
        evaluated(head, length, mt_bench=figures(1.5))
        refresh(head)
        new = hub.repos[REPO]["README.md"].decode()
        assert card_errors(new) == []
        data = ModelCard(new, ignore_metadata_errors=False).data
        assert {(r.dataset_name, r.metric_type): r.metric_value for r in data.eval_results}[
            "builtin", "acceptance_length"
        ] == length
        assert data.license == "mit" and "mine" in data.tags and data.model_name == REPO
        assert new.count("## Results\n") == new.count("## Training\n") == new.count("Kept.") == 1
        assert f"| {length:.3f} |" in new and "Not evaluated" not in new
    assert "2.125" not in new
    assert (hub.repos[REPO][WEIGHTS_NAME], hub.repos[REPO]["config.json"]) == (weights, config)
    assert json.loads(hub.repos[REPO]["results.json"])["sets"]["builtin"]["acceptance_length"]["value"] == 2.5
    assert hub.commits[-1]["files"] == ["README.md", "results.json"]
    # Its own figures, of the head that it holds.
    hub.repos[REPO]["README.md"] = card.encode()
    assert main(["export", f"push_to={REPO}", "results_only=true"]) == 0
    assert b"2.500" in hub.repos[REPO]["README.md"]
    console = Console(file=io.StringIO(), width=200)
    before = len(hub.commits)
    assert refresh(head, console, dry_run=True) == []
    assert "| 2.500 |" in console.file.getvalue()  # type: ignore[attr-defined]
    assert len(hub.commits) == before


def test_figures_of_another_head_or_of_none_are_refused(head: Path, hub: FakeHub, tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(ExportError, match=r"^export\.results_only: the head has no results\.json"):
        refresh(head)
    evaluated(head, 2.0)
    with pytest.raises(ExportError, match=r"^export\.push_to: cannot be read, got me/my-head"):
        refresh(head)
    hub.repos[REPO] = {"README.md": b"theirs"}
    with pytest.raises(
        ExportError, match=r"^export\.push_to: holds no draft head of specdraft, got me/my-head \(main\)"
    ):
        refresh(head)
    hub.repos.clear()
    push(head)
    commits = len(hub.commits)
    for other in (make_head("medusa", SPEC, num_draft_tokens=2), make_head("medusa", SPEC, num_draft_tokens=3)):
        next(other.parameters()).data.add_(1)
        folder = save_head(other, tmp_path / "other")
        evaluated(folder, 3.0)
        with pytest.raises(ExportError, match=r"^export\.results_only: the repository holds another head"):
            refresh(folder)
    assert len(hub.commits) == commits


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"revision": "v2"}, r"^export\.revision: has no effect without push_to"),
        ({"results_only": True}, r"^export\.results_only: has no effect without push_to"),
        ({"layout": "branches"}, r"^export\.layout: has no effect without push_to"),
        ({"layout": "tags", "push_to": REPO}, r"^export\.layout: unknown, got 'tags'; use folders or branches"),
        ({"revision": "a b", "push_to": REPO}, r"^export\.revision: is no name of a branch"),
        ({"revision": "v2", "layout": "branches", "push_to": REPO}, r"^export\.revision: names one branch"),
        (
            {"results_only": True, "push_to": REPO, "license": "mit"},
            r"^export\.license: has no effect with results_only",
        ),
        (
            {"results_only": True, "push_to": REPO, "format": ["all"]},
            r"^export\.format: has no effect with results_only",
        ),
        ({"target_gguf": True}, r"^export\.target_gguf: is of format gguf, got hf"),
    ],
)
def test_settings_of_places_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExportConfig(**settings)


def test_the_licence_of_the_target(tmp_path: Path) -> None:
    from specdraft.export.license import License, find_license

    assert find_license("mit", "smollm2", None) == License("mit")
    assert find_license(None, "smollm2", None) == License("apache-2.0", of_target=True)
    assert find_license(None, str(tmp_path), None) is None
    text = "---\nlicense: other\nlicense_name: house\nlicense_link: LICENSE\n---\n# x\n"
    (tmp_path / "README.md").write_text(text)
    found = find_license(None, str(tmp_path), None)
    assert found == License("other", "house", "LICENSE", of_target=True)
    assert found.sentence() == "other (house), the target's."
    (tmp_path / "README.md").write_text("---\nlicense: [mit, other]\n---\n")
    assert find_license(None, str(tmp_path), None) is None


def test_the_licence_of_the_target_is_on_the_card(head: Path, tmp_path: Path) -> None:
    from tests.exports import save_target, saved_head

    target = save_target(tmp_path / "target")
    (target / "README.md").write_text("---\nlicense: llama3.2\n---\n")
    trained = saved_head(tmp_path / "head", target, "medusa")
    (export,) = export_head(Source(trained), ExportConfig())
    assert ModelCard(export.card).data.license == "llama3.2"
    assert "llama3.2, the target's." in export.card


def test_a_card_that_says_something_else_is_found() -> None:
    from specdraft.export.card import check_card
    from specdraft.export.license import License

    text = "---\nlibrary_name: specdraft\nlicense: mit\nbase_model: a/b\ntags:\n- specdraft\n---\n"
    check_card(text, "a/b", License("mit"))
    for old, new, what in (
        ("license: mit", "license: apache-2.0", "license"),
        ("a/b", "a/c", "base_model"),
        ("- specdraft", "- other", "tags"),
        ("tags:", "tags: [", "is not valid"),
    ):
        with pytest.raises(ExportError, match=what):
            check_card(text.replace(old, new), "a/b", License("mit"))
