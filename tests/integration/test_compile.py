"""torch.compile with code generation, on a head whose graph is small: the same training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specdraft.train.compiling import check_compiler
from specdraft.train.loop import train
from tests.training import make_run, weights


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch imports to generate code
@pytest.mark.parametrize("kind", ["medusa"])  # an unroll takes minutes to compile
def test_compiled_equals_plain(tmp_path: Path, kind: str) -> None:
    check_compiler(torch.device("cpu"))
    ends, losses = [], []
    for on in (False, True):
        torch._dynamo.reset()
        folder = tmp_path / str(on)
        run = make_run(folder, kind=kind, batch_size=2, trainer={"compile": on, "max_steps": 4})
        train(run)
        ends.append(weights(run.head))
        losses.append([json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, atol=1e-4, rtol=1e-3)
