"""Adam's step for all parameters in one launch, and the sum of squares of all gradients in another.

Programs share out a list of chunks; a table holds the addresses of each tensor's data. Weights, gradients and state are
read once and written once. The idea is that of Apex's ``multi_tensor_apply`` and of PyTorch's ``_fused_adamw_``; here
gradients are clipped and state is rounded on the way, and addresses travel in one copy instead of in the launches' arguments.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Entries of a chunk, which one program updates; entries at a time; warps that share them.
CHUNK, BLOCK, WARPS = 16384, 1024, 4
# Numbers for each tensor: addresses of weights and both moments, entries, key of the noise.
ENTRY = 5
# Numbers for each tensor that change with every step: address of the gradient, row of hyperparameters.
TURN = 2
# Hyperparameters in a row.
ROW = 12
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@triton.jit
def _mixed(x):  # type: ignore[no-untyped-def]
    """:func:`lightning_liger.optim.rounding.hashed`."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _state(pointer, inside, BF16: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 of what is stored as fp32, or as the upper half of it."""
    stored = tl.load(pointer, mask=inside)
    return (stored.to(tl.uint32) << 16).to(tl.float32, bitcast=True) if BF16 else stored


@triton.jit
def _keep(pointer, value, random, inside, BF16: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store fp32, or its upper half after 16 random bits were added to the lower one."""
    if BF16:
        up = (value.to(tl.uint32, bitcast=True) + random) >> 16
        tl.store(pointer, tl.where(value == value, up, 0x7FC0).to(tl.uint16), mask=inside)
    else:
        tl.store(pointer, value, mask=inside)


@triton.jit
def _adam_at(  # type: ignore[no-untyped-def]
    at, inside, p_ptr, g_ptr, m_ptr, v_ptr, key, factor, sign, kept, coupled, beta2, rest1, rest2, eps, rate, inverse2,
    CLIP: tl.constexpr, WRITE_GRADIENT: tl.constexpr, BF16_STATE: tl.constexpr,
):  # fmt: skip
    p = tl.load(p_ptr + at, mask=inside).to(tl.float32)
    g = tl.load(g_ptr + at, mask=inside).to(tl.float32)
    m = _state(m_ptr + at, inside, BF16_STATE)
    v = _state(v_ptr + at, inside, BF16_STATE)
    if CLIP:
        g = g * factor
        if WRITE_GRADIENT:
            tl.store(g_ptr + at, g.to(g_ptr.dtype.element_ty), mask=inside)
    g = g * sign + coupled * p
    m += (g - m) * rest1
    v = v * beta2 + g * g * rest2
    p = p * kept - rate * (m / (tl.sqrt(v) * inverse2 + eps))
    tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty), mask=inside)
    random = key
    if BF16_STATE:
        random = _mixed(at.to(tl.uint32) + key)
    _keep(m_ptr + at, m, random & 0xFFFF, inside, BF16_STATE)
    _keep(v_ptr + at, v, random >> 16, inside, BF16_STATE)


@triton.jit
def _adam_kernel(  # type: ignore[no-untyped-def]
    tensors,
    turns,
    rows,
    chunks,
    factor_ptr,
    P: tl.constexpr,
    S: tl.constexpr,
    BF16_STATE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CLIP: tl.constexpr,
    WRITE_GRADIENT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTRY: tl.constexpr,
    TURN: tl.constexpr,
    ROW: tl.constexpr,
):
    program = tl.program_id(0)
    tensor = tl.load(chunks + 2 * program).to(tl.int64)
    first = tl.load(chunks + 2 * program + 1).to(tl.int64) * CHUNK
    entry = tensors + tensor * ENTRY
    turn = turns + tensor * TURN
    g_address = tl.load(turn)
    row = rows + tl.load(turn + 1) * ROW
    p_ptr = tl.load(entry).to(tl.pointer_type(P))
    g_ptr = g_address.to(tl.pointer_type(P))
    m_ptr = tl.load(entry + 1).to(tl.pointer_type(S))
    v_ptr = tl.load(entry + 2).to(tl.pointer_type(S))
    if ALIGNED:
        p_ptr = tl.multiple_of(p_ptr, 16)
        g_ptr = tl.multiple_of(g_ptr, 16)
        m_ptr = tl.multiple_of(m_ptr, 16)
        v_ptr = tl.multiple_of(v_ptr, 16)
    # a tensor without a gradient keeps everything as it is
    left = tl.where(g_address == 0, 0, tl.minimum(tl.load(entry + 3) - first, CHUNK)).to(tl.int32)
    key = tl.load(entry + 4).to(tl.uint32)
    lr = tl.load(row)
    kept = 1 - lr * tl.load(row + 1)
    coupled = tl.load(row + 2)
    beta2 = tl.load(row + 3)
    rest1 = tl.load(row + 4)
    rest2 = tl.load(row + 5)
    eps = tl.load(row + 6)
    rate = lr * tl.load(row + 7)
    inverse2 = tl.load(row + 8)
    sign = tl.load(row + 9)
    factor = 1.0
    if CLIP:
        factor = tl.load(factor_ptr)
    if BF16_STATE:
        step = tl.load(row + 10).to(tl.uint32)
        key = _mixed(key + step * 0x9E3779B9) + first.to(tl.uint32)
    p_ptr += first
    g_ptr += first
    m_ptr += first
    v_ptr += first
    lanes = tl.arange(0, BLOCK)
    full = left // BLOCK * BLOCK
    for start in range(0, full, BLOCK):
        at = start + lanes
        _adam_at(
            at, None, p_ptr, g_ptr, m_ptr, v_ptr, key, factor, sign, kept, coupled, beta2, rest1, rest2, eps, rate,
            inverse2, CLIP, WRITE_GRADIENT, BF16_STATE,
        )  # fmt: skip
    if full < left:
        at = full + lanes
        _adam_at(
            at, at < left, p_ptr, g_ptr, m_ptr, v_ptr, key, factor, sign, kept, coupled, beta2, rest1, rest2, eps, rate,
            inverse2, CLIP, WRITE_GRADIENT, BF16_STATE,
        )  # fmt: skip


@triton.jit
def _squares_kernel(  # type: ignore[no-untyped-def]
    tensors,
    turns,
    chunks,
    sums,
    P: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTRY: tl.constexpr,
    TURN: tl.constexpr,
):
    program = tl.program_id(0)
    tensor = tl.load(chunks + 2 * program).to(tl.int64)
    first = tl.load(chunks + 2 * program + 1).to(tl.int64) * CHUNK
    address = tl.load(turns + tensor * TURN)
    g_ptr = address.to(tl.pointer_type(P))
    if ALIGNED:
        g_ptr = tl.multiple_of(g_ptr, 16)
    left = tl.where(address == 0, 0, tl.minimum(tl.load(tensors + tensor * ENTRY + 3) - first, CHUNK)).to(tl.int32)
    g_ptr += first
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    full = left // BLOCK * BLOCK
    for start in range(0, full, BLOCK):
        g = tl.load(g_ptr + start + lanes).to(tl.float32)
        total += g * g
    if full < left:
        g = tl.load(g_ptr + full + lanes, mask=full + lanes < left, other=0.0).to(tl.float32)
        total += g * g
    tl.store(sums + program, tl.sum(total))


def adam(
    tensors: Tensor,
    turns: Tensor,
    rows: Tensor,
    chunks: Tensor,
    dtype: torch.dtype,
    *,
    bf16_state: bool,
    aligned: bool,
    factor: Tensor | None = None,
    write_gradient: bool = False,
) -> None:
    """Update what ``chunks`` lists.

    Args:
        tensors: ``(N, ENTRY)`` int64. turns: ``(N, TURN)`` int64. rows: ``(R, ROW)`` fp32.
        chunks: ``(C, 2)`` int32: a tensor's number, and which of its chunks.
        dtype: of weights and gradients. bf16_state: both moments are bf16; otherwise fp32.
        aligned: addresses are multiples of 16.
        factor: fp32, ``()``: gradients are multiplied by it; and left multiplied, with ``write_gradient``.
    """
    if not chunks.shape[0]:
        return
    kernel: Any = _adam_kernel[(chunks.shape[0],)]
    kernel(
        tensors, turns, rows, chunks, rows if factor is None else factor, _DTYPES[dtype],
        tl.uint16 if bf16_state else tl.float32, bf16_state, aligned,
        factor is not None, write_gradient, CHUNK, BLOCK, ENTRY, TURN, ROW, num_warps=WARPS,
    )  # fmt: skip


def squares(tensors: Tensor, turns: Tensor, chunks: Tensor, sums: Tensor, dtype: torch.dtype, *, aligned: bool) -> None:
    """The sum of squares of each chunk of gradients into ``sums``: ``(C,)`` fp32."""
    if chunks.shape[0]:
        kernel: Any = _squares_kernel[(chunks.shape[0],)]
        kernel(tensors, turns, chunks, sums, _DTYPES[dtype], aligned, CHUNK, BLOCK, ENTRY, TURN, num_warps=WARPS)
