"""From a transformers ``GenerationConfig`` to settings of ours; what they cannot say is refused, never ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from specdraft.core.errors import ConfigError
from specdraft.decode._sampling_config import SamplingConfig

DEFAULTS: dict[str, Any] = {
    "min_length": 0,
    "do_sample": False,
    "use_cache": True,
    "early_stopping": False,
    "num_beams": 1,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "diversity_penalty": 0.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "guidance_scale": 1.0,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_scores": False,
    "output_logits": False,
    "return_dict_in_generate": False,
    "remove_invalid_values": False,
    "renormalize_logits": False,
    "token_healing": False,
    "use_mtp": False,
    "low_memory": False,
    "is_assistant": False,
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
    "assistant_lookbehind": 10,
    "target_lookbehind": 10,
    "disable_compile": False,
}
"""What generate() takes where a field is not set; None for the other fields."""

NEW_TOKENS = 20
"""What generate() writes at most where neither ``max_new_tokens`` nor ``max_length`` is set."""

SAMPLED_ONLY = ("temperature", "top_k", "top_p", "min_p")
"""Mapped fields that generate() heeds with ``do_sample`` alone."""

MAPPED = frozenset(
    {
        *SAMPLED_ONLY,
        "max_length",
        "max_new_tokens",
        "min_length",
        "min_new_tokens",
        "do_sample",
        "repetition_penalty",
        "bad_words_ids",
        "suppress_tokens",
        "sequence_bias",
        "stop_strings",
        "eos_token_id",
        "pad_token_id",
        "num_return_sequences",
        "return_dict_in_generate",
    }
)

WITHOUT_EFFECT = frozenset({"bos_token_id", "decoder_start_token_id", "renormalize_logits", "disable_compile"})
"""Fields that do not change what generate() writes after a prompt of a decoder-only model."""

ALLOWED = {"cache_implementation": ("dynamic", "hybrid"), "guidance_scale": (1,)}
"""Other values that mean the same as the default."""

ADVICE = {
    "num_beams": "use 1; only greedy decoding and sampling are lossless with drafts",
    "penalty_alpha": "remove it; contrastive search cannot be drafted for",
    "prompt_lookup_num_tokens": "give the decoder a PromptLookupProposer",
    "assistant_early_exit": "give the decoder a DraftModelProposer of the target's first layers",
    "use_cache": "use true; decoding is always cached",
}
"""What to do instead of some fields."""


@dataclass(frozen=True)
class GenerateCall:
    """What a call of generate() asks for, in our words.

    max_new_tokens: for all rows. eos: tokens that end a text, empty for none. pad: in place of tokens behind an end;
    None = unknown. copies: texts of each prompt.
    """

    max_new_tokens: int
    eos: tuple[int, ...]
    pad: int | None
    pad_marks_padding: bool
    copies: int
    returns_dict: bool
    sampling: SamplingConfig


def read_generation_config(
    own: GenerationConfig, given: GenerationConfig | None, changes: Mapping[str, Any], prompt_length: int, seed: int
) -> GenerateCall:
    """The call that ``generation_config=given`` and the keywords ``changes`` describe, as generate() reads them.

    Args:
        own: of the model; stands in for fields of ``given`` that are not set, as do generate()'s own defaults.
        given: of the call, or None.
        changes: fields given by name.
        prompt_length: columns of the prompts, padding included; ``max_length`` and ``min_length`` count them.
        seed: of the first row.

    Raises:
        ConfigError: a field that has no counterpart here is set, or a value is out of range.
    """
    values = _merged(own, given, changes)
    _refuse_unmapped(values)
    _refuse_without_effect(values, changes)
    eos = _token_ids(values["eos_token_id"])
    copies = values["num_return_sequences"]
    if copies < 1 or (copies > 1 and not values["do_sample"]):
        raise ConfigError(f"generate.num_return_sequences: needs do_sample and at least 1, got {copies}; use 1")
    pads = _token_ids(values["pad_token_id"])
    return GenerateCall(
        max_new_tokens=_room(values, changes, prompt_length),
        eos=tuple(eos),
        pad=next(iter(pads or eos), None),
        pad_marks_padding=bool(pads) and pads[0] not in eos,
        copies=copies,
        returns_dict=bool(values["return_dict_in_generate"]),
        sampling=_sampling(values, eos, prompt_length, seed),
    )


def _merged(own: GenerationConfig, given: GenerationConfig | None, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of the call: by name, else of its config, else of the model's, else the default."""
    values: dict[str, Any] = {}
    known = [name for name in vars(GenerationConfig()) if not name.startswith("_") and name != "transformers_version"]
    for name in {*known, *MAPPED}:
        # Releases of transformers differ in the fields they have.
        found = [vars(config).get(name) for config in (given, own) if config is not None]
        values[name] = next((value for value in found if value is not None), DEFAULTS.get(name))
    unknown = sorted(set(changes) - set(values))
    if unknown:
        raise ConfigError(
            f"generate.{unknown[0]}: cannot be used with drafts, got {_short(changes[unknown[0]])}; remove it"
        )
    # None by name switches a field off, whatever a config says; of top_k the default is not off.
    off = {**DEFAULTS, "top_k": None}
    values.update({name: off.get(name) if value is None else value for name, value in changes.items()})
    return values


