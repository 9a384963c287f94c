"""Softmax cross entropy of one chunk of logits, in place, as one Triton kernel.

One program owns one row. A first sweep over the vocabulary sums ``exp(z - c)``, each lane by itself, where ``c`` is the
largest of the row's first block; only a row in which that overflows is swept again, with its true maximum. A second
sweep replaces each logit by the gradient of the row's loss. The chunk is read twice and written once, in its own dtype;
everything between is fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Entries of a row at a time, and warps that share them.
_BLOCK, _WARPS = 8192, 16


@triton.jit
def _values(pointer, columns, n_cols, inner, outer, HAS_TANH: tl.constexpr):  # type: ignore[no-untyped-def]
    """``(z, capped)`` of one block, -inf outside of the row."""
    inside = columns < n_cols
    z = tl.load(pointer + columns, mask=inside, other=float("-inf")).to(tl.float32) * inner
    capped = z
    if HAS_TANH:
        capped = 2 * tl.sigmoid(2 * z) - 1
        z = outer * capped
    return tl.where(inside, z, float("-inf")), capped


@triton.jit
def _cross_entropy_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    row_stride,
    target_ptr,
    loss_ptr,
    scale_ptr,
    all_scale,
    n_cols,
    inner,
    outer,
    smoothing,
    HAS_TANH: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    SMOOTH: tl.constexpr,
    WANT_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row * row_stride
    target = tl.load(target_ptr + row)
    columns = tl.arange(0, BLOCK)

    picked = tl.load(base + target).to(tl.float32) * inner
    if HAS_TANH:
        picked = outer * (2 * tl.sigmoid(2 * picked) - 1)

    first, _ = _values(base, columns, n_cols, inner, outer, HAS_TANH)
    shift = tl.max(first)
    sums = tl.exp(first - shift)
    added = tl.where(columns < n_cols, first, 0.0)
    for start in range(BLOCK, n_cols, BLOCK):
        z, _ = _values(base, start + columns, n_cols, inner, outer, HAS_TANH)
        sums += tl.exp(z - shift)
        if SMOOTH:
            added += tl.where(start + columns < n_cols, z, 0.0)
    total = tl.sum(sums)
    finite = total < float("inf")
    if finite == 0:  # or NaN, where the first block is -inf throughout
        for start in range(BLOCK, n_cols, BLOCK):
            larger, _ = _values(base, start + columns, n_cols, inner, outer, HAS_TANH)
            shift = tl.maximum(shift, tl.max(larger))
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, n_cols, BLOCK):
            again, _ = _values(base, start + columns, n_cols, inner, outer, HAS_TANH)
            sums += tl.exp(again - shift)
        total = tl.sum(sums)
    lse = shift + tl.log(total)
    loss = lse - picked
    if SMOOTH:
        loss = lse - (1 - smoothing) * picked - smoothing * tl.sum(added) / n_cols
    tl.store(loss_ptr + row, loss)

    if WANT_GRADIENT:
        scale = all_scale
        if HAS_SCALE:
            scale = tl.load(scale_ptr + row).to(tl.float32)
        # the target's own entry is written with the others: no program waits for another store
        for start in range(0, n_cols, BLOCK):
            logit, capped = _values(base, start + columns, n_cols, inner, outer, HAS_TANH)
            gradient = tl.exp(logit - lse)
            if SMOOTH:
                gradient -= smoothing / n_cols
            gradient = tl.where(start + columns == target, gradient - (1 - smoothing), gradient)
            slope = inner
            if HAS_TANH:
                slope = inner * outer * (1 - capped * capped)
            gradient = gradient * slope * scale
            tl.store(base + start + columns, gradient.to(logits_ptr.dtype.element_ty), mask=start + columns < n_cols)


def cross_entropy_in_place(
    logits: Tensor,
    target: Tensor,
    *,
    inner: float = 1.0,
    outer: float | None = None,
    smoothing: float = 0.0,
    row_scale: Tensor | float = 1.0,
    want_gradient: bool = True,
) -> Tensor:
    """Loss of each row; ``logits`` becomes ``row_scale * d loss / d logits`` when that is wanted.

    With ``z = inner * logits``, or ``outer * tanh(inner * logits)`` when ``outer`` is given, the loss of a row is
    ``logsumexp(z) - (1 - smoothing) z[target] - smoothing mean(z)``.

    Args:
        logits: ``(N, V)`` fp32, bf16 or fp16, contiguous along rows; overwritten.
        target: ``(N,)`` int64 in ``[0, V)``.
        row_scale: ``(N,)`` fp32 factors of the gradient, or one for all rows.

    Returns:
        ``(N,)`` fp32.
    """
    n, vocab = logits.shape
    losses = torch.empty(n, dtype=torch.float32, device=logits.device)
    if not n:
        return losses
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    arguments: list[Any] = [
        logits,
        logits.stride(0),
        target,
        losses,
        row_scale if isinstance(row_scale, Tensor) else losses,
        1.0 if isinstance(row_scale, Tensor) else float(row_scale),
        vocab,
        float(inner),
        float(outer or 1.0),
        float(smoothing),
    ]
    _cross_entropy_kernel[(n,)](
        *arguments,
        HAS_TANH=outer is not None,
        HAS_SCALE=isinstance(row_scale, Tensor),
        SMOOTH=smoothing != 0,
        WANT_GRADIENT=want_gradient,
        BLOCK=block,
        num_warps=max(4, _WARPS * block // _BLOCK),
    )
    return losses


@triton.jit
def _scale_kernel(values_ptr, factor_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(values_ptr + at, mask=at < count, other=0.0).to(tl.float32)
        tl.store(values_ptr + at, (values * factor).to(values_ptr.dtype.element_ty), mask=at < count)


def scale_in_place(values: Tensor, factor: Tensor) -> None:
    """``values *= factor`` in fp32, for a contiguous tensor and a number on its device; a factor of 1 touches nothing."""
    if values.numel():
        block = 8192
        _scale_kernel[(triton.cdiv(values.numel(), block),)](values, factor, values.numel(), BLOCK=block, num_warps=8)
        torch.autograd.graph.increment_version(values)
