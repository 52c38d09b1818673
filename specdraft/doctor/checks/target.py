"""Checks of the target: what is captured of it is what it computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from specdraft.core.types import FeatureRequest, TokenBatch
from specdraft.data.batching import collate
from specdraft.data.chat import TokenRow, pad_token_id
from specdraft.doctor.case import Case
from specdraft.doctor.findings import Finding, check
from specdraft.targets.check import QUANTIZED_TOLERANCE, TOLERANCE

ROWS, TOKENS = 4, 192
"""Of the batch that is run."""
SPREAD, MOST_ABOVE = 5.0, 0.02
"""Single positions may differ by so many times the tolerance; more by not more than this share of them."""
NEAR_OVERFLOW = 0.25
"""Share of float16's range from which on a state is called large."""


def _sample(case: Case) -> list[TokenRow]:
    rows = sorted(case.rows, key=lambda row: len(row.input_ids))
    chosen = [rows[place * (len(rows) - 1) // max(1, ROWS - 1)] for place in range(min(ROWS, len(rows)))]
    return [TokenRow(row.input_ids[:TOKENS], row.loss_mask[:TOKENS]) for row in chosen]


def _batch(case: Case, rows: list[TokenRow]) -> TokenBatch:
    return collate(rows, pad_token_id(case.tokenizer), list(range(len(rows)))).to(case.target.device)


def _tolerance(case: Case) -> float:
    quantized = case.job.target.quantization != "none"
    return max(TOLERANCE[case.target.dtype], QUANTIZED_TOLERANCE if quantized else 0.0)


def _distances(found: Tensor, wanted: Tensor) -> Tensor:
    """Per position: size of the difference, relative to the spread of ``wanted``. Both ``[T, ·]``."""
    wanted = wanted.float()
    spread = (wanted - wanted.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(1e-6)
    distances: Tensor = (found.float() - wanted).norm(dim=-1) / spread
    return distances


@check("target", 30)
def target(case: Case) -> Iterator[Finding]:
    """What was loaded; features, cached forwards and tree masks were checked while loading."""
    spec = case.target.spec
    yield Finding(
        "target",
        "ok",
        f"{spec.name} ({spec.model_type}): {spec.num_hidden_layers} layers of {spec.hidden_size}, {spec.vocab_size:,} tokens, "
        f"context {spec.max_position_embeddings:,}, {case.job.target.dtype} on {case.target.device}",
        numbers={"fingerprint": spec.fingerprint},
    )


@check("teacher logits", 31)
@torch.no_grad()
def teacher_logits(case: Case) -> Iterator[Finding]:
    """Logits rebuilt from captured states, in a padded batch, equal those of the model's own forward of each row alone."""
    rows = _sample(case)
    features = case.target.capture(_batch(case, rows), FeatureRequest())
    distances = []
    for place, row in enumerate(rows):
        ids = torch.tensor([row.input_ids], device=case.target.device)
        wanted = case.target.model(input_ids=ids, use_cache=False).logits[0]
        rebuilt = case.target.unembedding(features.last_hidden[place, : len(row.input_ids)])
        distances.append(_distances(rebuilt, wanted))
    found = torch.cat(distances).nan_to_num(torch.inf)
    tolerance = _tolerance(case)
    # Low precision spreads single positions (a fault of the code moves all of them, or all of a row by more than that).
    share = float((found > SPREAD * tolerance).float().mean())
    numbers = {
        "worst": float(found.max()),
        "median": float(found.median()),
        "share_above": share,
        "tolerance": tolerance,
    }
    text = f"relative difference {numbers['median']:.1e} (median), {numbers['worst']:.1e} (worst), {found.numel()} positions"
    if numbers["median"] > tolerance or share > MOST_ABOVE:
        yield Finding(
            "teacher logits",
            "fault",
            f"{text}, with a tolerance of {tolerance:g}: a head would learn from another model's distribution",
            "the final norm, a logit scale or a soft-cap is missing, or padding reaches other rows: report this target",
            numbers,
        )
    else:
        yield Finding("teacher logits", "ok", f"{text}, tolerance {tolerance:g}", numbers=numbers)


@check("layers", 32)
@torch.no_grad()
def layers(case: Case) -> Iterator[Finding]:
    """Captured layers equal what hooks on the blocks see: index k of hidden_states is the output of block k."""
    count = case.target.spec.num_hidden_layers
    wanted = case.head.features().aux_layers or tuple(sorted({1, max(1, count // 2), count}))
    row = _sample(case)[-1]
    tokens = _batch(case, [row])
    features = case.target.capture(tokens, FeatureRequest(wanted))
    assert features.aux_hidden is not None
    seen = _hooked(case, tokens)
    wrong, worst = [], 0.0
    for place, index in enumerate(wanted):
        state = features.aux_hidden[0].unflatten(-1, (len(wanted), -1))[:, place]
        distance = {k: float(_distances(state, other).nan_to_num(torch.inf).median()) for k, other in seen.items()}
        worst = max(worst, distance[index])
        if distance[index] > _tolerance(case):
            nearest = min(distance, key=lambda k: distance[k])
            like = f", it is that of layer {nearest}" if distance[nearest] <= _tolerance(case) else ""
            wrong.append(f"{index} (off by {distance[index]:.1e}{like})")
    numbers = {"layers": list(wanted), "worst": worst}
    if wrong:
        yield Finding(
            "layers",
            "fault",
            f"captured states are not those of their layers: {'; '.join(wrong)}",
            "head.aux_layers are indices into hidden_states (0 = embeddings): if they are right, report this target",
            numbers,
        )
    else:
        yield Finding(
            "layers",
            "ok",
            f"hidden states {', '.join(map(str, wanted))} are the outputs of those blocks",
            numbers=numbers,
        )


def _hooked(case: Case, tokens: TokenBatch) -> dict[int, Tensor]:
    """Index into hidden_states -> ``[T, H]``, by hooks on blocks and final norm while the whole model runs."""
    layout, seen = case.target.layout, {}

    def keep(index: int) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            state = output[0] if isinstance(output, tuple) else output
            seen[index] = state[0] if state.dim() == 3 else state

        return hook

    with ExitStack() as stack:
        for number, layer in enumerate(layout.layers, 1):
            index = number if number < len(layout.layers) else -1
            stack.callback(layer.register_forward_hook(keep(index)).remove)
        stack.callback(layout.final_norm.register_forward_hook(keep(len(layout.layers))).remove)
        case.target.model(input_ids=tokens.input_ids, use_cache=False)
    seen.pop(-1, None)
    return {0: case.target.embed(tokens.input_ids)[0], **seen}


@check("overflow", 33)
@torch.no_grad()
def overflow(case: Case) -> Iterator[Finding]:
    """States of all layers are finite and far from the largest number of their dtype."""
    count = case.target.spec.num_hidden_layers
    rows = _sample(case)
    batch = _batch(case, rows)
    features = case.target.capture(batch, FeatureRequest(tuple(range(count + 1))))
    assert features.aux_hidden is not None
    states = features.aux_hidden[batch.attention_mask]
    largest = float(states.float().abs().nan_to_num(torch.inf, torch.inf, torch.inf).max())
    limit = torch.finfo(case.target.dtype).max
    numbers = {"largest": largest, "limit": limit}
    if not torch.isfinite(states).all():
        yield Finding(
            "overflow",
            "fault",
            f"hidden states of real rows hold infinity or NaN in {case.job.target.dtype}",
            "use target.dtype=bfloat16",
            numbers,
        )
    elif largest > NEAR_OVERFLOW * limit:
        yield Finding(
            "overflow",
            "warning",
            f"hidden states reach {largest:.3g}, {case.job.target.dtype} ends at {limit:.3g}",
            "use target.dtype=bfloat16",
            numbers,
        )
    else:
        yield Finding("overflow", "ok", f"hidden states reach {largest:.3g} of {limit:.3g}", numbers=numbers)
