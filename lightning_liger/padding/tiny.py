"""A configuration of the same architecture, small enough to build and run in a fraction of a second."""

from __future__ import annotations

import copy
from typing import Any

_SIZES = {
    64: "hidden_size n_embd d_model dim n_embed embed_dim word_embed_proj_dim embedding_size decoder_hidden_size "
    "lru_width d_embed",
    96: "intermediate_size ffn_dim n_inner d_ff ffn_hidden_size decoder_ffn_dim encoder_ffn_dim "
    "shared_intermediate_size intermediate_size_mlp hidden_dim",
    4: "num_hidden_layers n_layer n_layers num_layers num_attention_heads n_head n_heads num_heads "
    "decoder_attention_heads encoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts "
    "mamba_dt_rank time_step_rank linear_num_value_heads",
    2: "decoder_layers encoder_layers num_key_value_heads num_kv_heads n_kv_heads num_experts_per_tok moe_topk moe_k "
    "mamba_expand linear_num_key_heads attn_layer_period expert_layer_period num_kv_shared_layers "
    "top_k_experts num_dense_layers zero_expert_num",
    1: "n_shared_experts n_group topk_group mamba_n_groups n_groups mamba_ngroups dense_attention_every_n_layers "
    "moe_layer_start_index first_k_dense_replace attn_layer_offset num_shared_experts num_nextn_predict_layers",
    16: "head_dim attention_head_dim d_kv global_head_dim swa_head_dim q_lora_rank kv_lora_rank v_head_dim qk_head_dim "
    "mamba_d_state mamba_d_head mamba_head_dim mamba_headdim mamba_chunk_size chunk_size linear_key_head_dim linear_value_head_dim",
    32: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size",
    8: "qk_rope_head_dim qk_nope_head_dim state_size mamba_n_heads mamba_num_heads n_mamba_heads "
    "hidden_size_per_layer_input laurel_rank rotary_dim sliding_window attention_window_size local_attention "
    "attention_chunk_size index_topk",
    256: "max_position_embeddings n_positions n_ctx max_seq_len",
    128: "mamba_d_ssm attention_hidden_size decoder_vocab_size vocab_size entity_vocab_size padded_vocab_size vocab_size_per_layer_input",
}
# Endings of other names; a window or a chunk that stayed longer than the probe's documents would not be seen at all.
_ENDINGS = {
    16: ("_head_dim",),
    8: ("_window", "_window_size", "_chunk_size"),
    4: ("_num_heads", "_layers_per_stack"),
}
_NAMED = frozenset(name for names in _SIZES.values() for name in names.split())
_LAYER_COUNTS = "num_hidden_layers n_layer n_layers num_layers"
_HEAD_COUNTS = "num_attention_heads n_head n_heads num_heads"
_LAYERS = 4
_VOCAB = 128


def tiny_config(config: Any) -> Any:
    """A shrunken deep copy of a transformers configuration; dropout off, no KV cache."""
    tiny = copy.deepcopy(config)
    _shrink(tiny, depth=0)
    return tiny


def fill_in(config: Any) -> None:
    """Give sizes to attributes that the type's defaults leave open and every real checkpoint has."""
    for size, names in _SIZES.items():
        for name in names.split():
            if vars(config).get(name, 0) is None:
                _set(config, name, size)


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except (AttributeError, TypeError, ValueError, NotImplementedError):
        return  # a derived, read-only attribute follows from the others


def _first(config: Any, names: str) -> int | None:
    found = (getattr(config, name, None) for name in names.split())
    return next((n for n in found if isinstance(n, int) and not isinstance(n, bool)), None)


