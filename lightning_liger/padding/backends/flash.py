"""FlashAttention on packed documents: the packages 4, 3 and 2, and the copy of 2 inside of torch.

All take ``(T, heads, size)`` tensors, int32 ``cu_seqlens`` and the longest document as a Python int. No document is
empty, which a :class:`Layout` guarantees: an empty one can hang a backward kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_liger.padding.backends.features import Features
from lightning_liger.padding.layout import Layout


def _by_token(*tensors: Tensor) -> list[Tensor]:
    """``(1, heads, T, size)`` to ``(T, heads, size)``."""
    return [t[0].transpose(0, 1).contiguous() for t in tensors]


def _first(output: Any) -> Tensor:
    """The output, without the log-sum-exp that some releases return beside it."""
    return output[0] if isinstance(output, tuple) else output


def torch_varlen(q: Tensor, k: Tensor, v: Tensor, layout: Layout, features: Features, sinks: Tensor | None) -> Tensor:
    """``torch.nn.attention.varlen.varlen_attn``."""
    from torch.nn.attention.varlen import varlen_attn

    cu, longest = layout.on(q.device).cu_seqlens, layout.longest
    q, k, v = _by_token(q, k, v)
    extra: dict[str, Any] = {}
    if features.heads != features.kv_heads and _takes_enable_gqa():
        extra["enable_gqa"] = True
    window = features.window_sides
    return _first(varlen_attn(q, k, v, cu, cu, longest, longest, scale=features.scale, window_size=window, **extra))


# Not functools.cache, which Dynamo looks through: a signature cannot be read in code that is being traced.
_TAKES_GQA: list[bool] = []


def _takes_enable_gqa() -> bool:
    if not _TAKES_GQA:
        from torch.nn.attention.varlen import varlen_attn

        _TAKES_GQA.append("enable_gqa" in inspect.signature(varlen_attn).parameters)
    return _TAKES_GQA[0]


def flash_2(q: Tensor, k: Tensor, v: Tensor, layout: Layout, features: Features, sinks: Tensor | None) -> Tensor:
    """``flash_attn.flash_attn_varlen_func`` (package flash-attn)."""
    from flash_attn import flash_attn_varlen_func

    return _launched(flash_attn_varlen_func, q, k, v, layout, features, dropout_p=features.dropout)


def flash_3(q: Tensor, k: Tensor, v: Tensor, layout: Layout, features: Features, sinks: Tensor | None) -> Tensor:
    """``flash_attn_interface.flash_attn_varlen_func`` (FlashAttention 3)."""
    from flash_attn_interface import flash_attn_varlen_func

    return _launched(flash_attn_varlen_func, q, k, v, layout, features)


def _launched(
    function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, layout: Layout, features: Features, **extra: Any
) -> Tensor:
    """By a function with the arguments of packages 2 and 3."""
    cu, longest = layout.on(q.device).cu_seqlens, layout.longest
    q, k, v = _by_token(q, k, v)
    out = function(
        q, k, v, cu, cu, longest, longest,
        softmax_scale=features.scale,
        causal=features.causal,
        window_size=features.window_sides,
        softcap=features.softcap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **extra,
    )  # fmt: skip
    return _first(out)


def flash_4(q: Tensor, k: Tensor, v: Tensor, layout: Layout, features: Features, sinks: Tensor | None) -> Tensor:
    """``flash_attn.cute.flash_attn_varlen_func`` (package flash-attn-4)."""
    from flash_attn.cute import flash_attn_varlen_func

    cu, longest = layout.on(q.device).cu_seqlens, layout.longest
    q, k, v = _by_token(q, k, v)
    left, right = (None if side < 0 else side for side in features.window_sides)
    out = flash_attn_varlen_func(
        q, k, v,
        cu_seqlens_q=cu,
        cu_seqlens_k=cu,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=features.scale,
        causal=features.causal,
        window_size=(None, None) if left is None else (left, right),
        softcap=features.softcap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **({} if sinks is None else {"learnable_sink": sinks}),
    )  # fmt: skip
    return _first(out)
