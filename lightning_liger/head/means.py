"""How many labels a mean loss is the mean of, kept in its graph for whoever has to weigh it against others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _MeanOver(torch.autograd.Function):
    """The identity; its node remembers ``labels``."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, labels: int) -> Tensor:
        ctx.labels = labels
        return loss.clone()  # not a view: models add to their loss in place

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def mean_over(loss: Tensor, labels: int) -> Tensor:
    """``loss``, a mean over ``labels`` labels."""
    return _MeanOver.apply(loss, labels) if loss.requires_grad else loss


# What may lie between such a loss and what is differentiated: casts, copies, factors without a gradient, and the nodes
# that wrappers put around a module's outputs and inputs.
_PASSING = (
    *("ToCopy", "Clone", "View", "Alias", "Div", "Mul", "Squeeze", "Unsqueeze", "Register", "Expand"),
    *("_DDPSink", "PreBackwardFunctionForModule", "PostBackwardFunctionModule"),
)


def labels_of(loss: Tensor) -> int | None:
    """The number of labels that ``loss`` is the mean of, up to a factor; None if it is, or holds, something else."""
    node = loss.grad_fn
    while node is not None:
        labels = getattr(node, "labels", None)
        if isinstance(labels, int) and "MeanOver" in node.name():
            return labels
        following = [n for n, _ in node.next_functions if n is not None]
        if len(following) != 1 or not any(part in node.name() for part in _PASSING):
            return None
        (node,) = following
    return None
