"""Gradients that a forward has taken already, handed out by its backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_PIECE = 1 << 24


def refuse_second_derivative() -> None:
    """Called in a backward: gradients of gradients are not recorded there.

    Raises:
        RuntimeError: with ``create_graph=True``.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the fused LM head has no second derivative (backward with create_graph=True). Set fused_head=False."
        )


def handed_out(
    gradients: Sequence[Tensor | None], factor: Tensor, *, triton: bool = False
) -> tuple[Tensor | None, ...]:
    """Each of the saved ``gradients`` times ``factor``, a number on their device.

    They are scaled where they are, unless the graph is kept: a second backward must find them as they were saved.
    """
    if _is_batched(factor):
        return tuple(None if g is None else (g * factor).to(g.dtype) for g in gradients)
    kept = torch._C._autograd._get_current_graph_task_keep_graph()
    found = tuple(g.clone() if kept and g is not None else g for g in gradients)
    for gradient in found:
        if gradient is not None:
            _scale(gradient, factor, triton)
    return found


def _is_batched(factor: Tensor) -> bool:
    """Whether ``is_grads_batched`` asks for several multiples at once."""
    functorch = torch._C._functorch
    return bool(functorch.is_legacy_batchedtensor(factor) or functorch.is_batchedtensor(factor))


def _scale(gradient: Tensor, factor: Tensor, triton: bool) -> None:
    if triton and gradient.is_contiguous() and gradient.dtype != torch.float64:
        from lightning_liger.head.triton_cross_entropy import scale_in_place

        scale_in_place(gradient, factor)
    elif gradient.dtype.itemsize >= factor.dtype.itemsize:
        gradient.mul_(factor)
    else:
        # torch would round the factor to the gradient's dtype first
        for piece in gradient.split(max(1, _PIECE // max(1, gradient[:1].numel()))) if gradient.numel() else ():
            piece.copy_(piece.to(factor.dtype).mul_(factor))
