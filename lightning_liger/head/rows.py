"""Hidden rows at given positions, with gradients that add up in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_liger.head.sums import sum_dtype


class _TakeRows(torch.autograd.Function):
    """``rows[index]``; rows that are taken several times sum their gradients in fp32, not in bf16 one by one."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.like = (rows.shape, rows.dtype)
        return rows[index]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        shape, dtype = ctx.like
        total = torch.zeros(shape, dtype=sum_dtype(dtype), device=grad.device)
        flat = grad.reshape(-1, shape[-1]).to(total.dtype)
        return total.index_add(0, index.reshape(-1), flat).to(dtype), None


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """``(*index.shape, H)`` of ``rows`` ``(N, H)``."""
    taken: Tensor = _TakeRows.apply(rows, index)
    return taken
