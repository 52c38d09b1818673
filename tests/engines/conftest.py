"""Targets, heads that drafts are accepted from, and the engines' environments."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from specdraft.core.types import TokenBatch
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.export.engines.environments import HOME
from specdraft.export.engines.ours import TEXTS, prompt_ids
from specdraft.heads.base import DraftHead
from specdraft.heads.storage import save_head
from specdraft.losses.alignment import align, build_draft_batch
from specdraft.targets._config import TargetConfig
from specdraft.targets.hf import HFTarget, load_target
from tests.support import make_head
from tests.tiny import tiny_target

ROOT = Path(__file__).resolve().parents[2]
HEADS: dict[str, dict[str, object]] = {
    "eagle3": {"draft_vocab_size": 48},
    "eagle3_own_layers": {"draft_vocab_size": 48, "aux_layers": [3, 5, 8]},
    "eagle": {"input_noise": 0.0},
    "medusa": {},
}
"""Name -> settings of a head for the tiny target."""
TEXT_TOKENS = 40


def needs(engine: str) -> None:
    """Skips the test where the engine's environment is absent."""
    if not (ROOT / HOME / engine / "bin" / "python").is_file():
        pytest.skip(f"no environment of {engine}; make it with scripts/engines.sh {engine}")


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments are looked for where the command is given."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve layers: engines tap three different ones; heads are 32 wide: vLLM has no smaller ones."""
    folder = tmp_path_factory.mktemp("tiny")
    target = tiny_target(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=12,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.09,
    )
    target.model.save_pretrained(folder)
    assert target.tokenizer is not None
    target.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def fitted(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name -> folder of a head that was fitted to the target's own answers, when it is first asked for."""
    folder = tmp_path_factory.mktemp("heads")

    @cache
    def target_and_rows() -> tuple[HFTarget, list[list[int]]]:
        target = load_target(TargetConfig(name=str(tiny), device="cpu", pack_weights=False))
        decoder = SpeculativeDecoder(target)
        return target, [ids + decoder.generate(ids, TEXT_TOKENS).tokens for ids in prompt_ids(target, TEXTS)]

    @cache
    def make(name: str) -> Path:
        target, rows = target_and_rows()
        head = make_head(name.partition("_")[0], target.spec, **{"num_draft_tokens": 4, **HEADS[name]})
        fit(head, target, rows)
        save_head(head, folder / name)
        return folder / name

    return make


def fit(head: DraftHead, target: HFTarget, rows: list[list[int]], steps: int = 60) -> None:
    """Cross entropy of every draft depth on ``rows``; a reduced vocabulary becomes that of their commonest tokens."""
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[True] * len(row) + [False] * (longest - len(row)) for row in rows])
    to_draft = torch.arange(target.spec.vocab_size)
    if head.vocab is not None:
        counts = torch.bincount(ids[mask], minlength=target.spec.vocab_size)
        kept = counts.topk(head.vocab.d2t.numel()).indices.sort().values
        head.vocab.set_tokens(kept.tolist())
        to_draft = torch.full_like(to_draft, -1)
        to_draft[kept] = torch.arange(kept.numel())
    positions = torch.arange(longest).expand_as(ids).contiguous()
    tokens = TokenBatch(ids, mask, mask, positions, torch.where(mask, 0, -1), torch.arange(len(rows)))
    batch = build_draft_batch(tokens, target.capture(tokens, head.features()))
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=5e-3)
    for _ in range(steps):
        loss = torch.zeros(())
        for step in head(batch, target.embed, target.unembedding):
            aligned = align(batch, step)
            labels = torch.where(aligned.valid, to_draft[aligned.labels], -1)
            loss = loss + torch.nn.functional.cross_entropy(step.unembed(step.hidden), labels, ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    head.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def smollm2() -> dict[str, Path]:
    """The heads that the recipe trains for the real target, by kind, where they are."""
    outputs = Path(os.environ.get("SPECDRAFT_ENGINE_HEADS", ROOT / "outputs"))
    folders = {kind: outputs / f"recipe_smollm2_{kind}" / "best" for kind in ("eagle3", "eagle", "medusa")}
    return {kind: folder for kind, folder in folders.items() if folder.is_dir()}
