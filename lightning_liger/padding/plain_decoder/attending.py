"""Attention inside each document, in place of ``scaled_dot_product_attention`` over padded rows."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from lightning_liger.padding.attention import PackedCall, attention_forward
from lightning_liger.padding.layout import Layout
from lightning_liger.padding.plain_decoder.dispatch import handles
from lightning_liger.padding.plain_decoder.ragged import Packing, RaggedTensor, Unpackable, note_place, rows_of, wrap

# Scores below this are zero after a softmax, whatever the others are.
_MASKED = -1e4

# Masks that were compared with the causal one, by the identity of the tensor they are a view of.
_CAUSAL: dict[Any, tuple[weakref.ref[Tensor], bool]] = {}


class ScaledDotProductAttention(nn.Module):
    """What errors call a decoder's attention."""

    is_causal = True


_ATTENTION = ScaledDotProductAttention()


@handles(F.scaled_dot_product_attention)
def _attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return attend(*args, **kwargs)


def attend(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention of ragged ``(B, heads, S, D)`` or ``(B, S, D)`` tensors.

    Raises:
        Unpackable: it would look at padded positions, or beyond a document.
    """
    note_place("attention")
    given = (query, key, value)
    if not all(isinstance(t, RaggedTensor) for t in given):
        raise Unpackable("attention to keys or queries that do not belong to the batch's tokens (a cache, a prefix)")
    packing = query.packing
    for t in given:
        if t.batch != 0 or t.seq != t.dim() - 2 or t.dim() not in (3, 4) or t.dim() != query.dim():
            raise Unpackable("attention over another dimension than the sequence")
        if t.packing.layout is not packing.layout:
            raise Unpackable("attention between two batches")
    if isinstance(attn_mask, RaggedTensor):
        raise Unpackable("attention with a mask or bias made from the tokens")
    q, k, v = (rows_of(t) if t.dim() == 4 else rows_of(t)[:, None] for t in given)
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise Unpackable("attention whose heads are broadcast")
    if attn_mask is not None:
        mask = _four_dims(attn_mask, query.dim())
        if not mask_is_causal(mask, packing):
            return _like(query, _masked(q, k, v, mask, packing.layout, dropout_p, scale, enable_gqa))
    elif not is_causal:
        raise Unpackable("attention looks ahead (is_causal=False without a mask)")
    elif not starts_at_zero(packing):
        raise Unpackable("padding on the left, or several documents in a row, that attention does not mask")
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    options: dict[str, Any] = {"is_causal": True, "scaling": scale, "dropout": dropout_p}
    call = PackedCall(packing.layout, "sdpa", packing.backend, packing.report)
    return _like(query, attention_forward(_ATTENTION, q, k, v, None, call, **options)[0][0])


def _like(query: RaggedTensor, out: Tensor) -> Tensor:
    return wrap(out if query.dim() == 4 else out[:, 0], query.packing, query.batch, query.seq)


def _four_dims(mask: Tensor, dims: int) -> Tensor:
    """``(1 or B, 1 or heads, S, S)``."""
    if mask.dim() > dims:
        raise Unpackable("attention with a mask of more dimensions than the queries have")
    return mask[:, None] if dims == mask.dim() == 3 else mask[(None,) * (4 - mask.dim())]


def starts_at_zero(packing: Packing) -> bool:
    """Whether each row holds one document, which begins in its first column."""
    if "starts" not in packing.masks:
        layout = packing.layout
        columns = layout.gather % layout.shape[1]
        packing.masks["starts"] = not layout.documents_share_rows and torch.equal(columns, layout.restart)
    return bool(packing.masks["starts"])


def mask_is_causal(mask: Tensor, packing: Packing) -> bool:
    """Whether, under a mask of four dimensions, the real tokens attend to the real tokens before them in their document, and to nothing else."""
    if mask.requires_grad or tuple(mask.shape[-2:]) != (packing.layout.shape[1],) * 2:
        return False
    shared = mask.shape[:-2].numel() == 1
    base = mask if mask._base is None else mask._base
    key = (id(base), tuple(mask.shape), mask.stride(), mask.storage_offset(), mask._version)
    if not shared:
        if key not in packing.masks:
            # the mask itself is kept, so that no other gets its identity
            packing.masks[key] = (mask, _is_causal_per_row(mask, packing.layout))
        return bool(packing.masks[key][1])
    if not starts_at_zero(packing):
        return False
    found = _CAUSAL.get(key)
    if found is None or found[0]() is not base:
        length = mask.shape[-1]
        causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
        found = _CAUSAL[key] = (weakref.ref(base), _allows(mask.reshape(length, length), causal))
        weakref.finalize(base, _CAUSAL.pop, key, None)
    return found[1]


def _is_causal_per_row(mask: Tensor, layout: Layout) -> bool:
    if mask.shape[0] != layout.shape[0] or mask.shape[1] != 1:
        return False
    number, real = document_numbers(layout, mask.device)
    length = mask.shape[-1]
    causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    wanted = causal & (number[:, :, None] == number[:, None, :]) & real[:, None, :]
    return _allows(mask[:, 0][real], wanted[real])


def document_numbers(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    """``(B, S)``: the number of each position's document, and whether it is real."""
    placed = layout.on(device)
    index = placed.index
    number = torch.searchsorted(placed.cu_seqlens.to(torch.int64), index.clamp_min(0), right=True)
    return number, index >= 0


def _allows(mask: Tensor, wanted: Tensor) -> bool:
    """Whether a bool or additive mask lets through what is wanted and nothing else."""
    if mask.dtype == torch.bool:
        return torch.equal(mask, wanted)
    return bool((torch.where(wanted, mask == 0, mask <= _MASKED)).all())


def _masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, layout: Layout, dropout: float, scale: float | None, gqa: bool
) -> Tensor:
    """Attention under any mask or bias that keeps every real token inside its own document (windows, ALiBi)."""
    rows, length = layout.shape
    heads = q.shape[1]
    if tuple(mask.shape[-2:]) != (length, length) or mask.shape[0] not in (1, rows) or mask.shape[1] not in (1, heads):
        raise Unpackable(f"attention with a mask of shape {tuple(mask.shape)}")
    full = mask.expand(rows, -1, -1, -1)
    out, start = [], 0
    outside = []
    for count in layout.lengths:
        row, first = divmod(int(layout.gather[start]), length)
        columns = slice(first, first + count)
        seen = full[row, :, columns]
        beyond = torch.cat((seen[..., :first], seen[..., first + count :]), -1)
        outside.append(beyond.any() if mask.dtype == torch.bool else (beyond > _MASKED).any())
        a, b, c = (t[start : start + count].transpose(0, 1)[None] for t in (q, k, v))
        part = F.scaled_dot_product_attention(
            a, b, c, attn_mask=seen[..., columns][None], dropout_p=dropout, scale=scale, enable_gqa=gqa
        )
        out.append(part[0].transpose(0, 1))
        start += count
    if bool(torch.stack(outside).any()):
        raise Unpackable("attention looks at padding, or beyond a document (its mask lets it)")
    return torch.cat(out)
