"""Hugging Face causal LMs as targets: features by hooks, cached forwards with tree masks, the model's own logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdraft.core.errors import ConfigError
from specdraft.core.types import (
    AdapterWeights,
    FeatureRequest,
    Features,
    LayerWeights,
    TargetSpec,
    TokenBatch,
    Unembedding,
)
from specdraft.targets._config import TargetConfig
from specdraft.targets.check import check_target
from specdraft.targets.compiled import CompiledDecoder
from specdraft.targets.facts import union_of_eos
from specdraft.targets.fast_path import FastLayers, cache_parameter, replace_layers
from specdraft.targets.last_layer import last_layer_weights
from specdraft.targets.layout import Layout, find_layout, text_config
from specdraft.targets.loading import load_config, load_model, load_tokenizer, resolve_device, resolve_source
from specdraft.targets.packing import PackedLinears, pack_linears
from specdraft.targets.placement import is_dispatched, stored_values
from specdraft.targets.spec import target_spec

__all__ = ["HFTarget", "load_target", "load_tokenizer"]

NO_AUX = FeatureRequest()


class HFTarget:
    """A frozen causal LM of transformers. See ``Target`` for what every member means.

    Built by ``from_model`` or ``load_target``, which also check that it behaves as assumed here.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layout: Layout,
        spec: TargetSpec,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        model.requires_grad_(False)
        model.eval()
        self.model = model
        self.layout = layout
        self.spec = spec
        self.tokenizer = tokenizer
        self.layer_types = layout.layer_types
        self.sliding_window = layout.sliding_window
        self.packed: PackedLinears | None = None
        self.fast_layers: FastLayers | None = None
        self.compiled: CompiledDecoder | None = None
        self.adapted = False
        """Whether an adapter was merged into the weights: the spec is that of the original."""
        weight = layout.lm_head.get_parameter("weight")
        self.device: torch.device = weight.device
        self.dtype: torch.dtype = weight.dtype
        bias = layout.lm_head.bias if isinstance(layout.lm_head, nn.Linear) else None
        self.unembedding = Unembedding(weight, bias, layout.logit_scale, layout.softcap)
        self._cache_key = cache_parameter(layout.decoder.forward)
        self._hybrid = len(set(layout.layer_types)) > 1
        self._sliding = set(layout.layer_types) == {"sliding_attention"}
        self._float_masks = text_config(model.config)._attn_implementation == "eager"

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "model",
        revision: str | None = None,
    ) -> HFTarget:
        """A target from a loaded model, which is frozen and put in eval mode.

        Raises:
            UnsupportedTargetError: the model is of a refused kind, or fails the check of ``targets.check``.
        """
        layout = find_layout(model)
        if layout.lm_head.get_parameter("weight").device.type == "meta":
            raise ConfigError("target.device_map: the lm_head must stay in memory, got it offloaded; give it a device")
        spec = target_spec(model, layout, name, revision, eos_token_ids(model, tokenizer), stored_values(model))
        target = cls(model, layout, spec, tokenizer)
        check_target(target)
        return target

    def pack(self) -> None:
        """Makes forwards of few tokens fast on a CPU: fused layers where they prove equal, and packed weights.

        A model that accelerate moves at each forward stays as it is.
        """
        if self.packed is None and not is_dispatched(self.model):
            self.fast_layers = replace_layers(self.layout)
            self.packed = pack_linears(self.model, self.fast_layers.linears, self.fast_layers.fused_away)
            if type(self.layout.lm_head) is nn.Linear:
                self.unembedding = replace(self.unembedding, product=self.layout.lm_head)

    def compile(self, pad: bool = True) -> None:
        """Compiles the forward over a draft, see ``CompiledDecoder``; the first steps then take up to a minute each.

        Raises:
            ConfigError: the layers are built in another way than ``targets.fast_path`` knows, accelerate moves them, or
                there is no compiler.
        """
        if self.fast_layers is None and not is_dispatched(self.model):
            self.fast_layers = replace_layers(self.layout)
        decoder = self.fast_layers.decoder if self.fast_layers else None
        if decoder is None:
            raise ConfigError(f"target.compile: the layers of {self.spec.name} cannot be, got true; set it to false")
        self.compiled = CompiledDecoder(decoder, pad)

    @property
    def compiles(self) -> bool:
        """See ``Target``."""
        return self.compiled is not None

    def last_layer(self) -> LayerWeights | None:
        """The weights of the last layer; None where it is built in another way than a draft layer."""
        return last_layer_weights(self.layout)

    def together(self) -> AbstractContextManager[None]:
        """See ``Target``: a target that is whole is run by every process on its own."""
        return nullcontext()

    def embed(self, ids: Tensor) -> Tensor:
        """``[...]`` int64 -> ``[..., H]``: the target's embedding module and the scale its decoder applies."""
        embedded: Tensor = self.layout.embedding(ids).to(self.device)
        return embedded if self.layout.embedding_scale == 1.0 else embedded * self.layout.embedding_scale

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., H]`` -> ``[..., V]`` without gradients, through the packed lm_head where there is one."""
        raw: Tensor = self.layout.lm_head(hidden)
        return self.unembedding.finish(raw)

    @torch.no_grad()
    def capture(self, tokens: TokenBatch, request: FeatureRequest = NO_AUX) -> Features:
        """Hidden states of a right-padded batch: ``[B, T, H]`` and, when layers are asked for, ``[B, T, A*H]``.

        The states at padding are undefined. Attention stays within a document.

        Raises:
            ConfigError: ``request`` names a layer that the target does not have.
        """
        return self.capture_with_graph(tokens, request)

    def capture_with_graph(self, tokens: TokenBatch, request: FeatureRequest = NO_AUX) -> Features:
        """``capture`` through which gradients reach an adapter that is trained in the target."""
        mask: Any = tokens.attention_mask
        if bool((tokens.document_ids > 0).any()):
            mask = self._document_masks(tokens)
        with self._taps(request) as collect:
            output = self.layout.decoder(
                input_ids=tokens.input_ids,
                attention_mask=mask,
                position_ids=tokens.position_ids,
                use_cache=False,
            )
            return collect(output.last_hidden_state)

    @torch.no_grad()
    def forward_cached(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        sliding_mask: Tensor | None,
        cache: Any,
        request: FeatureRequest = NO_AUX,
    ) -> Features:
        """One forward of n new tokens of one row against ``cache`` (a transformers ``Cache``), without the lm_head.

        Args:
            input_ids: ``[1, n]`` int64.
            position_ids: ``[1, n]`` int64; nodes of a tree at one depth share a position.
            attention_mask: ``[1, 1, n, L + n]`` bool, True = may attend, L = length of the cache; None = causal.
            sliding_mask: the same for the sliding layers, over the keys that ``cache`` returns for them. Both masks are
                needed by a target with both kinds of layers, only this one by a target of sliding layers alone.
            cache: receives the keys and values of all n tokens.
            request: hidden states wanted besides the last.
        """
        decoder = self.compiled or (self.fast_layers.decoder if self.fast_layers else None)
        # Without masks the model makes its own where they are needed: for prompts and for windows.
        whole = self.sliding_window is None and (input_ids.shape[1] == 1 or attention_mask is not None)
        if decoder and (whole or sliding_mask is not None):
            self._check_layers(request)
            masks = {"full_attention": attention_mask, "sliding_attention": sliding_mask}
            kept = decoder(input_ids, position_ids, masks, cache, request.aux_layers)
            states = [kept[index] for index in request.aux_layers]
            return Features(kept[len(self.layer_types)], torch.cat(states, dim=-1) if states else None)
        mask: Any = self._kernel_mask(sliding_mask if self._sliding else attention_mask)
        if self._hybrid and attention_mask is not None:
            mask = {"full_attention": mask, "sliding_attention": self._kernel_mask(sliding_mask)}
        with self._taps(request) as collect:
            output = self.layout.decoder(
                input_ids=input_ids,
                attention_mask=mask,
                position_ids=position_ids,
                use_cache=True,
                **{self._cache_key: cache},
            )
            return collect(output.last_hidden_state)

    def _kernel_mask(self, mask: Tensor | None) -> Tensor | None:
        """A bool mask as the attention kernel takes it: bool for sdpa, something to add to the scores for eager."""
        if mask is None or not self._float_masks:
            return mask
        return torch.zeros_like(mask, dtype=self.dtype).masked_fill_(~mask, torch.finfo(self.dtype).min)

    def _document_masks(self, tokens: TokenBatch) -> Any:
        """Masks ``[B, 1, T, T]`` for rows of several documents, by kind of layer where there are two kinds."""
        documents = tokens.document_ids
        steps = torch.arange(documents.shape[1], device=documents.device)
        distance = steps[:, None] - steps[None, :]
        full = (documents[:, None, :, None] == documents[:, None, None, :]) & (distance >= 0)
        if self.sliding_window is None:
            return self._kernel_mask(full)
        sliding = self._kernel_mask(full & (distance < self.sliding_window))
        return {"full_attention": self._kernel_mask(full), "sliding_attention": sliding} if self._hybrid else sliding

    def _check_layers(self, request: FeatureRequest) -> None:
        last = len(self.layer_types)
        for index in request.aux_layers:
            if not 0 <= index <= last:
                raise ConfigError(
                    f"head.aux_layers: the target has hidden states 0 to {last}, got {index}; choose others"
                )

    @contextmanager
    def _taps(self, request: FeatureRequest) -> Iterator[Callable[[Tensor], Features]]:
        """Hooks that keep the hidden states of ``request`` for the forward inside the block, and nothing else."""
        kept: dict[int, Tensor] = {}
        num_layers = len(self.layout.layers)
        handles = []
        self._check_layers(request)
        try:
            for index in set(request.aux_layers):
                if index < num_layers:
                    # The input of block k (from 0) is hidden state k, before any norm.
                    hook = _keep_input(kept, index)
                    handles.append(self.layout.layers[index].register_forward_pre_hook(hook, with_kwargs=True))

            def collect(last_hidden: Tensor) -> Features:
                # Layers may lie on other devices than the lm_head.
                kept[num_layers] = last_hidden.to(self.device)
                states = [kept[index].to(self.device) for index in request.aux_layers]
                return Features(kept[num_layers], torch.cat(states, dim=-1) if states else None)

            yield collect
        finally:
            for handle in handles:
                handle.remove()


def load_target(config: TargetConfig, adapter: AdapterWeights | None = None) -> HFTarget:
    """The target of ``config`` with its tokenizer, frozen, on its device, checked, and packed where asked.

    ``adapter``: is merged into the weights; the target is then another one, by the name of the original.

    Raises:
        ConfigError: unknown name, device, attention kernel, no tokenizer, or an adapter that does not go with the settings.
        CheckpointError: missing or torn weights.
        UnsupportedTargetError: a kind of model that cannot be decoded or trained with correctly.
    """
    device = resolve_device(config.device)
    source = resolve_source(config)
    model_config = load_config(config, source)
    tokenizer = load_tokenizer(config)
    model = load_model(config, source, model_config, device)
    revision = getattr(model.config, "_commit_hash", None) or config.revision
    target = HFTarget.from_model(model, tokenizer, name=config.name, revision=revision)
    if config.quantization != "none":
        from specdraft.targets.weights import TargetFiles

        # Heads are for the model, in whatever number of bits it is loaded.
        fingerprint = TargetFiles(config.name, config.revision).spec().fingerprint
        target.spec = replace(target.spec, fingerprint=fingerprint)
    if adapter is not None:
        from specdraft.targets.lora import merge

        merge(target, adapter)
    if config.pack_weights and target.device.type == "cpu":
        target.pack()
    if config.compile:
        target.compile()
    return target


def _keep_input(kept: dict[int, Tensor], index: int) -> Callable[..., None]:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept[index] = args[0] if args else kwargs["hidden_states"]

    return hook


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Every token that ends a text: the union of ids of the model, its generation config and the tokenizer, sorted."""
    return union_of_eos(model.config, model.config.get_text_config(decoder=True), model.generation_config, tokenizer)
