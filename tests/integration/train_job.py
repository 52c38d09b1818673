"""A training run for the tests that start processes: ``python -m tests.integration.train_job FOLDER KIND JSON``.

JSON: arguments of ``make_run``, and ``delay_s`` (pause before every window), ``masked`` (rows without supervision),
``num_rows``, ``expect_processes``, ``measure`` (acceptance by decoding, which counts on the target). With the environment
of a launch with FSDP the target is sharded. Prints one line of JSON per rank: its rank, whether a signal stopped it, its
state, and the threads of gloo that are left when all is over (read where the system tells the names of threads).
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from specdraft.data.chat import TokenRow
from specdraft.targets.layout import find_layout
from specdraft.train.loop import train
from specdraft.train.sharding import ShardedTarget, asks_to_shard, end_processes
from tests.training import acceptance, make_rows, make_run, target


def main() -> None:
    line = job()
    end_processes()
    sys.stdout.write(f"RESULT {json.dumps({**line, 'threads': gloo_threads()})}\n")


def gloo_threads() -> list[str]:
    """Names of the threads of gloo in this process."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return sorted(name for name in names if "gloo" in name)


def job() -> dict[str, Any]:
    torch.set_num_threads(1)
    folder, kind, settings = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    delay_s, expected = settings.pop("delay_s", 0.0), settings.pop("expect_processes", 1)
    rows = make_rows(settings.pop("num_rows", 12), tuple(settings.pop("masked", ())))
    measure = settings.pop("measure", False)
    run = make_run(folder, kind=kind, rows=rows, **settings)
    if asks_to_shard():
        whole = target()
        model = copy.deepcopy(whole.model)
        run = replace(run, target=ShardedTarget(model, find_layout(model), whole.spec, whole.tokenizer))
    if measure:
        run = replace(run, evaluate=acceptance(run.target))
    assert run.accelerator.num_processes == expected, f"{run.accelerator.num_processes} processes"

    def slowly(ids: Sequence[int]) -> list[TokenRow]:
        time.sleep(delay_s)
        return run.rows(ids)

    result = train(replace(run, rows=slowly))
    return {"rank": run.plan.rank, "stopped": result.stopped, "state": asdict(result.state)}


if __name__ == "__main__":
    main()
