"""SERVE.md: how each engine is started on an export, and the facts that an engine's user needs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdraft.export.card import portable
from specdraft.export.material import Material

if TYPE_CHECKING:
    from specdraft.export.registry import Engine

HEADER = """\
# Serving this draft head

A draft head of kind {kind} for {target}, written by specdraft as `{format}`. The files were read back strictly, and what they
draft after 32 positions is what the head itself drafts.

| | |
| --- | --- |
| Target | {target}{known} |
| Target revision | {revision} |
| Target fingerprint | `{fingerprint}` |
| Draft depth | {depth} |
| Dtype | {dtype} |
| Position limit | {limit} (the target's) |
{layers}
Run the commands {where}.{fetch}
The drafts are for the weights of this target: those of another checkpoint, even of the same size and family, accept fewer.
"""
WIDENED = """
This format has no draft vocabulary: the engines draft from all {vocab:,} tokens of the target, the head was trained to draft
from {size:,} of them.
"""


def serve_text(material: Material, name: str, engines: Sequence[Engine], where: str, widened: bool) -> str:
    """The text of SERVE.md. ``where``: the Hub id or folder that the commands name."""
    target, spec = material.record["target"], material.spec
    layers = ", ".join(map(str, material.aux_layers))
    size = material.settings["draft_vocab_size"]
    parts = [
        HEADER.format(
            kind=material.kind,
            target=material.public_target,
            known="" if target["name"] == material.public_target else f" (`{portable(target['name'])}` to specdraft)",
            format=name,
            revision=target["revision"] or "not pinned",
            fingerprint=target["fingerprint"],
            depth=material.head.config.num_draft_tokens,
            dtype=str(material.dtype).removeprefix("torch."),
            limit=spec.max_position_embeddings,
            layers=f"| Fused layers | {layers} (indices into hidden_states; 0 = embeddings) |\n" if layers else "",
            fetch=f" It comes there with `{fetch_command(material, where)}`."
            if where.startswith("./") and material.repo_id
            else "",
            where=f"in the folder that holds `{where.removeprefix('./')}`" if where.startswith("./") else "anywhere",
        )
    ]
    if widened and size:
        parts.append(WIDENED.format(vocab=spec.vocab_size, size=size))
    for engine in engines:
        if not engine.reason:
            parts.append(f"\n## {engine.name}\n\n```bash\n{engine.command}\n```\n")
    unable = [engine for engine in engines if engine.reason]
    if unable:
        parts.append("\n## Not with\n\n" + "".join(f"- {engine.name}: {engine.reason}\n" for engine in unable))
    return "".join(parts)


def fetch_command(material: Material, where: str) -> str:
    """How the folder ``where`` is had from the repository."""
    name, place = where.removeprefix("./"), material.place
    revision = f" --revision {material.branch}" if material.branch else ""
    if place.folder:
        return f"hf download {material.repo_id}{revision} --include '{name}/*' --local-dir ."
    return f"hf download {material.repo_id}{revision} --local-dir {name}"


def vllm_command(material: Material, method: str, where: str, **more: bool) -> str:
    """The server of vLLM; the method is named since it would otherwise be guessed from the path."""
    config = {"method": method, "model": where, "num_speculative_tokens": material.head.config.num_draft_tokens}
    config |= more
    return f"vllm serve {material.public_target} --speculative-config '{json.dumps(config)}'"


def sglang_command(material: Material, algorithm: str, where: str, more: str = "") -> str:
    """The server of SGLang, drafting a chain."""
    depth = material.head.config.num_draft_tokens
    return (
        f"python -m sglang.launch_server --model-path {material.public_target} \\\n"
        f"  --speculative-algorithm {algorithm} --speculative-draft-model-path {where} \\\n"
        f"  --speculative-num-steps {depth} --speculative-eagle-topk 1 --speculative-num-draft-tokens {depth + 1}{more}"
    )
