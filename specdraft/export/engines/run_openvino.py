"""Generates in OpenVINO GenAI, plain and with a draft: ``python run_openvino.py JOB RESULT``. Nothing of ours is needed."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

EXACT = {"INFERENCE_PRECISION_HINT": "f32"}
"""Without it a CPU may compute in less than float32."""


def pipeline(job: dict[str, Any], drafts: bool) -> Any:
    """The pipeline with paged attention, plain or with the draft."""
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    options = {**EXACT, "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": job["threads"]}
    if drafts:
        options["draft_model"] = genai.draft_model(job["draft"], "CPU", INFERENCE_NUM_THREADS=job["threads"], **EXACT)
    return genai.LLMPipeline(job["target"], "CPU", scheduler_config=scheduler, **options)


def generate(pipe: Any, job: dict[str, Any], drafts: bool, prompt: list[int], new: int) -> dict[str, Any]:
    """One greedy text with the pipeline's own counts."""
    ids = np.array([prompt], dtype=np.int64)
    inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
    options = {"max_new_tokens": new, "do_sample": False, "apply_chat_template": False}
    if drafts:
        options["num_assistant_tokens"] = job["depth"]
    begin = time.perf_counter()
    answer = pipe.generate(inputs, **options)
    found = {"tokens": list(answer.tokens[0]), "seconds": time.perf_counter() - begin}
    if drafts:
        # Forwards of the target, that of the prompt among them: what the text has beyond them was accepted. The engine's
        # own count of accepted tokens leaves out some of the last step, where the text's end cuts a draft short.
        found["forwards"] = len(answer.extended_perf_metrics.main_model_metrics.raw_metrics.m_durations)
    return found


def main() -> None:
    """Runs the job's modes one after the other."""
    job = json.loads(Path(sys.argv[1]).read_text())
    result: dict[str, Any] = {"version": genai.get_version()}
    for mode in job["modes"]:
        drafts = mode == "speculative"
        pipe = pipeline(job, drafts)
        if job["warm_up"]:
            generate(pipe, job, drafts, job["prompts"][0], job["max_new_tokens"][0])
        rows = zip(job["prompts"], job["max_new_tokens"], strict=True)
        result[mode] = [generate(pipe, job, drafts, prompt, new) for prompt, new in rows]
        del pipe
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
