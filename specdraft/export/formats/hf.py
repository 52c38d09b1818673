"""Our own folder, as the Hub shows it: config, weights, results; ``load_head`` reads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from specdraft.core.errors import ExportError, SpecDraftError
from specdraft.core.tree import DraftTree
from specdraft.core.types import DraftContext, Features, Unembedding
from specdraft.export.card import CARD_NAME, portable
from specdraft.export.material import RESULTS_NAME, Material
from specdraft.export.probe import Reading, has_own_lm_head
from specdraft.export.registry import Engine, Format
from specdraft.heads.base import DraftHead
from specdraft.heads.storage import CONFIG_NAME, WEIGHTS_NAME, load_head

MARK = "export"
"""Key of config.json by which an earlier export is told from a head of a run."""
FILES = (CARD_NAME, CONFIG_NAME, WEIGHTS_NAME, RESULTS_NAME)
"""All that an export in our own format may hold."""
PROBE_TOKENS = 8
PROBE_ROWS = 1024
"""Embeddings that are told apart."""


def write(material: Material, folder: Path) -> None:
    """Copies the head without the paths of this machine and reads the copy back.

    Raises:
        ExportError: the copy differs.
    """
    config = {**portable(material.record), MARK: {"format": "hf"}}
    results = material.results
    shutil.copyfile(material.folder / WEIGHTS_NAME, folder / WEIGHTS_NAME)
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
    if results is not None:
        (folder / RESULTS_NAME).write_text(json.dumps(results, indent=2) + "\n")
    verify(folder, material.head)


def verify(folder: Path, head: DraftHead) -> None:
    """Loads an export strictly and compares it with ``head``: every tensor bit by bit, and the tokens of a draft.

    Raises:
        ExportError: anything differs.
    """
    try:
        copy = load_head(folder, mapped=True)
    except SpecDraftError as error:
        raise ExportError(f"export.format: the export cannot be read back, got {error}; report this") from error
    wanted, found = head.state_dict(), copy.state_dict()
    wrong = [name for name in wanted if name not in found or not torch.equal(wanted[name], found[name])]
    if wrong or len(found) != len(wanted):
        raise ExportError(f"export.format: the export holds other tensors, got {wrong or sorted(found)}; report this")
    if not torch.equal(probe(head), probe(copy)):
        raise ExportError(f"export.format: the export drafts other tokens, got {folder}; report this")


@torch.no_grad()
def probe(head: DraftHead) -> torch.Tensor:
    """``[1, K]`` int64: what the head drafts after random features of random tokens.

    A head without an lm_head of its own is given a random matrix of the size of the target's.
    """
    generator = torch.Generator().manual_seed(0)
    spec, size = head.spec, PROBE_TOKENS

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32).to(head.dtype)

    rows = random(min(PROBE_ROWS, spec.vocab_size), spec.hidden_size)
    unembed = Unembedding(rows[:1].expand(spec.vocab_size, -1))
    if not has_own_lm_head(head):
        unembed = Unembedding(random(spec.vocab_size, spec.hidden_size))
    num_aux = len(head.features().aux_layers)
    aux = random(1, size, num_aux * spec.hidden_size) if num_aux else None
    tokens = torch.randint(spec.vocab_size, (1, size), generator=generator)
    context = DraftContext(tokens, Features(random(1, size, spec.hidden_size), aux), 0)
    tree = DraftTree.chain(head.config.num_draft_tokens)
    state = head.init_state(size + len(tree) + 1, tree, unembed)
    return head.propose(state, context, lambda ids: rows[ids % len(rows)], tree).tokens


def refuse(material: Material) -> str | None:
    """Every head fits."""
    return None


def readings(folder: Path, material: Material) -> list[Reading]:
    """None but our own, which ``write`` has tried."""
    return []


def engines(material: Material, where: str) -> list[Engine]:
    """Specdraft itself, as the card says."""
    return []


FORMAT = Format(name="hf", kinds=(), refuse=refuse, write=write, readings=readings, engines=engines)
