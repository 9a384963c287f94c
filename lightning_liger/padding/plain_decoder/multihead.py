"""``nn.MultiheadAttention``, and what is built of it: ``nn.TransformerEncoder`` under a causal mask."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_liger.mirrored import cpu_values
from lightning_liger.padding.plain_decoder.attending import attend, mask_is_causal, starts_at_zero
from lightning_liger.padding.plain_decoder.dispatch import handles
from lightning_liger.padding.plain_decoder.ragged import Packing, RaggedTensor, Unpackable, rows_of, wrap

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


class UnreadTensor(Tensor):
    """Attention weights that are returned whether anybody wants them or not; reading them is :class:`Unpackable`."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], like: Tensor) -> UnreadTensor:
        made: UnreadTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        return made

    # __new__ took everything; Tensor.__init__ takes no arguments
    def __init__(self, shape: tuple[int, ...], like: Tensor) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise Unpackable("attention weights are read")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise Unpackable("attention weights are read")


@handles(F.multi_head_attention_forward)
def _multi_head(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = _SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    named = given.arguments
    query = named["query"]
    if not isinstance(query, RaggedTensor) or named["key"] is not query or named["value"] is not query:
        raise Unpackable("multi-head attention between different tensors")
    if named["bias_k"] is not None or named["add_zero_attn"] or named["static_k"] is not None:
        raise Unpackable("multi-head attention to a key that belongs to no token")
    if (query.seq, query.batch, query.dim()) != (0, 1, 3):
        raise Unpackable("multi-head attention over another dimension than the sequence")
    packing, heads = query.packing, named["num_heads"]
    mask = _mask(named, packing)
    rows = rows_of(query)
    if named["use_separate_proj_weight"]:
        weights = [named[f"{n}_proj_weight"] for n in "qkv"]
        biases = [None] * 3 if named["in_proj_bias"] is None else named["in_proj_bias"].chunk(3)
        parts = [F.linear(rows, w, b) for w, b in zip(weights, biases, strict=True)]
    else:
        parts = list(F.linear(rows, named["in_proj_weight"], named["in_proj_bias"]).chunk(3, -1))
    q, k, v = (wrap(p.unflatten(-1, (heads, -1)), packing, 0, 2) for p in parts)
    dropout = named["dropout_p"] if named["training"] else 0.0
    out = attend(q, k, v, mask, dropout, is_causal=mask is None)
    assert isinstance(out, RaggedTensor)
    projected = F.linear(rows_of(out).flatten(1), named["out_proj_weight"], named["out_proj_bias"])
    batch, length = packing.layout.shape
    shape = (batch, length, length) if named["average_attn_weights"] else (batch, heads, length, length)
    weights_asked = UnreadTensor(shape, projected) if named["need_weights"] else None
    return wrap(projected, packing, query.batch, query.seq), weights_asked


def _mask(named: dict[str, Any], packing: Packing) -> Tensor | None:
    """As ``scaled_dot_product_attention`` takes it; None where every document is simply causal."""
    mask, padding = named["attn_mask"], named["key_padding_mask"]
    if named["is_causal"] and padding is None and not named["need_weights"]:
        return None  # PyTorch itself does not look at the mask then
    if mask is None:
        raise Unpackable("attention looks ahead (no attn_mask)")
    rows, length = packing.layout.shape
    wide = mask.reshape(rows, -1, length, length) if mask.dim() == 3 else mask[None, None]
    if mask.dtype == torch.bool:
        # compared once, and kept, so that the next layer finds it
        key = ("inverted", id(mask), mask._version)
        if key not in packing.masks:
            packing.masks[key] = (mask, ~wide)
        wide = packing.masks[key][1]
    if padding is None:
        return wide
    if mask_is_causal(wide, packing) and _leaves_tokens(padding, packing):
        return None
    hidden = padding[:, None, None, :]
    if padding.dtype == torch.bool:
        hidden = torch.zeros(hidden.shape, device=hidden.device).masked_fill(hidden, float("-inf"))
    if wide.dtype == torch.bool:
        wide = torch.zeros(wide.shape, device=wide.device).masked_fill(~wide, float("-inf"))
    return (wide + hidden).to(named["query"].dtype)


def _leaves_tokens(padding: Tensor, packing: Packing) -> bool:
    """Whether a key padding mask hides no real token, so that nothing but causality matters to documents at zero."""
    key = ("padding", id(padding), padding._version)
    if key not in packing.masks:
        known = cpu_values(padding)
        hidden = padding if known is None else known
        hidden = hidden if hidden.dtype == torch.bool else hidden != 0
        real = packing.layout.on(hidden.device).index >= 0
        packing.masks[key] = (padding, starts_at_zero(packing) and not bool((hidden & real).any()))
    return bool(packing.masks[key][1])
