"""Tiny random targets of many families and a tiny chat tokenizer, built from config objects without any download."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tokenizers
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from specdraft.targets.hf import HFTarget

VOCAB_SIZE = 97
HIDDEN_SIZE = 32
NUM_LAYERS = 4
SLIDING_WINDOW = 6

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Wide enough that the logits of random weights are far from uniform.
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_HYBRID: dict[str, Any] = {
    "sliding_window": SLIDING_WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2),
}


def _build(config_name: str, model_name: str, **defaults: Any) -> Callable[..., PreTrainedModel]:
    """A function of config overrides and a seed that makes the model, in fp32 and eval mode."""

    def make(seed: int = 0, **overrides: Any) -> PreTrainedModel:
        config = getattr(transformers, config_name)(**{**_SIZES, **defaults, **overrides})
        return _seeded(getattr(transformers, model_name), config, seed)

    return make


def _seeded(model_class: Any, config: Any, seed: int) -> PreTrainedModel:
    """The random model of ``config``; norms and biases are moved off one and zero so that a forgotten one shows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def _gemma3_composite(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Gemma 3 as the Hub ships it: sizes live in ``text_config``, beside an image tower."""
    text = {**_SIZES, **_HYBRID, "head_dim": 8, "query_pre_attn_scalar": 8, **overrides}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    }
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=96
    )
    return _seeded(transformers.Gemma3ForConditionalGeneration, config, seed)


tiny_models: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": _build("LlamaConfig", "LlamaForCausalLM"),
    "mistral": _build("MistralConfig", "MistralForCausalLM", sliding_window=SLIDING_WINDOW, head_dim=8),
    "qwen2": _build("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen2_sliding": _build(
        "Qwen2Config",
        "Qwen2ForCausalLM",
        use_sliding_window=True,
        sliding_window=SLIDING_WINDOW,
        max_window_layers=2,
    ),
    "qwen3": _build("Qwen3Config", "Qwen3ForCausalLM", head_dim=16),
    "gemma2": _build(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        **_HYBRID,
        head_dim=8,
        query_pre_attn_scalar=8,
        final_logit_softcapping=5.0,
        attn_logit_softcapping=10.0,
    ),
    "gemma3": _build("Gemma3TextConfig", "Gemma3ForCausalLM", **_HYBRID, head_dim=8, query_pre_attn_scalar=8),
    "gemma3_composite": _gemma3_composite,
    "phi3": _build("Phi3Config", "Phi3ForCausalLM", sliding_window=SLIDING_WINDOW),
    "gpt_neox": _build("GPTNeoXConfig", "GPTNeoXForCausalLM", num_key_value_heads=None),
    "gpt2": _build(
        "GPT2Config",
        "GPT2LMHeadModel",
        **{"n_positions": 256, "n_inner": 48, "intermediate_size": None, "num_key_value_heads": None},
    ),
    "olmo2": _build("Olmo2Config", "Olmo2ForCausalLM"),
    "granite": _build(
        "GraniteConfig",
        "GraniteForCausalLM",
        embedding_multiplier=3.0,
        logits_scaling=4.0,
        residual_multiplier=0.5,
        attention_multiplier=0.25,
    ),
    "cohere": _build("CohereConfig", "CohereForCausalLM", logit_scale=0.25),
    "mixtral": _build("MixtralConfig", "MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2),
}
"""Kind -> function(seed=0, **config overrides) -> random model: vocabulary 97, hidden 32, 4 layers, fp32, eval."""


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single characters, 90 ids (the models have 97 rows), with a ChatML-like template.

    0 ``<|endoftext|>`` (padding and unknown), 1 ``<|im_start|>`` (BOS), 2 ``<|im_end|>`` (EOS), 3 newline.
    """
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    left_out = set("`^~\\|{}@#")
    characters = ["\n", *(chr(c) for c in range(0x20, 0x7F) if chr(c) not in left_out)]
    vocab = {token: i for i, token in enumerate([*specials, *characters])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], unk_token=specials[0]))
    backend.decoder = tokenizers.decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=specials[0],
        pad_token=specials[0],
        bos_token=specials[1],
        eos_token=specials[2],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_target(kind: str = "llama", seed: int = 0, **overrides: Any) -> HFTarget:
    """The tiny target of ``kind`` with its tokenizer; ``overrides`` go to the model's config."""
    return HFTarget.from_model(tiny_models[kind](seed=seed, **overrides), tiny_tokenizer(), name=f"tiny-{kind}")
