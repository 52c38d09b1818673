"""A Llama target as one float32 GGUF file, so that llama.cpp can be run on token ids without its converter."""

from __future__ import annotations

from pathlib import Path

from gguf import GGUFWriter

from specdraft.core.errors import ExportError
from specdraft.export.formats.gguf import add_tokenizer, interleaved
from specdraft.export.material import Material

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Names of transformers -> those of llama.cpp."""


def write_target(material: Material, path: Path) -> None:
    """Writes the target. Its tokenizer knows the tokens but not how to cut a text: the file is for prompts of ids.

    Raises:
        ExportError: another architecture than Llama's.
    """
    target, spec = material.target, material.spec
    config = target.config
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias:
        raise ExportError(
            f"export.verify: llama.cpp is started on Llama targets only, got {config.model_type}; use verify=files"
        )
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_hidden_layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_attention_heads)
    writer.add_head_count_kv(spec.num_key_value_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    writer.add_rope_freq_base(float(spec.rope_parameters["rope_theta"]))
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_vocab_size(spec.vocab_size)
    add_tokenizer(writer, material)
    writer.add_tensor("token_embd.weight", target.embedding.float().numpy())
    writer.add_tensor("output_norm.weight", target.tensor("model.norm.weight").float().numpy())
    writer.add_tensor("output.weight", target.lm_head.float().numpy())
    for layer in range(spec.num_hidden_layers):
        for name, gguf_name in LAYER.items():
            tensor = target.tensor(f"model.layers.{layer}.{name}.weight").float()
            if name.endswith(("q_proj", "k_proj")):
                tensor = interleaved(tensor, tensor.shape[0] // spec.head_dim)
            writer.add_tensor(f"blk.{layer}.{gguf_name}.weight", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
