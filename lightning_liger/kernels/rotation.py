"""Rotation of queries and keys over Liger's two kernels, on copies: the arguments stay as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_liger.kernels.functions import once

PAIRS = ("halves", "neighbours", "gathered")


class _Halves(torch.autograd.Function):
    """Turns ``(i, i + R/2)``; with ``gather``, ``(2 i, 2 i + 1)`` is first moved there, and stays."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, gather: bool, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        from liger_kernel.ops.rope import rope_forward

        ctx.dtypes, ctx.rotary_dim, ctx.gather = (q.dtype, k.dtype), rotary_dim, gather
        cos, sin = cos.to(dtype), sin.to(dtype)
        q, k = (_rows(x, dtype, gather) for x in (q, k))
        q, k, cos, sin = rope_forward(q, k, cos, sin, rotary_dim=rotary_dim)
        ctx.save_for_backward(cos, sin)
        return q, k

    @staticmethod
    @once
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        from liger_kernel.ops.rope import rope_backward

        cos, sin = ctx.saved_tensors
        dq, dk = rope_backward(_rows(dq, cos.dtype), _rows(dk, cos.dtype), cos, sin, rotary_dim=ctx.rotary_dim)
        if ctx.gather:
            dq, dk = (x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) for x in (dq, dk))
        return dq.to(ctx.dtypes[0]), dk.to(ctx.dtypes[1]), None, None, None, None, None


class _Neighbours(torch.autograd.Function):
    """Turns ``(2 i, 2 i + 1)``, in fp32."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.stack((cos.float(), sin.float()), -1)
        ctx.save_for_backward(angles)
        ctx.dtypes = (q.dtype, k.dtype)
        return _turn_neighbours(q, k, angles, 1.0)

    @staticmethod
    @once
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        (angles,) = ctx.saved_tensors
        dq, dk = _turn_neighbours(dq, dk, angles, -1.0)
        return dq.to(ctx.dtypes[0]), dk.to(ctx.dtypes[1]), None, None


def _turn_neighbours(q: Tensor, k: Tensor, angles: Tensor, sign: float) -> tuple[Tensor, Tensor]:
    from liger_kernel.ops.llama4_rope import llama4_rope_forward

    batch, _, length, _ = q.shape
    # the kernel has one row of angles for all sequences: let it see one sequence of all positions
    q, k = (_rows(x, torch.float32).transpose(1, 2).reshape(1, batch * length, *x.shape[1::2]) for x in (q, k))
    angles = angles.expand(batch, *angles.shape[1:]).reshape(batch * length, *angles.shape[2:]).contiguous()
    q, k = llama4_rope_forward(q, k, angles, imag_sign=sign)
    return tuple(x.view(batch, length, *x.shape[2:]).transpose(1, 2) for x in (q, k))  # type: ignore[return-value]


def _rows(x: Tensor, dtype: torch.dtype, gather: bool = False) -> Tensor:
    """A copy of ``(B, heads, S, D)`` whose memory is ``(B, S, heads, D)``: what the kernels rotate in place.

    With ``gather`` its last dimension is ``0, 2, 4, …, 1, 3, 5, …``.
    """
    x = x.transpose(1, 2)
    copy = torch.empty(x.shape, dtype=dtype, device=x.device)
    if gather:
        copy.unflatten(-1, (2, -1)).copy_(x.unflatten(-1, (-1, 2)).transpose(-1, -2))
    else:
        copy.copy_(x)
    return copy.transpose(1, 2)


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, pairs: str = "halves", wide: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate the first ``rotary_dim`` entries of each head; ``q`` and ``k`` stay as they are.

    Args:
        q: ``(B, heads, S, D)``; ``k``: ``(B, kv_heads, S, D)``.
        cos, sin: ``(1 or B, S, R)`` with ``R >= rotary_dim / 2``, one angle per pair; what is beyond is not read. They
            get no gradient.
        pairs: which entries make a pair: ``"halves"``: ``(i, i + rotary_dim / 2)``; ``"neighbours"``: ``(2 i, 2 i + 1)``;
            ``"gathered"``: the same, with the result at ``(i, i + rotary_dim / 2)`` (DeepSeek V3; whole heads only).
        wide: compute in fp32 whatever the dtypes are; neighbours always are.

    Returns:
        Both rotated, in the dtype that ``q * cos`` has, or in fp32.
    """
    if pairs == "neighbours":
        half = rotary_dim // 2
        if rotary_dim == q.shape[-1]:
            return _Neighbours.apply(q, k, cos[..., :half], sin[..., :half])
        turned = _Neighbours.apply(q[..., :rotary_dim], k[..., :rotary_dim], cos[..., :half], sin[..., :half])
        rest = (x[..., rotary_dim:].float() for x in (q, k))
        return tuple(torch.cat(both, -1) for both in zip(turned, rest, strict=True))  # type: ignore[return-value]
    dtype = torch.float32 if wide else torch.promote_types(q.dtype, cos.dtype)
    return _Halves.apply(q, k, cos, sin, rotary_dim, pairs == "gathered", dtype)
