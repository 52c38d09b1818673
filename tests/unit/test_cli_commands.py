"""prepare, doctor, generate, run and the demo from the command line to their output, on a tiny target."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from specdraft.cli import demo
from specdraft.cli import run as pipeline
from specdraft.cli.generate import ACCEPTED_STYLE, Figures, IncrementalText, stream_text
from specdraft.cli.main import main
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.result import StepOutput
from specdraft.heads.base import head_config
from specdraft.heads.storage import load_head, save_head
from specdraft.targets._config import TargetConfig
from specdraft.targets.hf import HFTarget, load_target
from tests.cli import experiment_words, make_workspace, target_words
from tests.training import reset_accelerator

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("cli"))


@pytest.fixture(scope="module")
def target(workspace: Path) -> HFTarget:
    return load_target(TargetConfig(name=str(workspace / "target"), device="cpu", pack_weights=False))


@pytest.fixture(scope="module")
def head(workspace: Path, target: HFTarget) -> Path:
    """A Medusa head that was not trained, saved."""
    torch.manual_seed(0)
    head = head_config("medusa", {"num_draft_tokens": 2}).build(target.spec)
    return save_head(head, workspace / "head")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reset_accelerator()


def test_prepare_writes_once_and_reports(workspace: Path, tmp_path: Path, capsys: Captured) -> None:
    words = experiment_words(workspace)
    assert main(["prepare", *words]) == 0
    first = capsys.readouterr().out
    assert "data: 6 rows" in first
    assert "data: dropped rows: none" in first
    (folder,) = [path for path in (tmp_path / "outputs/data").iterdir() if (path / "manifest.json").is_file()]
    assert str(folder.relative_to(tmp_path)) in first
    written = (folder / "manifest.json").stat().st_mtime_ns
    assert main(["prepare", *words, "data.cache_dir=outputs/data", "optim.lr=1"]) == 0
    assert (folder / "manifest.json").stat().st_mtime_ns == written
    assert main(["prepare", *words, "data.regenerate=true", "data.limit=2"]) == 0
    assert "answers by the target" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]


DOCTOR = ["doctor", "head=medusa", "head.num_draft_tokens=2", "loss=hard_ce", "optim.lr=2e-2", "data.regenerate=true"]
"""With answers of the target, and a head that learns them by heart in a second."""


def test_doctor_shows_rows_and_checks(
    workspace: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    words = [*DOCTOR, *experiment_words(workspace)[:4], *experiment_words(workspace)[5:]]
    assert main([*words, "examples=2", "html=page.html", "json=found.json"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Do you like apples?<|im_end|>" in out
    assert "supervised, " in out
    for check in ("target", "supervised share", "BOS", "mask position", "dropped rows none", "overfit", "export"):
        assert f"ok {check}" in out
    assert "fault" not in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json", "page.html"]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["counts"]["fault"] == 0
    assert len(found["findings"]) == sum(found["counts"].values())
    assert "<title>specdraft doctor: " in (tmp_path / "page.html").read_text()


def test_doctor_fails_on_a_fault_and_writes_json_alone(workspace: Path, tmp_path: Path, capsys: Captured) -> None:
    """The prompts that measure the head are those that train it."""
    words = [*DOCTOR, *experiment_words(workspace)[:4], *experiment_words(workspace)[5:]]
    lines = [
        json.dumps({"prompt": f"Tell me, please, about {i} of the many things that we saw there."}) for i in range(4)
    ]
    (tmp_path / "own.jsonl").write_text("\n".join(lines))
    words = [*words, "data.sources=[own.jsonl]", "eval.prompts=[own.jsonl]", "only=[masks, leak]", "json=-"]
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert {one["name"] for one in found["findings"] if one["verdict"] == "fault"} == {"leak: own"}
    assert {one["check"] for one in found["findings"]} == {"masks", "leak"}
    assert "data.held_out=[own.jsonl]" in captured.err
    assert main([*words, "data.held_out=[own.jsonl]"]) == 2  # nothing is left to train on
    assert main([*DOCTOR, "only=[lek]", *experiment_words(workspace)[:2]]) == 2
    assert "only: no such check, got 'lek'; use template, " in capsys.readouterr().err


def test_doctor_lists_its_checks(capsys: Captured) -> None:
    assert main(["doctor", "check=list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("template            The prompt that decoding starts from")
    assert len(lines) > 15


@pytest.mark.parametrize("template", [True, False])
def test_generate_streams_the_targets_text(
    workspace: Path, head: Path, target: HFTarget, capsys: Captured, template: bool
) -> None:
    words = ["generate", f"head={head}", "prompt=Do you like, say, boats?", "decode.max_new_tokens=12"]
    words += ["target.device=cpu", "target.pack_weights=false", f"raw={str(not template).lower()}"]
    assert main(words) == 0
    captured = capsys.readouterr()
    text = "Do you like, say, boats?"
    assert target.tokenizer is not None
    messages = [{"role": "user", "content": text}]
    if template:
        ids = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    else:
        ids = target.tokenizer(text)["input_ids"]
    tokens = SpeculativeDecoder(target).generate(ids, 12).tokens
    expected = target.tokenizer.decode(tokens, skip_special_tokens=True)
    assert captured.out == expected + "\n"
    assert re.fullmatch(
        r"acceptance length \d\.\d\d over \d+ steps, [\d.]+ tokens/s, prefill \d+ ms", captured.err.splitlines()[-1]
    )
    assert main(["generate", *target_words(workspace), *words[2:-3], f"raw={str(not template).lower()}"]) == 0
    plain = capsys.readouterr()
    assert plain.out == captured.out
    assert plain.err.splitlines()[-1].startswith("plain decoding, ")


def test_generate_refuses_a_head_of_another_target(
    tmp_path: Path, head: Path, target: HFTarget, capsys: Captured
) -> None:
    other = tmp_path / "other"
    weights = {name: value.clone() for name, value in target.model.state_dict().items()}
    target.model.save_pretrained(other, state_dict={name: value + 0.01 for name, value in weights.items()})
    assert target.tokenizer is not None
    target.tokenizer.save_pretrained(other)
    words = [f"head={head}", f"target.name={other}", "target.device=cpu", "prompt=hi"]
    assert main(["generate", *words]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("specdraft: error: head: was trained for ")
    assert main(["generate", "head=nowhere", "prompt=hi"]) == 2
    assert capsys.readouterr().err.startswith("specdraft: error: head: ")


def test_accepted_text_is_coloured(target: HFTarget) -> None:
    assert target.tokenizer is not None
    ids = target.tokenizer("We like boats, cats and dogs.")["input_ids"]
    text = target.tokenizer.decode(ids, skip_special_tokens=True)
    steps = [StepOutput(ids[:1], 0), StepOutput(ids[1:4], 2), StepOutput(ids[4:], 0)]
    for style, coloured in ((ACCEPTED_STYLE, True), (None, False)):
        console = Console(force_terminal=True, color_system="standard", width=200)
        with console.capture() as captured:
            stream_text(iter(steps), target.tokenizer, console, style)
        out = captured.get()
        assert re.sub(r"\x1b\[[\d;]*m", "", out) == text + "\n"
        green = "".join(re.findall(r"\x1b\[32m(.*?)\x1b\[0m", out))
        assert (green != "") == coloured
        if coloured:
            assert green == target.tokenizer.decode(ids[:3])[len(target.tokenizer.decode(ids[:1])) :]


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(ids).decode(errors="replace")


def test_characters_of_several_tokens_appear_whole() -> None:
    source = "aé漢😀b"
    text = IncrementalText(Bytes())  # type: ignore[arg-type]
    pieces = [text.push(byte) for byte in source.encode()]
    assert "".join(pieces) == source
    assert set(pieces) - {""} == set(source)
    assert text.rest() == ""
    for byte in "é".encode()[:1]:
        assert text.push(byte) == ""
    assert text.rest() == "\N{REPLACEMENT CHARACTER}"


def test_figures_leave_the_prefill_out() -> None:
    figures = Figures()
    outputs = [StepOutput([5], 0), StepOutput([6, 7, 8], 2), StepOutput([9], 0)]
    assert list(figures.watch(iter(outputs))) == outputs
    assert (figures.num_steps, figures.num_tokens) == (2, 4)
    assert figures.line(drafted=True).startswith("acceptance length 2.00 over 2 steps, ")
    assert list(Figures().watch(iter(outputs[:1]))) == outputs[:1]


def test_run_trains_and_measures(workspace: Path, tmp_path: Path, capsys: Captured) -> None:
    words = ["run", "name=tiny", "head=medusa", *experiment_words(workspace)]
    assert main(words) == 0
    out = capsys.readouterr().out
    best = tmp_path / "outputs/tiny/best"
    assert load_head(best).config.kind == "medusa"
    results = json.loads((best / "results.json").read_text())
    assert results["sets"]["asked"]["num_prompts"] == results["sets"]["asked"]["identical_outputs"] == 2
    assert "acceptance length" in out
    assert main(words) == 2
    assert "resume: the run's folder outputs/tiny is not empty" in capsys.readouterr().err


def test_demo_measures_three_heads_and_reuses_them(
    workspace: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*experiment_words(workspace), "head.draft_vocab_size=null", "trainer.eval_every=null"]
    trained = []
    run = pipeline.run
    monkeypatch.setattr(pipeline, "run", lambda cfg: (trained.append(cfg.name), reset_accelerator(), run(cfg)))
    assert demo.main(words) == 0
    assert trained == list(demo.EXPERIMENTS)
    out = capsys.readouterr().out
    table = out[out.rindex("acceptance length [95 %]") :]
    assert all(f"| {kind} " in table for kind in ("medusa", "eagle", "eagle3"))
    assert table.count("2/2") == 3
    assert "identical_outputs: all, in float32" in table
    assert demo.main(words) == 0
    assert trained == list(demo.EXPERIMENTS)
    again = capsys.readouterr().out
    assert again[again.rindex("acceptance length [95 %]") :] == table
    assert demo.main([*words, "eval.limit=3"]) == 0
    assert trained == [*demo.EXPERIMENTS, *demo.EXPERIMENTS]
    capsys.readouterr()
    assert demo.main([*words, "optim.lr=fast"]) == 2
    assert capsys.readouterr().err == "specdraft: error: optim.lr: must be a number, got fast; use e.g. 0.001\n"
