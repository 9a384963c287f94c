"""The fused linear cross entropy of Liger Kernel behind the same interface (CUDA, or its kernels interpreted)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_liger.head.early_gradients import handed_out, refuse_second_derivative
from lightning_liger.head.tail import TailOp


def softcap_of(tail: tuple[TailOp, ...]) -> float | None:
    """The soft-cap ``c`` of a tail ``c * tanh(z / c)``, 0.0 for no tail, None for any other."""
    if not tail:
        return 0.0
    kinds = [op.kind for op in tail]
    if kinds == ["scale", "tanh", "scale"] and abs(tail[0].factor * tail[2].factor - 1) < 1e-6:
        return tail[2].factor
    return None


def supports(tail: tuple[TailOp, ...], reduction: str, dtype: torch.dtype) -> bool:
    return reduction != "none" and softcap_of(tail) is not None and dtype != torch.float64


class _LigerLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        softcap: float | None,
        smoothing: float,
        reduction: str,
        dtype: torch.dtype,
    ) -> Tensor:
        from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward

        ctx.dtypes = (rows.dtype, weight.dtype, None if bias is None else bias.dtype)
        with torch.autocast(rows.device.type, enabled=False):
            loss, _, _, _, d_rows, d_weight, d_bias = fused_linear_cross_entropy_forward(
                # leaf flags tell Liger which gradients are wanted; it computes none at all without the rows'
                _input=rows.detach().to(dtype).contiguous().requires_grad_(any(ctx.needs_input_grad[:3])),
                weight=weight.detach().to(dtype).requires_grad_(ctx.needs_input_grad[1]),
                target=target,
                bias=None if bias is None else bias.detach().to(dtype).requires_grad_(ctx.needs_input_grad[2]),
                label_smoothing=smoothing,
                reduction=reduction,
                softcap=softcap,
                accum_dtype=torch.float32,
            )
        ctx.save_for_backward(d_rows, d_weight, d_bias)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_second_derivative()
        # Liger's own backward scales the saved gradients in place, which a second backward would do again
        scaled = tuple(
            None if g is None else g.to(dt)
            for g, dt in zip(handed_out(ctx.saved_tensors, grad), ctx.dtypes, strict=True)
        )
        return (*scaled, None, None, None, None, None)


def liger_linear_cross_entropy(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    tail: tuple[TailOp, ...],
    smoothing: float,
    reduction: str,
    dtype: torch.dtype,
) -> Tensor:
    """See :func:`lightning_liger.head.linear_cross_entropy.linear_cross_entropy`."""
    if rows.shape[0] == 0:
        # Liger answers 0 where PyTorch answers NaN
        empty = rows.sum() * 0.0 + weight.sum() * 0.0
        return empty.float() + (float("nan") if reduction == "mean" else 0.0)
    loss: Tensor = _LigerLinearCrossEntropy.apply(
        rows, weight, bias, target, softcap_of(tail) or None, smoothing, reduction, dtype
    )
    return loss
