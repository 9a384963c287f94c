"""Sums over chunks, kept in a dtype that does not lose what single chunks say."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over chunks are kept in: fp32 for bf16 and fp16, else ``dtype`` itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def product(gradient: Tensor, h: Tensor, dtype: torch.dtype) -> Tensor:
    """``gradient.T @ h``, ``(V, H)``, in ``dtype``, in which it was summed as well."""
    if dtype == gradient.dtype:
        return gradient.T @ h
    if gradient.device.type == "cuda":
        return torch.mm(gradient.T, h, out_dtype=dtype)
    return gradient.T.to(dtype) @ h.to(dtype)


def add_product(total: Tensor, gradient: Tensor, h: Tensor) -> None:
    """``total += gradient.T @ h``, ``(V, H)``, summed in ``total``'s dtype: bf16 sums lose what small gradients say."""
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.T, h)
    elif gradient.device.type == "cuda":
        torch.addmm(total, gradient.T, h, out_dtype=total.dtype, out=total)
    else:
        total += gradient.T.to(total.dtype) @ h.to(total.dtype)


class WeightSum:
    """The gradient of a weight ``(V, H)`` over the chunks of its rows.

    Args:
        single: there is one chunk: one product, which the device sums in fp32 by itself.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype, *, single: bool) -> None:
        self._like = weight
        self._dtype = dtype if single and weight.dtype == dtype else sum_dtype(dtype)
        self._total: Tensor | None = None

    def add(self, gradient: Tensor, h: Tensor) -> None:
        if self._total is None:
            self._total = product(gradient, h, self._dtype)
        else:
            add_product(self._total, gradient, h)

    def value(self) -> Tensor:
        return torch.zeros_like(self._like) if self._total is None else self._total.to(self._like.dtype)
