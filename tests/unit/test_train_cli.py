"""``specdraft train`` from settings to a head on disk, on a tiny target in a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from specdraft.cli.main import main
from specdraft.heads.storage import check_head_matches, load_head
from specdraft.targets._config import TargetConfig
from specdraft.targets.hf import load_target
from specdraft.train.checkpoint import list_checkpoints
from tests.tiny import tiny_target
from tests.training import reset_accelerator

Train = Callable[..., int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target in ``target`` and conversations with answers in ``chats.jsonl``."""
    folder = tmp_path_factory.mktemp("train")
    target = tiny_target("llama")
    target.model.save_pretrained(folder / "target")
    assert target.tokenizer is not None
    target.tokenizer.save_pretrained(folder / "target")
    words = ["apples", "boats", "cats", "dogs", "eggs", "fish"]
    with (folder / "chats.jsonl").open("w") as file:
        for i, word in enumerate(words):
            answer = f"I like {word}, and {words[i - 1]} too."
            messages = [{"role": "user", "content": f"Do you like {word}?"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return folder


@pytest.fixture
def train(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Runs ``specdraft train`` with small settings and the given overrides; returns the exit code."""
    monkeypatch.chdir(tmp_path)

    def call(*overrides: str) -> int:
        reset_accelerator()
        return main(
            [
                "train",
                "name=tiny",
                f"target.name={folder / 'target'}",
                "target.device=cpu",
                "target.pack_weights=false",
                f"data.sources=[{folder / 'chats.jsonl'}]",
                "data.regenerate=false",
                "data.batch_size=2",
                "trainer.mixed_precision=no",
                "trainer.epochs=2",
                "trainer.eval_prompts=2",
                "trainer.eval_max_new_tokens=8",
                "trainer.log_every=1",
                *overrides,
            ]
        )

    return call


def test_a_run_leaves_what_it_should(
    folder: Path, tmp_path: Path, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("head=eagle3", "head.draft_vocab_size=40") == 0
    out = capsys.readouterr().out
    run = tmp_path / "outputs/tiny"
    names = {"config.yaml", "environment.json", "metrics.jsonl", "checkpoints", "best", "last"}
    assert {path.name for path in run.iterdir()} == names
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["step-000006", "step-000003"]
    assert yaml.safe_load((run / "config.yaml").read_text())["head"]["draft_vocab_size"] == 40
    assert json.loads((run / "environment.json").read_text())["processes"] == 1
    target = load_target(TargetConfig(name=str(folder / "target"), device="cpu"))
    head = load_head(run / "best")
    check_head_matches(head, target.spec)
    assert head.vocab is not None
    assert set(target.spec.eos_token_ids) <= set(head.vocab.draft_token_ids().tolist())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = [line["eval/acceptance_length"] for line in lines if "eval/acceptance_length" in line]
    assert len(measured) == 2
    training = json.loads((run / "best/config.json").read_text())["training"]
    assert training["acceptance_length"] == max(measured) >= 1
    assert training["settings"]["data"]["sources"] == ["chats.jsonl"]
    assert str(tmp_path.parent) not in json.dumps(training)
    for text in (
        "6 rows",
        "dropped rows: none",
        "draft vocabulary: 40 of 97 tokens cover ",
        "frozen",
        "best head: outputs/tiny/best",
        "measure it: specdraft eval head=outputs/tiny/best\n",
        "trained: 6 steps, 774 tokens, ",
        "steps an epoch, ",
    ):
        assert text in out


def test_occupied_folder_resume_and_must(tmp_path: Path, train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused unless resumed; an early end and a resume give the weights of one long run."""
    assert train("resume=must") == 2
    assert "resume: no checkpoint" in capsys.readouterr().err
    settings = ("trainer.eval_prompts=0", "name=short", "optim.schedule=constant", "optim.warmup_ratio=0")
    assert train(*settings, "trainer.max_steps=2") == 0
    assert train(*settings) == 2
    assert "resume: the run's folder outputs/short is not empty, got never" in capsys.readouterr().err
    assert train(*settings, "resume=auto") == 0
    out = capsys.readouterr().out
    assert "continuing after step 2 of 6" in out
    assert "resume: other settings than at the checkpoint: trainer.max_steps None (was 2)\n" in out
    capsys.readouterr()
    assert train(*settings, "resume=auto", "head.num_draft_tokens=2", "data.seed=5", "optim.lr=3e-4") == 2
    captured = capsys.readouterr()
    assert (
        "resume: the checkpoint was made with other settings, got data.seed 5 (was 0), head.num_draft_tokens 2 (was 4)"
        in captured.err
    )
    assert "data:" not in captured.out  # before the target and the data are loaded
    assert train(*settings[:1], *settings[2:], "name=straight") == 0
    heads = [load_head(tmp_path / f"outputs/{name}/last").state_dict() for name in ("short", "straight")]
    assert all(torch.equal(value, heads[1][name]) for name, value in heads[0].items())


def test_failures_before_training_leave_no_folder(
    tmp_path: Path, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistake that shows once the target is known: one line, exit 2, and the name is still free."""
    assert train("head=medusa", "head.draft_vocab_size=1000") == 2
    assert "head.draft_vocab_size: exceeds the target's vocabulary of 97, got 1000" in capsys.readouterr().err
    assert not (tmp_path / "outputs/tiny").exists()


@pytest.mark.parametrize("kind", ["tensorboard", "trackio"])
def test_a_tracker_without_its_package_is_one_line(
    train: Train, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the target, whose folder does not exist here, is looked for."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert train(f"tracker={kind}", "target.name=/nowhere") == 2
    assert f"tracker.kind: needs the package {kind}, got {kind}; pip install {kind}, or" in capsys.readouterr().err
    assert not (tmp_path / "outputs").exists()


def test_packed_averaged_muon_training(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """The options together, from the command line to a head."""
    words = (
        "data.packing=true",
        "data.batch_size=1",
        "data.max_length=256",
        "optim=muon",
        "optim.schedule=wsd",
        "trainer.ema_decay=0.9",
    )
    assert train("head=eagle3", "trainer.gradient_checkpointing=true", *words) == 0
    out = capsys.readouterr().out
    assert "batches: 2 steps an epoch, " in out
    assert "best head: outputs/tiny/best (acceptance length " in out


def test_nan_is_one_line(train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("optim.lr=1e30", "optim.warmup_ratio=0", "optim.schedule=constant", "trainer.save_every=1") == 2
    err = capsys.readouterr().err
    assert "error: optim.lr: loss or gradient is not finite at step 2, got loss" in err
    assert "Traceback" not in err
    assert [path.name for path in list_checkpoints(tmp_path / "outputs/tiny/checkpoints")] == ["step-000001"]
