"""Filling a feature store before training: by the target here, or by another producer whose states are checked first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from specdraft.core.errors import DataError
from specdraft.core.types import FeatureRequest, Features, TokenBatch
from specdraft.data.batching import MicroBatch, collate
from specdraft.data.chat import TokenRow
from specdraft.data.feature_layout import kept_positions
from specdraft.data.feature_shards import RowStates, row_key
from specdraft.data.feature_store import FeatureStore
from specdraft.data.feature_writer import FeatureWriter
from specdraft.targets.base import Target

TOLERANCE = 0.1
"""Largest relative difference of a producer's states from the target's own, which kernels and bfloat16 explain."""
CHECKED_ROWS = 4


class FeatureProducer(Protocol):
    """Anything that gives a target's hidden states: a server with a connector for them, another framework, a file.

    docs/features.md says how to fill a store with one.
    """

    def states(self, input_ids: Sequence[int], aux_layers: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """The last hidden state ``[T, H]`` **after the final norm**, and the layers asked for ``[T, A*H]`` side by side.

        Layer k is Hugging Face's ``hidden_states[k]``: 0 is the embedding output, k the output of block k counted from 1.
        The second is None when no layers are asked for.
        """
        ...


def capture_rows(
    target: Target,
    rows: Callable[[Sequence[int]], list[TokenRow]],
    batches: Iterable[MicroBatch],
    writer: FeatureWriter,
    store: FeatureStore,
    pad_id: int,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Runs the target over the micro-batches that have a row which ``store`` lacks, and stores those rows.

    The batches should be those of training's first epoch: states then equal, bit for bit, those that training itself would
    capture there. progress: is told how many rows of each batch are done.

    Raises:
        DataError: a state is not finite, the budget is spent, or the store cannot be written.
    """
    for batch in batches:
        places = [place for row in batch for place in row]
        if places and store.missing(places):
            on_cpu = target.device.type == "cpu"
            tokens = collate(rows(places), pad_id, places, [len(row) for row in batch], on_cpu).to(target.device)
            if bool(tokens.loss_mask.any()):
                writer.add_batch(tokens, target.capture(tokens, writer.identity.request), store)
        progress(len(places))
    writer.flush()


def fill_store(
    producer: FeatureProducer,
    rows: Callable[[Sequence[int]], list[TokenRow]],
    places: Iterable[int],
    writer: FeatureWriter,
    store: FeatureStore,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Stores the rows of ``places`` that ``store`` lacks, with the states of ``producer``; check it first.

    Raises:
        DataError: states of another shape, or not finite; the budget is spent, or the store cannot be written.
    """
    request = writer.identity.request
    for place in places:
        if not store.has(place):
            (row,) = rows([place])
            last_at, aux_at = (torch.from_numpy(places) for places in kept_positions(row.loss_mask, request))
            if last_at.numel():
                features = _produced(producer, row.input_ids, request)
                last, aux = features.last_hidden[0], features.aux_hidden
                kept = None if aux is None else aux[0].index_select(0, aux_at).cpu()
                writer.add(
                    RowStates(place, row_key(row.input_ids, row.loss_mask), last.index_select(0, last_at).cpu(), kept)
                )
        progress(1)
    writer.flush()


def _produced(producer: FeatureProducer, input_ids: Sequence[int], request: FeatureRequest) -> Features:
    """What a producer says of one row, ``[1, T, ·]``.

    Raises:
        DataError: not one state for every token.
    """
    last, aux = producer.states(input_ids, request.aux_layers)
    counts = {last.shape[0], *(() if aux is None else (aux.shape[0],))}
    if counts != {len(input_ids)} or (aux is None) != (not request.aux_layers):
        raise DataError(
            f"features: the producer must give a state for each of {len(input_ids)} tokens and the {len(request.aux_layers)} "
            f"layers asked for, got {tuple(last.shape)} and {None if aux is None else tuple(aux.shape)}; mend the producer"
        )
    return Features(last[None], None if aux is None else aux[None])


def check_producer(
    producer: FeatureProducer, target: Target, rows: Sequence[TokenRow], request: FeatureRequest
) -> None:
    """Compares a producer's states of a few rows with the target's own, and says what is wrong where they differ.

    Raises:
        DataError: states before the final norm, of a neighbouring layer, or of another model.
    """
    count = target.spec.num_hidden_layers
    for row in rows[:CHECKED_ROWS]:
        found = _produced(producer, row.input_ids, request)
        tokens = collate([row], 0).to(target.device)
        wanted = target.capture(tokens, request)
        _compare(found.last_hidden, wanted.last_hidden, "the last hidden state", "is not after the final norm")
        if found.aux_hidden is None or wanted.aux_hidden is None:
            continue
        size = target.spec.hidden_size
        for layer, own, other in zip(
            request.aux_layers, found.aux_hidden.split(size, -1), wanted.aux_hidden.split(size, -1), strict=True
        ):
            why = "is not that of the target"
            if _distance(own, other) > TOLERANCE:
                near = [k for k in (layer - 1, layer + 1) if 0 <= k <= count and _is_layer(target, tokens, k, own)]
                why = f"is hidden_states[{near[0]}]" if near else why
            _compare(own, other, f"hidden_states[{layer}]", why)


def _is_layer(target: Target, tokens: TokenBatch, layer: int, states: Tensor) -> bool:
    aux = target.capture(tokens, FeatureRequest((layer,))).aux_hidden
    return aux is not None and _distance(states, aux) <= TOLERANCE


def _distance(found: Tensor, wanted: Tensor) -> float:
    """Median over positions of the relative difference; a few positions of a transformer are far larger than the others."""
    found, wanted = found.to(wanted.device).float(), wanted.float()
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-6)).median())


def _compare(found: Tensor, wanted: Tensor, what: str, why: str) -> None:
    """Raises DataError where states ``[1, T, H]`` are not those wanted."""
    if found.shape != wanted.shape:
        raise DataError(
            f"features: the producer's states have another width, got {found.shape[-1]} for {wanted.shape[-1]}; use the "
            "target that it serves"
        )
    distance = _distance(found, wanted)
    if not distance <= TOLERANCE:
        raise DataError(
            f"features: what the producer gives as {what} {why}, got a relative difference of {distance:.2f}; mend the producer"
        )
