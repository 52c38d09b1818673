"""How far an adapted target is from the original: the divergence of their distributions, and whether they choose alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from specdraft.core.types import FeatureRequest
from specdraft.data.batching import collate
from specdraft.data.chat import TokenRow
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.eval.summary import Bootstrap
from specdraft.targets.hf import HFTarget

PROMPTS = 32
"""Prompts, over all sets, that an evaluation measures it on."""
ROWS = 256
"""Rows of logits that exist at one time."""


@torch.no_grad()
def drift(
    original: HFTarget,
    adapted: HFTarget,
    prompt_ids: Sequence[list[int]],
    max_new_tokens: int,
    bootstrap: Bootstrap,
) -> dict[str, Any]:
    """Both targets on the original's own greedy answers to ``prompt_ids``.

    Returns:
        kl: KL(original || adapted) in nats a token, with its interval over prompts; same_choice: share of the tokens at
        which both have the same likeliest one; num_prompts, num_tokens.
    """
    decoder = SpeculativeDecoder(original)
    sums: list[float] = []
    counts: list[int] = []
    same = 0
    for ids in prompt_ids:
        answer = decoder.generate(ids, max_new_tokens).tokens
        text = [*ids, *answer]
        tokens = collate([TokenRow(text, [False] * len(text))], pad_id=0).to(original.device)
        # The state at the prompt's last token predicts the first of the answer.
        places = slice(len(ids) - 1, len(text) - 1)
        states = [one.capture(tokens, FeatureRequest()).last_hidden[0, places] for one in (original, adapted)]
        total = 0.0
        for first, second in zip(*(state.split(ROWS) for state in states), strict=True):
            p = original.logits(first).float().log_softmax(-1)
            q = adapted.logits(second).float().log_softmax(-1)
            total += float((p.exp() * (p - q)).sum())
            same += int((p.argmax(-1) == q.argmax(-1)).sum())
        sums.append(total)
        counts.append(len(answer))
    return {
        "kl": bootstrap.ratio(np.array(sums), np.array(counts, dtype=float)),
        "same_choice": same / max(1, sum(counts)),
        "num_prompts": len(sums),
        "num_tokens": sum(counts),
    }


def drift_line(found: dict[str, Any]) -> str:
    """What a reader of results has to know, in one line."""
    kl = found["kl"]
    interval = "" if kl["ci95"] is None else " [{:.4f}, {:.4f}]".format(*kl["ci95"])
    return (
        f"the target is no longer the original: an adapter trained with the head is merged into it; KL from the original "
        f"{kl['value']:.4f}{interval} nats a token, the same likeliest token for {found['same_choice']:.1%} of "
        f"{found['num_tokens']:,} tokens of {found['num_prompts']} answers; drafts are lossless with respect to the adapted "
        "target, lossy with respect to the original"
    )


LOSSY_TARGET = (
    "the head's adapter is merged into the target, which is no longer the original: lossy with respect to the original"
)
"""For commands that do not measure the drift."""
