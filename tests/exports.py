"""A tiny target in a folder, random heads for it, and the material that exports are written from."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdraft.export.material import Material
from specdraft.export.registry import Format, find_format
from specdraft.heads.storage import save_head
from tests.support import make_head
from tests.tiny import tiny_target

NUM_LAYERS = 10


def save_target(folder: Path, kind: str = "llama", **overrides: Any) -> Path:
    """The tiny target of ``kind`` with ten layers in ``folder``, from where its name is its path."""
    hybrid = {"layer_types": ["sliding_attention", "full_attention"] * 5} if kind.startswith("gemma") else {}
    target = tiny_target(kind, num_hidden_layers=NUM_LAYERS, **hybrid, **overrides)
    target.model.save_pretrained(folder)
    assert target.tokenizer is not None
    target.tokenizer.save_pretrained(folder)
    return folder


def saved_head(folder: Path, target: Path, kind: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    """A head without a special value in any tensor, in ``folder``."""
    from specdraft.targets.weights import TargetFiles

    spec = replace(TargetFiles(str(target)).spec(), name=str(target))
    head = make_head(kind, spec, **{"num_draft_tokens": 3, **settings})
    generator = torch.Generator().manual_seed(3)
    for name, value in head.state_dict().items():
        if value.is_floating_point() and value.dim() == 1:
            value.add_(torch.randn(value.shape, generator=generator) * 0.2)
        if name == "embedding_scale":
            value.fill_(1.7)
    return save_head(head.to(dtype), folder)


def written(folder: Path, head: Path, name: str) -> tuple[Material, Format]:
    """The files of one format in ``folder``, not verified."""
    material, format = Material(head), find_format(name)
    folder.mkdir(parents=True)
    format.write(material, folder)
    return material, format


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes config.json in place."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Changes the weights in place."""
    (path,) = folder.glob("*.safetensors")
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


TRIO = {"aux_layers": [2, 5, 7]}
REDUCED = {"draft_vocab_size": 40}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {}),
    "eagle3_trio": ("eagle3", {**TRIO, **REDUCED}),
    "eagle3_one_layer": ("eagle3", {"aux_layers": [6]}),
    "eagle3_two_layers": ("eagle3", {"aux_layers": [6, 2], **REDUCED}),
    "eagle3_unordered": ("eagle3", {"aux_layers": [8, 1, 5], "fc_norm": True, "norm_output": True}),
    "eagle3_published": ("eagle3", {"norm_before_residual": True, **REDUCED}),
    "eagle3_wide": ("eagle3", {"intermediate_size": 56, "num_key_value_heads": 4}),
    "eagle": ("eagle", {}),
    "eagle_reduced": ("eagle", REDUCED),
    "peagle": ("peagle", {"num_layers": 2, **REDUCED}),
    "peagle_one_layer": ("peagle", {"num_layers": 1, "num_key_value_heads": 4, **TRIO}),
    "medusa": ("medusa", {}),
    "medusa_reduced": ("medusa", REDUCED),
    "medusa_deep": ("medusa", {"num_layers": 2, "shared_lm_head": False, "num_draft_tokens": 2}),
}
"""Name -> kind and settings of heads that differ in what formats can say."""
