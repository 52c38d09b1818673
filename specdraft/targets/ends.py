"""A target without its layers: what training reads of it where hidden states come from a store."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from specdraft.core.errors import CheckpointError, ConfigError
from specdraft.core.types import FeatureRequest, Features, LayerWeights, TokenBatch
from specdraft.targets._config import TargetConfig
from specdraft.targets.hf import NO_AUX, HFTarget
from specdraft.targets.last_layer import last_layer_weights
from specdraft.targets.layout import Layout, find_layout, text_config
from specdraft.targets.loading import LOAD_ERRORS, load_tokenizer, resolve_device
from specdraft.targets.weights import TargetFiles


class LayersNeededError(ConfigError):
    """The layers of a target were asked for which are not in memory."""


class TargetEnds(HFTarget):
    """Embedding, final norm and lm_head of a target. It embeds and unembeds; it cannot run.

    The record is that of the whole target.
    """

    def __init__(self, *args: Any, layer: LayerWeights | None) -> None:
        """``layer``: the whole target's last layer where a draft layer may start from it."""
        super().__init__(*args)
        self._last_layer = layer

    def last_layer(self) -> LayerWeights | None:
        """See ``HFTarget``."""
        return self._last_layer

    def capture(self, tokens: TokenBatch, request: FeatureRequest = NO_AUX) -> Features:
        """Raises LayersNeededError."""
        self._refuse()

    def capture_with_graph(self, tokens: TokenBatch, request: FeatureRequest = NO_AUX) -> Features:
        """Raises LayersNeededError."""
        self._refuse()

    def forward_cached(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        sliding_mask: Tensor | None,
        cache: Any,
        request: FeatureRequest = NO_AUX,
    ) -> Features:
        """Raises LayersNeededError."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise LayersNeededError(
            f"features.mode: the layers of {self.spec.name} are not in memory, got a forward; use features=online"
        )


def load_ends(config: TargetConfig) -> TargetEnds | None:
    """The ends of the target of ``config`` on its device, in its dtype; None where they cannot be had without the layers.

    One layer is loaded beside them, the last one, whose weights draft layers may start from.

    Raises:
        ConfigError, CheckpointError, UnsupportedTargetError: see ``load_target``.
    """
    if config.device_map is not None or config.quantization != "none":
        return None
    files = TargetFiles(config.name, config.revision)
    cut = copy.deepcopy(files.config)
    text: Any = text_config(cut)
    text.num_hidden_layers = 1
    if getattr(text, "layer_types", None):
        text.layer_types = list(text.layer_types[-1:])
    read = cast(Any, AutoModelForCausalLM.from_pretrained)
    try:
        with _quiet():
            model, info = read(
                files.source,
                config=cut,
                revision=config.revision,
                dtype=getattr(torch, config.dtype),
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
            )
    except LOAD_ERRORS:
        return None
    if info["missing_keys"] or info["mismatched_keys"]:
        return None
    model = cast(PreTrainedModel, model).to(cast(Any, resolve_device(config.device)))
    layout = find_layout(model)
    layer = _last_layer(files, model, layout)
    layout.layers[0].to("meta")
    return TargetEnds(model, layout, files.spec(), load_tokenizer(config), layer=layer)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning of the layers that are left out."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


@torch.no_grad()
def _last_layer(files: TargetFiles, model: PreTrainedModel, layout: Layout) -> LayerWeights | None:
    """The weights of the whole target's last layer, read into the only layer there is; None where that differs from it."""
    (path,) = [name for name, module in model.named_modules() if module is layout.layers]
    last = len(files.layout.layers) - 1
    try:
        for name, parameter in layout.layers[0].named_parameters():
            parameter.copy_(files.tensor(f"{path}.{last}.{name}"))
    except (CheckpointError, AttributeError, RuntimeError):
        return None
    return last_layer_weights(layout)
