"""Log-probabilities of one id in each row by the kernel of the cross entropy: DPO and kin, without another reader.

``log_softmax(z)[id]`` is the negative cross entropy of the row, so that one chunk of logits lives at a time, in the
dtype of the product: read in forward, and turned into its own gradient in backward, where it is computed again.
Whoever else reads the same rows with gradients would compute their product once more; from the next step on they share
it instead (:mod:`lightning_liger.head.sharing`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_liger.head.linear_cross_entropy import linear_cross_entropy, scale_and_cap
from lightning_liger.head.readings import Loss, NotedLoss, Readings, leaf_of, named
from lightning_liger.head.view import Source, View

Alone: TypeAlias = Callable[[View, Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]


def likelihood_of(view: View, *, keepdim: bool) -> Alone | None:
    """A reader of log-probabilities ``view`` at the ids in its first extra; None where no kernel knows the view.

    Args:
        keepdim: ids and answers are ``(N, 1)``, not ``(N,)``.
    """
    if not view.tail or view.tail[-1].kind != "log_softmax" or not _has_kernel(replace(view, tail=view.tail[:-1])):
        return None

    def read(view: View, position: Tensor, extras: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        ids = extras[0].reshape(-1)
        _check(ids, view.source.width)
        losses = _losses(replace(view, tail=view.tail[:-1]), position, ids, 0.0)
        return (-losses[:, None] if keepdim else -losses,)

    return read


def losses_of(view: View, smoothing: float) -> Alone | None:
    """A reader of the cross entropy of each row: ids, which are in the vocabulary, and a mask of ignored rows."""
    if not _has_kernel(view):
        return None

    def read(view: View, position: Tensor, extras: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        ids, ignored = extras
        return (_losses(view, position, ids, smoothing).masked_fill(ignored, 0.0),)

    return read


def _has_kernel(view: View) -> bool:
    head = view.source.head if isinstance(view.source, Source) else None
    if head is None or head.backend != "triton" or head.dtype == torch.float64:
        return False
    return scale_and_cap(view.tail) is not None


def _check(ids: Tensor, vocab: int) -> None:
    """What plain code's ``gather`` would say.

    Raises:
        RuntimeError: an id outside of the vocabulary; on CUDA the device says so later.
    """
    torch._assert_async(((ids >= 0) & (ids < vocab)).all(), f"an index is out of bounds: the LM head has {vocab} rows")


def _losses(view: View, position: Tensor, ids: Tensor, smoothing: float) -> Tensor:
    head = view.source.head
    losses = linear_cross_entropy(
        view.source.hidden_at(position),
        head.weight,
        head.bias,
        ids,
        tail=view.tail,
        label_smoothing=smoothing,
        reduction="none",
        dtype=head.dtype,
        backend=head.backend,
    )
    view.watch_backward(losses)
    return losses


def is_alone(view: View, position: Tensor) -> bool:
    """Whether nobody else reads these rows in the same way, with or without gradients, so far and in the step before."""
    expression, (leaf, at) = named(view), leaf_of(view, position)
    if expression is None:
        return False
    head, differentiable = leaf.source.head, torch.is_grad_enabled() and view.requires_grad
    for known in head.readings:
        if isinstance(known, Readings) and known.are_of(leaf.source.rows, head.weight, at):
            return False
        if isinstance(known, NotedLoss) and known.name.differentiable == differentiable and known.is_at(at):
            return False
    name = Loss((expression, "log-probabilities"), differentiable)
    joined = head.habits is not None and name in head.habits.joined
    head.readings.append(NotedLoss(name, at, None, joined))
    return not joined
