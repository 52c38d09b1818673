"""The engines' own environments: where their Pythons are, and one run of an engine in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdraft.core.errors import ExportError

HOME = Path(".engines")
"""Where scripts/engines.sh makes one environment for each engine."""
TITLES = {"vllm": "vLLM", "llamacpp": "llama.cpp", "openvino": "OpenVINO GenAI", "optimum": "optimum-intel"}
LIMIT_S = 1800
"""Of one run: an engine that waits for something never ends by itself."""


def find_python(engine: str, given: Mapping[str, str]) -> Path:
    """The Python of an engine's environment: as given, else that of ``.engines`` here.

    Raises:
        ExportError: there is none.
    """
    path = Path(given[engine]).expanduser() if engine in given else HOME / engine / "bin" / "python"
    if not path.is_file():
        raise ExportError(
            f"export.verify: {TITLES[engine]} is not installed, got no {path}; run scripts/engines.sh {engine}, or give "
            f"engines={{{engine}: PYTHON}}"
        )
    return path.absolute()


def run_engine(engine: str, python: Path, job: Mapping[str, Any], scratch: Path) -> dict[str, Any]:
    """The result of ``run_<engine>.py`` beside this file, for ``job``; ``scratch`` receives both.

    Raises:
        ExportError: the engine failed, or took half an hour.
    """
    order, answer = scratch / f"{engine}-job.json", scratch / f"{engine}-result.json"
    order.write_text(json.dumps(job))
    answer.unlink(missing_ok=True)
    script = Path(__file__).with_name(f"run_{engine}.py")
    run_process(engine, [str(python), "-I", str(script), str(order), str(answer)], threads=job["threads"])
    if not answer.is_file():
        raise ExportError(f"export.verify: {TITLES[engine]} ended without a result, got {script.name}; report this")
    result: dict[str, Any] = json.loads(answer.read_text())
    return result


def run_process(engine: str, command: Sequence[str], threads: int) -> None:
    """Runs ``command`` in an engine's environment, without what is imported or configured for ours.

    Raises:
        ExportError: it failed, or took half an hour; with its last error, or the last line that it wrote.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    env = {**kept, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            command,
            env=env,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ExportError(f"export.verify: {TITLES[engine]} could not be run, got {error}; use verify=files") from error
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
        # An engine may say good-bye behind the error that ended it.
        errors = [line for line in lines if re.match(r"error: |[\w.]*(Error|Exception): ", line)]
        last = (errors or lines or ["nothing written"])[-1]
        raise ExportError(
            f"export.verify: {TITLES[engine]} failed (exit code {done.returncode}), got {last[:300]}; use verify=files, "
            f"or see whether {command[0]} can import it"
        )
