"""Attention once per document, by the model's own attention function or by PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_liger.padding.backends.features import Features
from lightning_liger.padding.layout import Layout


def in_reach(length: int, causal: bool, window: int | None, device: torch.device) -> Tensor:
    """``(L, L)`` bool: which keys of a document the queries attend to."""
    i = torch.arange(length, device=device)
    distance = i[:, None] - i[None, :]
    allowed = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        # as flash attention counts it: a window of w reaches w - 1 tokens, on either side where it is not causal
        allowed &= distance.abs() < window
    return allowed


def document_mask(features: Features, length: int, like: Tensor, additive: bool) -> Tensor | None:
    """``(1, 1, L, L)`` mask for one document, or None where ``is_causal`` says it all."""
    window = features.window if features.window is not None and features.window < length else None
    if not additive and window is None:
        return None
    allowed = in_reach(length, features.causal, window, like.device)
    if not additive:
        return allowed[None, None]
    zero = torch.zeros((), dtype=like.dtype, device=like.device)
    return torch.where(allowed, zero, torch.finfo(like.dtype).min)[None, None]


def _split(layout: Layout, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(t.split(list(layout.documents), dim=2) for t in tensors), strict=True)


def by_torch(query: Tensor, key: Tensor, value: Tensor, layout: Layout, features: Features) -> Tensor:
    """``F.scaled_dot_product_attention`` for each document; ``(T, heads, size)``."""
    parts = []
    for q, k, v in _split(layout, query, key, value):
        mask = document_mask(features, q.shape[2], q, additive=False)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=features.dropout,
            is_causal=features.causal and mask is None and q.shape[2] > 1,
            scale=features.scale,
            enable_gqa=features.heads != features.kv_heads,
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def by_model(
    function: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    features: Features,
    additive: bool,
) -> Tensor:
    """``function`` for each document; it takes query, key, value and mask and returns ``(1, L, heads, size)``."""
    parts = []
    for q, k, v in _split(layout, query, key, value):
        parts.append(function(q, k, v, document_mask(features, q.shape[2], q, additive))[0])
    return torch.cat(parts)


def plain(features: Features) -> bool:
    """Whether ``F.scaled_dot_product_attention`` says all of it."""
    return features.softcap is None and not features.sinks and not features.other
