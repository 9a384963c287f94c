"""Gradients of padded positions that came back although nobody was seen to read them."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_liger.head.view import View


def reaches_padding(view: View, grad: Tensor) -> bool:
    """Whether ``grad``, of the view's shape, is not zero at some padded position."""
    pads = view.padding()
    return pads is not None and bool(grad.movedim(view.vdim, -1)[pads].any())


def through_the_padded_run(view: View, grad: Tensor) -> None:
    """Send ``grad`` through the padded run instead, as reentrant checkpointing does: straight into ``.grad``.

    Gradients came back past ``LazyRows``, so nobody could run the call padded when it was read.

    Raises:
        RuntimeError: under ``torch.autograd.grad``, which collects nothing from ``.grad``.
    """
    what = "a function outside of PyTorch's own operators"
    if not torch.autograd._is_checkpoint_valid():
        raise RuntimeError(
            f"{what} sends gradients to logits or hidden states of padded positions, which torch.autograd.grad and "
            "backward(inputs=...) cannot collect here. Set padding_free=False for this module."
        )
    with torch.enable_grad():
        dense = view.scored(what).dense()
    torch.autograd.backward(dense, grad)
