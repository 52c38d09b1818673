"""A training run for the tests that start processes: ``python -m tests.integration.train_job FOLDER KIND JSON``.

JSON: arguments of ``make_run``, and ``delay_s`` (pause before every window), ``masked`` (rows without supervision),
``num_rows``, ``expect_processes``. Prints one line of JSON per rank: its rank, whether a signal stopped it, its state.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from specdraft.data.chat import TokenRow
from specdraft.train.loop import train
from tests.training import make_rows, make_run


def main() -> None:
    torch.set_num_threads(1)
    folder, kind, settings = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    delay_s, expected = settings.pop("delay_s", 0.0), settings.pop("expect_processes", 1)
    rows = make_rows(settings.pop("num_rows", 12), tuple(settings.pop("masked", ())))
    run = make_run(folder, kind=kind, rows=rows, **settings)
    assert run.accelerator.num_processes == expected, f"{run.accelerator.num_processes} processes"

    def slowly(ids: Sequence[int]) -> list[TokenRow]:
        time.sleep(delay_s)
        return run.rows(ids)

    result = train(replace(run, rows=slowly))
    line = {"rank": run.plan.rank, "stopped": result.stopped, "state": asdict(result.state)}
    sys.stdout.write(f"RESULT {json.dumps(line)}\n")
    run.accelerator.end_training()


if __name__ == "__main__":
    main()
