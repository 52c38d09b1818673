"""``verify=engine``: an export run in the engine that reads it, and held against our decoder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdraft.core.errors import ExportError
from specdraft.export._config import ENGINES_OF
from specdraft.export.engines.compare import Agreement, compare
from specdraft.export.engines.environments import TITLES, find_python, run_engine, run_process
from specdraft.export.engines.ours import Row, our_rows
from specdraft.export.formats import gguf, openvino
from specdraft.export.gguf_target import write_target
from specdraft.export.material import Material
from specdraft.heads.base import DraftHead
from specdraft.targets._config import TargetConfig
from specdraft.targets.hf import load_target

NEW_TOKENS = 32
"""Of each text."""
METHODS = {"eagle3": "eagle3", "speculators": "eagle3", "vllm_eagle": "eagle", "medusa": "medusa"}
"""Format -> how vLLM calls it."""


@dataclass(frozen=True)
class Files:
    """What an engine is given: its target and draft, and what it is told beside them."""

    target: str
    draft: str
    method: str = ""


def unavailable(name: str, pythons: Mapping[str, str]) -> str | None:
    """Why no engine can be started on format ``name``; None = one can."""
    if name not in ENGINES_OF:
        return "no engine reads it on a CPU"
    for engine in ENGINES_OF[name]:
        try:
            find_python(engine, pythons)
        except ExportError as error:
            return str(error).removeprefix("export.verify: ")
    return None


def check_in_engine(
    material: Material, name: str, folder: Path, head: DraftHead, pythons: Mapping[str, str]
) -> Agreement:
    """Runs the export of format ``name`` in ``folder`` in its engine, and compares.

    vLLM is asked for every token it proposes; llama.cpp and OpenVINO for their plain texts, and how many drafted tokens
    they accepted. All compute in float32.

    Args:
        material: the head and its target.
        name: of a format in ``ENGINES_OF``.
        folder: holds the export.
        head: what the files hold, in float32, with the vocabulary that engines draft from; its weights are packed.
        pythons: of the engines, where they are not in ``.engines``.

    Raises:
        ExportError: the engine is not installed or fails, or drafts something else than we do.
    """
    engine = ENGINES_OF[name][0]
    for needed in ENGINES_OF[name]:
        find_python(needed, pythons)
    if engine == "llamacpp" and material.dtype is not torch.float32:
        dtype = str(material.dtype).removeprefix("torch.")
        raise ExportError(
            f"export.verify: llama.cpp rounds what it computes to the dtype of the draft, got {dtype}; use verify=files, "
            "or a float32 head"
        )
    rows = reference_rows(material, head)
    scratch = Path(tempfile.mkdtemp(prefix="specdraft-engine-"))
    try:
        files = PREPARE[engine](material, name, folder, scratch, pythons)
        # vLLM takes long to start, and its own text is in what it drafts for; the others are asked twice.
        modes = ["speculative"] if engine == "vllm" else ["plain", "speculative"]
        job = make_job(files, rows, material.head.config.num_draft_tokens, modes)
        result = run_engine(engine, find_python(engine, pythons), job, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    found = compare(TITLES[engine], result, rows)
    if found.difference is not None:
        raise ExportError(
            f"export.verify: {found.engine} {found.version} does not draft what we do, got {found.difference}; "
            "nothing was written, report this"
        )
    return found


def reference_rows(material: Material, head: DraftHead) -> list[Row]:
    """Our texts for the built-in prompts.

    Raises:
        ExportError: the target ends them all at once.
    """
    target = load_target(
        TargetConfig(name=material.target.name, revision=material.target.revision, device="cpu", dtype="float32")
    )
    rows = our_rows(target, head, NEW_TOKENS)
    if not rows:
        raise ExportError(
            f"export.verify: the target answers with nothing, got {material.target.name}; use verify=files"
        )
    return rows


def make_job(files: Files, rows: list[Row], depth: int, modes: list[str], *, warm_up: bool = False) -> dict[str, Any]:
    """What a runner reads."""
    return {
        "target": files.target,
        "draft": files.draft,
        "method": files.method,
        "depth": depth,
        "prompts": [row.prompt for row in rows],
        "max_new_tokens": [len(row.tokens) for row in rows],
        "modes": modes,
        "threads": torch.get_num_threads(),
        "warm_up": warm_up,
    }


def _for_vllm(material: Material, name: str, folder: Path, scratch: Path, pythons: Mapping[str, str]) -> Files:
    """The folders as they are."""
    return Files(material.target.source, str(folder.absolute()), METHODS[name])


def _for_llamacpp(material: Material, name: str, folder: Path, scratch: Path, pythons: Mapping[str, str]) -> Files:
    """The target as a GGUF file, too."""
    write_target(material, scratch / "target.gguf", torch.float32)
    return Files(str(scratch / "target.gguf"), str((folder / gguf.FILE).absolute()))


def _for_openvino(material: Material, name: str, folder: Path, scratch: Path, pythons: Mapping[str, str]) -> Files:
    """What the export's own script makes of target and draft."""
    python = find_python("optimum", pythons)
    script = str((folder / openvino.SCRIPT).absolute())
    source = material.target.source
    run_process("optimum", [str(python), "-I", script, source, str(scratch)], threads=torch.get_num_threads())
    return Files(str(scratch / "target"), str(scratch / "draft"))


PREPARE: dict[str, Callable[[Material, str, Path, Path, Mapping[str, str]], Files]] = {
    "vllm": _for_vllm,
    "llamacpp": _for_llamacpp,
    "openvino": _for_openvino,
}
