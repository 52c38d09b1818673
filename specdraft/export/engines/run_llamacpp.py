"""Generates in llama.cpp, plain and with a draft: ``python run_llamacpp.py JOB RESULT``. Needs xllamacpp, nothing of ours."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp as xl

MARGIN = 64
"""Places of the context beyond prompt and text: a draft is written behind the last token."""


def server(job: dict[str, Any], drafts: bool) -> Any:
    """The server in this process; caches and weights in float32, so that it computes what we do."""
    params = xl.CommonParams()
    params.model.path = job["target"]
    longest = max(len(prompt) + new for prompt, new in zip(job["prompts"], job["max_new_tokens"], strict=True))
    params.n_ctx = longest + MARGIN
    params.n_parallel = 1
    params.warmup = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job["threads"]
    params.cache_type_k = params.cache_type_v = xl.ggml_type.GGML_TYPE_F32
    if drafts:
        params.speculative.types = [xl.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3]
        draft = params.speculative.draft
        draft.mparams.path = job["draft"]
        draft.n_max, draft.n_min, draft.p_min = job["depth"], 0, 0.0
        draft.cache_type_k = draft.cache_type_v = xl.ggml_type.GGML_TYPE_F32
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = job["threads"]
    return xl.Server(params)


def generate(engine: Any, prompt: list[int], new: int) -> dict[str, Any]:
    """One greedy text with the server's own counts."""
    request = {
        "prompt": prompt,
        "n_predict": new,
        "temperature": 0.0,
        "top_k": 1,
        "return_tokens": True,
        "cache_prompt": False,
    }
    # The server's own route: the one of OpenAI's form, which the bindings call, gives no tokens back.
    call = urllib.request.Request(
        f"{engine.listening_address}/completion",
        json.dumps(request).encode(),
        {"Content-Type": "application/json"},
    )
    begin = time.perf_counter()
    with urllib.request.urlopen(call) as reply:
        answer = json.load(reply)
    seconds = time.perf_counter() - begin
    tokens = answer.get("tokens")
    if not tokens:
        raise SystemExit(f"error: llama.cpp gave no tokens but {json.dumps(answer)[:300]}")
    timings = answer.get("timings", {})
    return {
        "tokens": tokens,
        "seconds": seconds,
        "drafted": timings.get("draft_n", 0),
        "accepted": timings.get("draft_n_accepted", 0),
        "timings": timings,
    }


def main() -> None:
    """Runs the job's modes one after the other."""
    job = json.loads(Path(sys.argv[1]).read_text())
    result: dict[str, Any] = {"version": xl.__version__}
    for mode in job["modes"]:
        engine = server(job, mode == "speculative")
        if job["warm_up"]:
            generate(engine, job["prompts"][0], job["max_new_tokens"][0])
        rows = zip(job["prompts"], job["max_new_tokens"], strict=True)
        result[mode] = [generate(engine, prompt, new) for prompt, new in rows]
        del engine
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