def _refuse_unmapped(values: Mapping[str, Any]) -> None:
    for name, value in sorted(values.items()):
        if name in MAPPED or name in WITHOUT_EFFECT or value is None or value == DEFAULTS.get(name):
            continue
        if value not in ALLOWED.get(name, ()):
            raise ConfigError(
                f"generate.{name}: cannot be used with drafts, got {_short(value)}; {ADVICE.get(name, 'leave it unset')}"
            )


def _refuse_without_effect(values: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Refuses what the caller wrote for sampling while decoding is greedy; a config's values are simply not in use then."""
    for name in SAMPLED_ONLY:
        if not values["do_sample"] and changes.get(name) not in (None, DEFAULTS[name]):
            raise ConfigError(
                f"generate.{name}: has no effect without do_sample, got {changes[name]}; set do_sample=True"
            )


def _room(values: Mapping[str, Any], changes: Mapping[str, Any], prompt_length: int) -> int:
    """Tokens generated at most."""
    if values["max_new_tokens"] is not None:
        return int(values["max_new_tokens"])
    length = values["max_length"]
    # The first releases of transformers 5 enter the default into every config.
    if length is None or (changes.get("max_length") is None and length == GenerationConfig().max_length):
        return NEW_TOKENS
    if length <= prompt_length:
        raise ConfigError(
            f"generate.max_length: leaves no room behind a prompt of {prompt_length} tokens, got {length}; "
            "use max_new_tokens"
        )
    return int(length) - prompt_length


def _sampling(values: Mapping[str, Any], eos: list[int], prompt_length: int, seed: int) -> SamplingConfig:
    least = values["min_new_tokens"]
    if least is None:
        least = max(int(values["min_length"]) - prompt_length, 0)
    bias, forbidden = _biases(values["sequence_bias"])
    # As generate() does, which leaves it to min_new_tokens to hold back the end.
    bad_words = [list(word) for word in values["bad_words_ids"] or [] if list(word) not in [[token] for token in eos]]
    stops = values["stop_strings"] or []
    drawn: dict[str, Any] = {}
    if values["do_sample"]:
        if not values["temperature"]:
            raise ConfigError("generate.temperature: must be above 0 with do_sample, got 0; set do_sample=False")
        drawn = {
            "temperature": float(values["temperature"]),
            "top_k": values["top_k"] or None,
            "top_p": None if values["top_p"] == 1.0 else values["top_p"],
            "min_p": values["min_p"] or None,
        }
    return SamplingConfig(
        **drawn,
        repetition_penalty=float(values["repetition_penalty"]),
        logit_bias=bias,
        bad_words_ids=[*bad_words, *forbidden, *([int(token)] for token in values["suppress_tokens"] or [])],
        min_new_tokens=int(least),
        stop=[stops] if isinstance(stops, str) else list(stops),
        seed=seed,
    )


def _biases(sequence_bias: Any) -> tuple[list[list[Any]], list[list[int]]]:
    """``logit_bias`` and ``bad_words_ids`` that say what ``sequence_bias`` says.

    Raises:
        ConfigError: a sequence of several tokens with a finite bias.
    """
    pairs = sequence_bias.items() if isinstance(sequence_bias, Mapping) else sequence_bias or []
    bias: list[list[Any]] = []
    forbidden: list[list[int]] = []
    for sequence, value in pairs:
        ids = [int(token) for token in sequence]
        if value == float("-inf"):
            forbidden.append(ids)
        elif len(ids) == 1:
            bias.append([ids[0], float(value)])
        else:
            raise ConfigError(
                f"generate.sequence_bias: only single tokens can have a finite bias, got {ids}; use single tokens or -inf"
            )
    return bias, forbidden


def _token_ids(value: Any) -> list[int]:
    """A field of one token, several (a list or a tensor) or none."""
    if value is None:
        return []
    ids = value.tolist() if hasattr(value, "tolist") else value
    return [int(token) for token in ids] if isinstance(ids, Sequence) else [int(ids)]


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
