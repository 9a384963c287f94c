"""Softmax cross entropy of one chunk of logits, in place, as one Triton kernel.

One program owns one row. A first sweep over the vocabulary keeps a running maximum and sum (online softmax,
Milakov & Gimelshein, arXiv:1805.02867), a second replaces each logit by the gradient of the row's loss. The chunk is
read twice and written once, in its own dtype; everything between is fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAX_BLOCK = 32768


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

    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    summed = tl.full((), 0.0, tl.float32)
    for start in range(0, n_cols, BLOCK):
        inside = start + columns < n_cols
        z = tl.load(base + start + columns, mask=inside, other=float("-inf")).to(tl.float32) * inner
        if HAS_TANH:
            z = outer * (2 * tl.sigmoid(2 * z) - 1)
        z = tl.where(inside, z, float("-inf"))
        summed += tl.sum(tl.where(inside, z, 0.0))
        block_largest = tl.maximum(largest, tl.max(z))
        total = total * tl.exp(largest - block_largest) + tl.sum(tl.exp(z - block_largest))
        largest = block_largest
    lse = largest + tl.log(total)
    tl.store(loss_ptr + row, lse - (1 - smoothing) * picked - smoothing * summed / n_cols)

    if WANT_GRADIENT:
        scale = all_scale
        if HAS_SCALE:
            scale = tl.load(scale_ptr + row).to(tl.float32)
        # the target's own entry is written with the others: no program waits for another store
        for start in range(0, n_cols, BLOCK):
            inside = start + columns < n_cols
            z = tl.load(base + start + columns, mask=inside, other=0.0).to(tl.float32) * inner
            slope = inner
            if HAS_TANH:
                capped = 2 * tl.sigmoid(2 * z) - 1
                z = outer * capped
                slope = inner * outer * (1 - capped * capped)
            gradient = tl.exp(z - lse) - smoothing / n_cols
            gradient = tl.where(start + columns == target, gradient - (1 - smoothing), gradient)
            gradient = gradient * slope * scale
            tl.store(base + start + columns, gradient.to(logits_ptr.dtype.element_ty), mask=inside)


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
        logits: ``(N, V)`` fp32, bf16 or fp16, contiguous rows; overwritten.
        target: ``(N,)`` int64 in ``[0, V)``.
        row_scale: ``(N,)`` fp32 factors of the gradient, or one for all rows.

    Returns:
        ``(N,)`` fp32.
    """
    n, vocab = logits.shape
    losses = torch.empty(n, dtype=torch.float32, device=logits.device)
    if not n:
        return losses
    block = min(_MAX_BLOCK, triton.next_power_of_2(vocab))
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
        WANT_GRADIENT=want_gradient,
        BLOCK=block,
        num_warps=32 if block >= 8192 else 8,
    )
    return losses
