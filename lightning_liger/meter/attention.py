"""The attention of one layer, read from the layer and its configuration."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch.nn as nn

from lightning_liger.configs import config_value
from lightning_liger.meter.flops import Attention, Reach
from lightning_liger.padding.interface import uses_attention_interface
from lightning_liger.padding.plain_decoder.finding import attends, functions

_OUTPUTS = ("o_proj", "c_proj", "out_proj", "proj", "wo", "out", "to_out", "dense", "output")
_CAUSAL = {"tril", "triu", "is_causal", "causal", "causal_mask", "create_causal_mask"}
_CAUSAL |= {"generate_square_subsequent_mask"}


def attention_of(name: str, module: nn.Module, config: Any, *, causal: bool, gradient: bool) -> Attention | None:
    """What ``module`` attends, or None if it is no attention layer.

    Args:
        name: path of the module. config: of the model, for layers that hold none.
        causal: layers that do not say so themselves look backwards only.
        gradient: something below it is trained.
    """
    if isinstance(module, nn.MultiheadAttention):
        size = module.embed_dim // module.num_heads
        return Attention(name, module.num_heads, size, size, Reach(causal), gradient)
    if any(k.__name__ == "PreTrainedModel" for k in type(module).__mro__):
        return None
    if type(module).__module__.startswith(("transformers.", "transformers_modules.")):
        own = uses_attention_interface(module) or _is_named_attention(module)
        return _of_transformers(name, module, config, causal, gradient) if own else None
    return _of_own_making(name, module, causal, gradient)


def looks_causal(model: nn.Module) -> bool:
    """Whether code of the model, outside of PyTorch, speaks of a causal mask."""
    if any(_CAUSAL & set(vars(m).get("_buffers", ())) for m in model.modules()):
        return True
    kinds = {type(m): m for m in model.modules()}
    return any(_CAUSAL & set(_words(f.__code__)) for m in kinds.values() for f in functions(m))


def _words(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _words(const)
        elif isinstance(const, tuple):  # names of keyword arguments
            yield from (c for c in const if isinstance(c, str))


def _is_named_attention(module: nn.Module) -> bool:
    """Layers whose attention is written out in their model's file."""
    named = "attention" in type(module).__name__.lower()
    return named and sum(_width(m) > 0 for m in module.children()) > 1


def _of_transformers(name: str, layer: Any, config: Any, causal: bool, gradient: bool) -> Attention | None:
    config = getattr(layer, "config", config)
    heads = _size(layer, config, "num_heads", "num_attention_heads", "n_heads")
    width = _size(config, config, "hidden_size", "dim", "n_embd", "d_model")
    size = _size(layer, config, "head_dim", "attention_head_size", "d_kv", "hidden_size_per_attention_head")
    size = size or (width // heads if heads else 0)
    if not heads or not size:
        return None
    # multi-head latent attention (DeepSeek) has keys of another size than values
    latent = [_size(layer, config, n) for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    keys, values = (latent[0] + latent[1], latent[2]) if all(latent) else (size, size)
    causal = bool(getattr(layer, "is_causal", causal))
    return Attention(name, heads, keys, values, Reach(causal, *_local(layer, config)), gradient)


def _local(layer: Any, config: Any) -> tuple[int | None, int | None]:
    """Window and chunk of one layer."""
    kinds = config_value(config, "layer_types")
    index = getattr(layer, "layer_idx", None)
    kind = kinds[index] if isinstance(kinds, (list, tuple)) and isinstance(index, int) and index < len(kinds) else None
    chunk = config_value(config, "attention_chunk_size")
    if kind == "chunked_attention" and isinstance(chunk, int):
        return None, chunk
    if kind == "full_attention":
        return None, None
    window = getattr(layer, "sliding_window", None) if hasattr(layer, "sliding_window") else None
    if window is None and (kind == "sliding_attention" or not hasattr(layer, "sliding_window")):
        window = config_value(config, "sliding_window")
        if kind is None and config_value(config, "use_sliding_window") is False:
            window = None
    return (window if isinstance(window, int) and window > 0 else None), None


def _size(layer: Any, config: Any, *names: str) -> int:
    for owner in (layer, config):
        for name in names:
            value = config_value(owner, name)
            if isinstance(value, int) and value > 0:
                return value
    return 0


def _of_own_making(name: str, module: nn.Module, causal: bool, gradient: bool) -> Attention | None:
    """Attention that is written out in a module with its projections: as wide as what the last of them takes in."""
    linears = {n: m for n, m in module.named_children() if _width(m)}
    if len(linears) < 2 or not attends(module) or any(attends(m) for m in module.modules() if m is not module):
        return None
    output = next((linears[n] for n in _OUTPUTS if n in linears), list(linears.values())[-1])
    window = None
    if getattr(module, "apply_sliding_window_attention", False):  # litgpt
        window = getattr(getattr(module, "config", None), "sliding_window_size", None)
    return Attention(name, 1, _width(output), _width(output), Reach(causal, window), gradient)


def _width(module: nn.Module) -> int:
    """Inputs of a linear layer, adapted ones too; 0 for anything else."""
    size = getattr(getattr(module, "base_layer", module), "in_features", 0)
    if not size and type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        size = module.weight.shape[0]  # type: ignore[index]
    return size if isinstance(size, int) else 0
