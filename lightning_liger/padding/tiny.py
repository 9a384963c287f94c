"""A configuration of the same architecture, small enough to build and run in a fraction of a second."""

from __future__ import annotations

import copy
from typing import Any

_SIZES = {
    64: "hidden_size n_embd d_model dim n_embed embed_dim word_embed_proj_dim embedding_size decoder_hidden_size "
    "lru_width",
    96: "intermediate_size ffn_dim n_inner d_ff ffn_hidden_size decoder_ffn_dim encoder_ffn_dim "
    "shared_intermediate_size intermediate_size_mlp hidden_dim",
    4: "num_hidden_layers n_layer n_layers num_layers num_attention_heads n_head n_heads num_heads "
    "decoder_attention_heads encoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts "
    "mamba_dt_rank time_step_rank linear_num_value_heads",
    2: "decoder_layers encoder_layers num_key_value_heads num_kv_heads n_kv_heads num_experts_per_tok moe_topk moe_k "
    "mamba_expand linear_num_key_heads n_mamba_heads attn_layer_period expert_layer_period",
    1: "n_shared_experts n_group topk_group mamba_n_groups n_groups mamba_ngroups dense_attention_every_n_layers "
    "moe_layer_start_index first_k_dense_replace attn_layer_offset",
    16: "head_dim attention_head_dim d_kv global_head_dim swa_head_dim q_lora_rank kv_lora_rank v_head_dim qk_head_dim "
    "mamba_d_head mamba_head_dim mamba_chunk_size chunk_size linear_key_head_dim linear_value_head_dim",
    32: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size",
    8: "qk_rope_head_dim qk_nope_head_dim state_size mamba_d_state mamba_n_heads mamba_num_heads "
    "hidden_size_per_layer_input laurel_rank rotary_dim sliding_window attention_window_size local_attention "
    "attention_chunk_size",
    256: "max_position_embeddings n_positions n_ctx max_seq_len",
    128: "vocab_size padded_vocab_size vocab_size_per_layer_input",
}
_PER_LAYER = (
    "layer_types layers_block_type mlp_layer_types block_types attn_type_list no_rope_layers sliding_window_pattern "
    "activation_sparsity_pattern attention_types attention_layers"
)
_LAYERS = 4
_VOCAB = 128


def tiny_config(config: Any) -> Any:
    """A shrunken deep copy of a transformers configuration; dropout off, no KV cache."""
    tiny = copy.deepcopy(config)
    _shrink(tiny, depth=0)
    return tiny


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except (AttributeError, TypeError, ValueError, NotImplementedError):
        return  # a derived, read-only attribute follows from the others


def _shrink(config: Any, depth: int) -> None:
    own = set(vars(config)) | set(getattr(config, "attribute_map", {}))
    heads = next((getattr(config, n) for n in ("num_attention_heads", "n_head") if hasattr(config, n)), None)
    groups = getattr(config, "num_key_value_heads", None)
    for size, names in _SIZES.items():
        for name in names.split():
            now = getattr(config, name, None) if name in own else None
            if isinstance(now, int) and not isinstance(now, bool):
                _set(config, name, min(size, now))
    if heads is not None and groups == heads:
        _set(config, "num_key_value_heads", 4)
    for name in _PER_LAYER.split():
        now = getattr(config, name, None) if name in own else None
        if isinstance(now, (list, tuple)) and len(now) > _LAYERS:
            kinds = list(dict.fromkeys(now)) if all(isinstance(x, (str, int, float)) for x in now) else list(now)
            _set(config, name, type(now)((kinds * _LAYERS)[:_LAYERS]))
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        now = getattr(config, name, None)
        if isinstance(now, list):
            _set(config, name, 1)
        elif isinstance(now, int) and now >= _VOCAB:
            _set(config, name, 0 if name == "pad_token_id" else 1)
    for name in list(vars(config)):
        now = getattr(config, name, None)
        if isinstance(now, float) and any(word in name for word in ("dropout", "pdrop", "layerdrop", "jitter")):
            _set(config, name, 0.0)
    if "use_cache" in own:
        _set(config, "use_cache", False)
    if isinstance(getattr(config, "qk_rope_head_dim", None), int) and "head_dim" in own:
        _set(config, "head_dim", config.qk_rope_head_dim)
    for name in getattr(config, "sub_configs", None) or {}:
        inner = getattr(config, name, None)
        if inner is not None and depth < 3:
            _shrink(inner, depth + 1)
