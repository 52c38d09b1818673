"""What a resumed run says of settings that changed, and which of them it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdraft.core.errors import ConfigError
from specdraft.train.loop import train
from specdraft.train.resuming import compare_with_checkpoint, differences
from tests.training import make_run

SETTINGS: dict[str, Any] = {
    "head": {"kind": "medusa", "num_draft_tokens": 3},
    "data": {"seed": 0, "batch_size": 1, "cache_dir": None},
    "target": {"name": "tiny", "device": "cpu"},
    "optim": {"optimizer": "adamw", "lr": 0.01},
    "trainer": {"ema_decay": None, "max_steps": 1},
    "resume": "never",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    train(replace(make_run(tmp_path, trainer={"max_steps": 1}), settings=SETTINGS))
    return tmp_path


def changed(**groups: dict[str, Any]) -> dict[str, Any]:
    return {**SETTINGS, **{name: {**SETTINGS[name], **values} for name, values in groups.items()}}


def test_differences_are_named_by_key() -> None:
    found = differences({"a": {"b": 1, "c": [1]}, "d": None}, {"a": {"b": 2, "c": [1]}, "e": 3})
    assert found == {"a.b": (1, 2), "e": (None, 3)}


def test_nothing_changed_nothing_said(folder: Path, tmp_path: Path) -> None:
    assert compare_with_checkpoint(folder, {**SETTINGS, "resume": "auto"}) is None
    assert compare_with_checkpoint(folder, changed(data={"cache_dir": "/elsewhere", "batch_size": 2})) is None
    assert compare_with_checkpoint(tmp_path / "empty", SETTINGS) is None


def test_what_may_change_is_said(folder: Path) -> None:
    line = compare_with_checkpoint(folder, changed(optim={"lr": 0.5}, target={"device": "cuda"}))
    assert (
        line == "resume: other settings than at the checkpoint: optim.lr 0.5 (was 0.01), target.device cuda (was cpu)"
    )


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({"head": {"num_draft_tokens": 5}}, "head.num_draft_tokens 5 .was 3."),
        ({"data": {"seed": 1}}, "data.seed 1 .was 0."),
        ({"target": {"name": "other"}}, "target.name other .was tiny."),
        ({"optim": {"optimizer": "muon", "lr": 0.5}}, "optim.optimizer muon .was adamw."),
        ({"trainer": {"ema_decay": 0.9, "max_steps": 9}}, "trainer.ema_decay 0.9 .was None."),
    ],
)
def test_what_must_not_change_is_refused(folder: Path, groups: dict[str, dict[str, Any]], said: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^resume: the checkpoint was made with other settings, got {said}; use the old"
    ):
        compare_with_checkpoint(folder, changed(**groups))
