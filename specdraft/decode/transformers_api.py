"""A decoder called as a transformers model is: ``generate(input_ids, generation_config=...)``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig
from transformers.generation.streamers import BaseStreamer
from transformers.utils.generic import ModelOutput

from specdraft.core.errors import ConfigError, DataError
from specdraft.decode._sampling_config import SamplingConfig
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.generation_config import GenerateCall, read_generation_config
from specdraft.decode.result import DecodeResult
from specdraft.targets.hf import HFTarget

UNUSABLE = {
    "logits_processor": "a processor of one's own cannot be applied to every node of a draft; use the settings",
    "stopping_criteria": "use eos_token_id, stop_strings and max_new_tokens, or close a stream",
    "prefix_allowed_tokens_fn": "remove it",
    "assistant_model": "give the decoder a DraftModelProposer",
    "negative_prompt_ids": "remove it",
    "negative_prompt_attention_mask": "remove it",
    "custom_generate": "remove it",
    "synced_gpus": "use false",
    "inputs_embeds": "give input_ids",
}
"""Arguments of generate() besides the fields of its config that have no counterpart here, and what to do."""


@dataclass
class SpeculativeOutput(ModelOutput):  # type: ignore[misc, unused-ignore]
    """What ``return_dict_in_generate`` gives.

    sequences: ``[B * num_return_sequences, P + T]``. results: text, counts and times of each row.
    """

    sequences: Tensor | None = None
    results: list[DecodeResult] | None = None


class SpeculativeModel:
    """Takes the place of a transformers model where only ``generate`` is called on it.

    Greedy output is that of the model's own ``generate``; drawn output has the same distribution.

    Args:
        decoder: of a Hugging Face target; its tokenizer is used for ``stop_strings`` where the call brings none.

    Raises:
        ConfigError: the decoder's target is of another kind.
    """

    def __init__(self, decoder: SpeculativeDecoder) -> None:
        target = decoder.target
        if not isinstance(target, HFTarget):
            raise ConfigError(
                f"decoder: needs a Hugging Face target, got {type(target).__name__}; call the decoder itself"
            )
        self.decoder = decoder
        self.config: PretrainedConfig = target.model.config
        self.device: torch.device = target.device
        self.generation_config: GenerationConfig = target.model.generation_config or GenerationConfig()

    def generate(
        self,
        input_ids: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        attention_mask: Tensor | None = None,
        streamer: BaseStreamer | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> Tensor | SpeculativeOutput:
        """As ``generate`` of transformers.

        Args:
            input_ids: ``[B, P]`` int64, padded on the left; also as ``inputs=``.
            generation_config: None = the model's own.
            attention_mask: ``[B, P]``, 0 = padding; None = where ``input_ids`` holds a pad token that ends no text.
            streamer: gets the prompt and the tokens of every step; for one row.
            seed: of the first row when tokens are drawn, the next ones count up; None = from ``generator``.
            generator: gives the seed; None = torch's global one, which ``torch.manual_seed`` sets.
            **kwargs: fields of ``generation_config`` by name, and ``tokenizer``, which the decoder keeps.

        Returns:
            ``[B * num_return_sequences, P + T]`` int64 with pad tokens behind texts that ended earlier, or
            ``SpeculativeOutput`` with ``return_dict_in_generate``. A text ends at the last position of the target's
            context. A stop string is looked for in the new text alone.

        Raises:
            ConfigError: a setting that has no counterpart here, or out of range.
            DataError: a row without tokens, padded elsewhere than on the left, or without room in the context.
            DecodeError: target or head gave NaN, or every token is forbidden.
        """
        tokenizer = kwargs.pop("tokenizer", None)
        ids = _input_ids(input_ids, kwargs.pop("inputs", None))
        _refuse_unusable(kwargs)
        if seed is None:
            seed = int(torch.randint(2**62, (), generator=generator, device=generator.device if generator else None))
        call = read_generation_config(self.generation_config, generation_config, kwargs, ids.shape[1], seed)
        prompts = [prompt for prompt in _prompts(ids, attention_mask, call) for _ in range(call.copies)]
        if call.pad is None and len(prompts) > 1 and self._may_differ(prompts, call):
            raise ConfigError(
                "generate.pad_token_id: needed where texts of a batch end at different lengths, got None; give one"
            )
        if streamer is not None and len(prompts) > 1:
            raise ConfigError(
                f"generate.streamer: streams one text, got {len(prompts)}; use stream_batch of the decoder"
            )
        if tokenizer is not None:
            self.decoder.tokenizer = tokenizer
        sampling = [replace(call.sampling, seed=(seed + i) % 2**63) for i in range(len(prompts))]
        results = self._run(prompts, call, sampling, streamer, ids)
        sequences = _padded(ids.repeat_interleave(call.copies, dim=0), results, call.pad)
        return SpeculativeOutput(sequences=sequences, results=results) if call.returns_dict else sequences

    def _may_differ(self, prompts: list[list[int]], call: GenerateCall) -> bool:
        """Whether texts may end before ``max_new_tokens``."""
        longest = max(map(len, prompts)) + call.max_new_tokens
        return bool(call.eos or call.sampling.stop) or longest > self.decoder.target.spec.max_position_embeddings

    def _run(
        self,
        prompts: list[list[int]],
        call: GenerateCall,
        sampling: list[SamplingConfig],
        streamer: BaseStreamer | None,
        input_ids: Tensor,
    ) -> list[DecodeResult]:
        """Decodes the prompts; a single one outside a batch, which spares what a batch needs."""
        decoder, length = self.decoder, call.max_new_tokens
        if streamer is not None:
            result = DecodeResult()
            streamer.put(input_ids.cpu())
            for step in decoder.stream(prompts[0], length, call.eos, sampling=sampling[0], result=result):
                streamer.put(torch.tensor(step.tokens))
            streamer.end()
            return [result]
        if len(prompts) == 1:
            return [decoder.generate(prompts[0], length, call.eos, sampling=sampling[0])]
        try:
            return decoder.generate_batch(prompts, length, call.eos, sampling=sampling)
        except DataError as error:
            raise DataError(str(error).replace("prompts[", "input_ids[")) from error


def _input_ids(input_ids: Tensor | None, inputs: Tensor | None) -> Tensor:
    """The ``[B, P]`` ids of a call, given under one of two names."""
    if (input_ids is None) == (inputs is None):
        got = "none" if input_ids is None else "it and inputs"
        raise DataError(f"input_ids: must be given once, got {got}; give the tokens of the prompts")
    ids = inputs if input_ids is None else input_ids
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or not ids.numel():
        got = f"shape {list(ids.shape)} of {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
        raise DataError(
            f"input_ids: needs token ids [rows, tokens] with a token at least, got {got}; tokenize the prompts"
        )
    return ids.long()


def _refuse_unusable(kwargs: dict[str, Any]) -> None:
    """Takes the arguments that are switched off out of ``kwargs``."""
    for name, advice in UNUSABLE.items():
        value = kwargs.pop(name, None)
        if value is not None and value is not False and not (isinstance(value, list) and not value):
            raise ConfigError(f"generate.{name}: cannot be used with drafts, got {type(value).__name__}; {advice}")


def _prompts(input_ids: Tensor, attention_mask: Tensor | None, call: GenerateCall) -> list[list[int]]:
    """The rows without their padding."""
    if attention_mask is None:
        is_token = torch.ones_like(input_ids, dtype=torch.bool)
        if call.pad_marks_padding and call.pad is not None:
            is_token = input_ids.ne(call.pad)
    elif attention_mask.shape != input_ids.shape:
        raise DataError(
            f"attention_mask: must have the shape of input_ids {list(input_ids.shape)}, got "
            f"{list(attention_mask.shape)}; take both from the tokenizer"
        )
    else:
        is_token = attention_mask.to(input_ids.device).bool()
    prompts = []
    for i, (ids, kept) in enumerate(zip(input_ids.tolist(), is_token.tolist(), strict=True)):
        start = kept.index(True) if True in kept else len(kept)
        if not all(kept[start:]):
            raise DataError(
                f"attention_mask[{i}]: padding must lie on the left, got some behind token {start}; use "
                "padding_side='left'"
            )
        if start == len(ids):
            raise DataError(
                f"input_ids[{i}]: must hold at least one token, got padding only; start it with the BOS token"
            )
        prompts.append(ids[start:])
    return prompts


def _padded(prompts: Tensor, results: list[DecodeResult], pad: int | None) -> Tensor:
    """Prompts ``[n, P]`` with their texts behind them, filled up with ``pad`` to one length."""
    longest = max(len(result.tokens) for result in results)
    # Unknown only where all texts have one length.
    filler = [] if pad is None else [pad]
    texts = [result.tokens + filler * (longest - len(result.tokens)) for result in results]
    return torch.cat([prompts, torch.tensor(texts, device=prompts.device)], dim=1)
