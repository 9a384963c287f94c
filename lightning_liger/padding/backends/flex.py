"""Compiled FlexAttention on packed documents.

Every token knows the first and the last token it may attend to; that pair of numbers says causal, window and document
at once, so one compiled kernel serves all layers. The batch is lengthened to one of a few sizes by a dummy document.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_liger.padding.backends.features import Features
from lightning_liger.padding.layout import Layout

BLOCK = 128
_NUMBERS = itertools.count()


def bucket(tokens: int) -> int:
    """``tokens`` rounded up to one of eight sizes between a power of two and the next, all multiples of 128."""
    step = max(BLOCK, 1 << max(0, (tokens - 1).bit_length() - 4))
    return -(-tokens // step) * step


def reach(lengths: tuple[int, ...], size: int, causal: bool, window: int | None) -> tuple[Tensor, Tensor]:
    """First and last token that each of ``size`` tokens attends to, ``(size,)`` int32, CPU.

    Tokens behind the documents are one more document.
    """
    rest = size - sum(lengths)
    counts = torch.tensor((*lengths, rest) if rest else lengths)
    ends = counts.cumsum(0)
    token = torch.arange(size)
    first = torch.repeat_interleave(ends - counts, counts)
    last = token if causal else torch.repeat_interleave(ends - 1, counts)
    if window is not None:
        first = torch.maximum(first, token - (window - 1))
        last = torch.minimum(last, token + (window - 1))
    return first.to(torch.int32), last.to(torch.int32)


def _blocks(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Key blocks that each query block sees in part and in full: counts ``(n,)`` and indices ``(n, n)``, int32.

    Both ends of a token's reach grow from token to token, and its reach holds the token itself: the blocks that a
    query block sees are one run, and those that it sees in full are a run inside of it.
    """
    firsts, lasts = first.view(-1, BLOCK), last.view(-1, BLOCK)
    begin, end = firsts[:, 0] // BLOCK, lasts[:, -1] // BLOCK + 1
    full_begin, full_end = -(-firsts[:, -1] // BLOCK), (lasts[:, 0] + 1) // BLOCK
    none = full_end <= full_begin
    full_begin, full_end = torch.where(none, end, full_begin), torch.where(none, end, full_end)
    before = (full_begin - begin)[:, None]
    column = torch.arange(len(begin))[None]
    partial = torch.where(column < before, begin[:, None] + column, full_end[:, None] + column - before)
    counts = (before[:, 0] + end - full_end, full_end - full_begin)
    indices = (i.clamp(max=len(begin) - 1) for i in (partial, full_begin[:, None] + column))
    partial_count, full_count, partial_index, full_index = (t.to(torch.int32) for t in (*counts, *indices))
    return partial_count, partial_index.contiguous(), full_count, full_index.contiguous()


def block_mask(layout: Layout, size: int, features: Features, device: torch.device) -> Any:
    """The mask of a layout; made once per layout and kind of layer, without a dense mask and without waiting."""
    from torch.nn.attention.flex_attention import BlockMask

    key = ("block_mask", size, features.causal, features.window, device)
    if key not in layout.derived:
        first, last = reach(layout.documents, size, features.causal, features.window)
        made = (first, last, *(t[None, None] for t in _blocks(first, last)))
        if device.type == "cuda":
            made = tuple(t.pin_memory() for t in made)
        first, last, count, index, full_count, full_index = (t.to(device, non_blocking=True) for t in made)
        layout.derived[key] = BlockMask.from_kv_blocks(
            count, index, full_count, full_index, BLOCK, _in_reach(first, last), seq_lengths=(size, size)
        )
    return layout.derived[key]


def _in_reach(first: Tensor, last: Tensor) -> Callable[..., Tensor]:
    def in_reach(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first[query]) & (key <= last[query])

    return in_reach


@functools.cache
def _capped(softcap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


def _attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, k, v, **options)


@functools.cache
def _runner(device: str, features: Features) -> Callable[..., Any]:
    """Compiled on CUDA, for one kind of layer: once for the first size, and once more for all others.

    Each kind has code and name of its own. The compiler counts by code, and after eight kinds would run the ninth
    without compiling it; and what differs between two calls of one name it takes for something that keeps changing.
    """
    if device != "cuda":
        return _attention
    name = f"flex_attention_{next(_NUMBERS)}"
    own = types.FunctionType(_attention.__code__.replace(co_name=name), globals(), name)
    return torch.compile(own)


def flex(q: Tensor, k: Tensor, v: Tensor, layout: Layout, features: Features, sinks: Tensor | None) -> Tensor:
    """``torch.nn.attention.flex_attention``, compiled on CUDA. Sinks rescale the output by what its sums leave out."""
    from torch.nn.attention.flex_attention import AuxRequest

    tokens, size = layout.size, bucket(layout.size)
    q, k, v = (F.pad(t, (0, 0, 0, size - tokens)) for t in (q, k, v))
    # masks tell windows and directions apart, and numbers that are not compiled in do not need code of their own
    kind = replace(features, causal=True, window=None, dropout=0.0)
    out = _runner(q.device.type, kind)(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        score_mod=None if features.softcap is None else _capped(features.softcap),
        block_mask=block_mask(layout, size, features, q.device),
        scale=features.scale,
        enable_gqa=features.heads != features.kv_heads,
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is not None:
        out, aux = out
        # softmax over scores and sink = softmax over scores * exp(lse) / (exp(lse) + exp(sink))
        share = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype).view(1, -1, 1))
        out = (out * share[..., None]).to(v.dtype)
    return out[0, :, :tokens].transpose(0, 1)