def _shrink(config: Any, depth: int) -> None:
    overrides = _take_overrides(config)
    own = set(vars(config)) | set(getattr(config, "attribute_map", {}))
    layers, heads = _first(config, _LAYER_COUNTS), _first(config, _HEAD_COUNTS)
    groups = getattr(config, "num_key_value_heads", None)
    narrow = (_first(config, "hidden_size n_embd d_model dim") or 0) <= 64
    before = {name: getattr(config, name, None) for names in overrides.values() for name in names}
    kept = _representatives(config, own, layers, overrides)
    for size, names in _SIZES.items():
        for name in names.split():
            now = getattr(config, name, None) if name in own else None
            if isinstance(now, int) and not isinstance(now, bool):
                _set(config, name, min(size, now))
    for size, endings in _ENDINGS.items():
        for name in own - _NAMED:
            now = getattr(config, name, None)
            if name.endswith(endings) and isinstance(now, int) and not isinstance(now, bool):
                _set(config, name, min(size, now))
    for name in _LAYER_COUNTS.split():
        if kept and name in own and getattr(config, name, None) is not None:
            _set(config, name, len(kept))
    if heads is not None:
        _shrink_heads(config, own, heads, groups, narrow)
    for name in own:
        now = getattr(config, name, None)
        if layers is not None and isinstance(now, (list, tuple)) and len(now) == layers > _LAYERS and kept:
            _set(config, name, type(now)(now[i] for i in kept))
    _shrink_tokens(config)
    for name in list(vars(config)):
        now = getattr(config, name, None)
        if isinstance(now, float) and any(word in name for word in ("dropout", "pdrop", "layerdrop", "jitter")):
            _set(config, name, 0.0)
    if "use_cache" in own:
        _set(config, "use_cache", False)
    if isinstance(getattr(config, "qk_rope_head_dim", None), int) and "head_dim" in own:
        _set(config, "head_dim", config.qk_rope_head_dim)
    if {"attention_hidden_size", "attention_head_dim"} <= own:
        _set(config, "attention_head_dim", config.attention_hidden_size // config.num_attention_heads)
    if {"expand", "state_size", "num_heads", "head_dim"} <= own:  # a state-space layer without attention
        _set(config, "head_dim", config.expand * config.hidden_size // config.num_heads)
    _shrink_rope(config)
    _put_overrides(config, overrides, before, kept)
    for name in getattr(config, "sub_configs", None) or {}:
        inner = getattr(config, name, None)
        if inner is not None and depth < 3:
            _shrink(inner, depth + 1)


def _representatives(config: Any, own: set[str], layers: int | None, overrides: dict[int, Any]) -> list[int]:
    """Indices of layers to keep: every kind of layer there is, each at least twice where four will do."""
    if layers is None or layers <= _LAYERS:
        return list(range(layers or 0))
    values = (getattr(config, n, None) for n in sorted(own))
    lists = [v for v in values if isinstance(v, (list, tuple)) and len(v) == layers]
    kinds: dict[str, int] = {}
    for i in range(layers):
        kinds.setdefault(repr(([v[i] for v in lists], overrides.get(i))), i)
    found = list(kinds.values())
    if len(found) > 2 * _LAYERS:  # numbers that differ in each layer
        found = found[:_LAYERS]
    return (found * _LAYERS)[: max(_LAYERS, len(found))]


def _shrink_tokens(config: Any) -> None:
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        now = getattr(config, name, None)
        if isinstance(now, list):
            _set(config, name, 1)
        elif isinstance(now, int) and now >= _VOCAB:
            _set(config, name, 0 if name == "pad_token_id" else 1)


def _shrink_rope(config: Any) -> None:
    """Lists with one entry for each pair of rotated dimensions."""
    hidden, heads = _first(config, "hidden_size n_embd d_model"), _first(config, _HEAD_COUNTS)
    width = getattr(config, "head_dim", None) or (hidden // heads if hidden and heads else None)
    for attribute in ("rope_parameters", "rope_scaling"):
        given = getattr(config, attribute, None)
        if not isinstance(given, dict) or not isinstance(width, int):
            continue
        nested = [v for v in given.values() if isinstance(v, dict)]
        for rope in nested or [given]:
            pairs = int(width * rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0))) // 2
            for key, value in rope.items():
                if key.endswith("_factor") and isinstance(value, list):
                    rope[key] = value[:pairs]
                elif key == "mrope_section" and isinstance(value, list):
                    rope[key] = [pairs - 2 * (pairs // 3)] + [pairs // 3] * 2


# -- attributes that some layers override ----------------------------------------------------------------------------


def _shrink_heads(config: Any, own: set[str], heads: int, groups: Any, narrow: bool) -> None:
    """Four, two or one head: a power of two divides the hidden size, and key/value heads divide the heads.

    A ``narrow`` model keeps its hidden size, which its own number of heads divides.
    """
    few = heads if narrow else 4 if heads >= 4 else 2 if heads >= 2 else 1
    for name in _HEAD_COUNTS.split():
        if name in own and isinstance(getattr(config, name, None), int):
            _set(config, name, few)
    if isinstance(groups, int):
        _set(
            config,
            "num_key_value_heads",
            groups if narrow else few if groups == heads else max(1, min(groups, few // 2)),
        )


def _take_overrides(config: Any) -> dict[int, dict[str, Any]]:
    """Take off what a heterogeneous configuration says of single layers; until then some attributes cannot be read."""
    spec = vars(config).get("_heterogeneity_spec")
    if spec is None:
        return {}
    config.per_layer_config = None
    return dict(spec.per_layer_overrides)


def _put_overrides(config: Any, overrides: dict[int, Any], before: dict[str, Any], kept: list[int]) -> None:
    made: dict[int, dict[str, Any]] = {}
    for new, old in enumerate(kept):
        for name, value in overrides.get(old, {}).items():
            now, full = getattr(config, name, None), before.get(name)
            if isinstance(value, int) and isinstance(now, int) and isinstance(full, int) and full and now != full:
                value = max(1, min(2, value // full)) * now
            made.setdefault(new, {})[name] = value
    if made:
        config.per_layer_config = made
