"""Sharded targets beside whole ones: ``torchrun -m tests.integration.sharding_job FOLDER KIND...``, two processes.

FOLDER holds a saved tiny target of every KIND. Prints one line of JSON per rank: its rank, and by kind what was found.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from specdraft.core.errors import DataError
from specdraft.core.types import FeatureRequest
from specdraft.targets._config import TargetConfig
from specdraft.targets.check import token_batch
from specdraft.targets.hf import load_target
from specdraft.train._config import TrainerConfig
from specdraft.train.inputs import make_accelerator
from specdraft.train.sharding import ShardedTarget, asks_to_shard, end_processes, load_sharded
from specdraft.train.state import on_main

REQUEST = FeatureRequest((0, 2, 4))


def main() -> None:
    torch.set_num_threads(1)
    folder, *kinds = sys.argv[1:]
    accelerator = make_accelerator(TrainerConfig(mixed_precision="no"), "cpu")
    assert asks_to_shard()
    rank = accelerator.process_index
    found: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        config = TargetConfig(name=str(Path(folder) / kind), device="cpu", pack_weights=False)
        whole, sharded = load_target(config), load_sharded(config, accelerator)
        ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(rank))
        wanted = whole.capture(token_batch(ids), REQUEST)

        def as_wanted(sharded: ShardedTarget = sharded, ids: torch.Tensor = ids, wanted: Any = wanted) -> bool:
            features = sharded.capture(token_batch(ids), REQUEST)
            return torch.equal(features.last_hidden, wanted.last_hidden) and torch.equal(
                features.aux_hidden, wanted.aux_hidden
            )

        equal = [as_wanted()]
        with sharded.together(), torch.inference_mode():
            equal += [as_wanted() for _ in range(2 * rank)]
        with sharded.together():
            equal += [as_wanted() for _ in range(3 - 3 * rank)]
        found[kind] = {
            "equal": equal,
            "share": sum(p.to_local().numel() for p in sharded.layout.layers.parameters())
            / sum(p.numel() for p in whole.layout.layers.parameters()),
            "spec": sharded.spec == replace(whole.spec, name=sharded.spec.name),
            "last_layer": _same_layers(sharded, whole),
            "error": _error_of_one(sharded, accelerator),
            "after": as_wanted(),
        }
    sys.stdout.write(f"RESULT {json.dumps({'rank': rank, 'found': found})}\n")


def _same_layers(sharded: ShardedTarget, whole: Any) -> bool | None:
    """Whether both give the same last layer; None where neither gives one."""
    ours, theirs = sharded.last_layer(), whole.last_layer()
    if ours is None or theirs is None:
        return None if ours is theirs else False
    return all(torch.equal(getattr(ours, field.name), getattr(theirs, field.name)) for field in fields(ours))


def _error_of_one(sharded: ShardedTarget, accelerator: Any) -> str:
    """An error of rank 0 between its forwards reaches every rank."""

    def fail() -> None:
        sharded.capture(token_batch(torch.tensor([[5, 6, 7]])))
        raise DataError("rank 0: failed, got nothing; try again")

    try:
        on_main(accelerator, fail, inside=sharded.together())
    except DataError as error:
        return str(error)
    return "none"


if __name__ == "__main__":
    main()
    end_processes()
