"""Generates in vLLM and records its proposals: ``python run_vllm.py JOB RESULT``. Needs vLLM for CPUs, nothing of ours."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

JOB = json.loads(Path(sys.argv[1]).read_text())
# Read when vLLM is imported. One process, so that the proposer can be watched; as many threads as the job says.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, sorted(os.sched_getaffinity(0))[: JOB["threads"]])),
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)

import vllm  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer  # noqa: E402
from vllm.v1.spec_decode.medusa import MedusaProposer  # noqa: E402

MARGIN = 64
"""Places of the context beyond prompt and text, and more than any draft."""


def watch(proposer: Any, seen: list[list[int]]) -> None:
    """Appends what ``proposer`` proposes to ``seen``, a list a step."""
    propose = proposer.propose

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = propose(self, *args, **kwargs)
        rows = found.tolist() if hasattr(found, "tolist") else found
        seen.append([int(token) for token in (rows[0] if isinstance(rows[0], list) else rows)])
        return found

    proposer.propose = watched


def engine(drafts: bool) -> Any:
    """The engine on token ids, in float32 without compilation."""
    prompts = zip(JOB["prompts"], JOB["max_new_tokens"], strict=True)
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": max(len(prompt) + new for prompt, new in prompts) + MARGIN,
        "max_num_seqs": 1,
        "enforce_eager": True,
        "enable_prefix_caching": False,
    }
    if drafts:
        options["speculative_config"] = {
            "method": JOB["method"],
            "model": JOB["draft"],
            "num_speculative_tokens": JOB["depth"],
        }
    return LLM(JOB["target"], **options)


def generate(llm: Any, seen: list[list[int]], prompt: list[int], new: int) -> dict[str, Any]:
    """One greedy text and what was proposed for it, a list for every step in their order."""
    seen.clear()
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    (answer,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    seconds = time.perf_counter() - begin
    return {"tokens": list(answer.outputs[0].token_ids), "seconds": seconds, "proposals": list(seen)}


def main() -> None:
    """Runs the job's modes one after the other."""
    seen: list[list[int]] = []
    for proposer in (SpecDecodeBaseProposer, MedusaProposer):
        watch(proposer, seen)
    result: dict[str, Any] = {"version": vllm.__version__}
    for mode in JOB["modes"]:
        llm = engine(mode == "speculative")
        if JOB["warm_up"]:
            generate(llm, seen, JOB["prompts"][0], JOB["max_new_tokens"][0])
        rows = zip(JOB["prompts"], JOB["max_new_tokens"], strict=True)
        result[mode] = [generate(llm, seen, prompt, new) for prompt, new in rows]
        del llm
        gc.collect()
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
