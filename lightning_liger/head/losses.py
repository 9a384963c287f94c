"""Losses on lazy logits and log-probabilities: only the rows that count are computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_liger.head.choosing import choose
from lightning_liger.head.lazy import LazyRows, View, handles
from lightning_liger.head.likelihood import Alone, losses_of
from lightning_liger.head.linear_cross_entropy import linear_cross_entropy
from lightning_liger.head.means import mean_over
from lightning_liger.head.mixing import aligned, given_view, has_head, joined, mixed
from lightning_liger.head.observing import observation
from lightning_liger.head.per_row import Program, per_row
from lightning_liger.head.rowwise import rowwise
from lightning_liger.head.shares import share_of
from lightning_liger.head.sharing import joins_others
from lightning_liger.head.tail import has_known_slope
from lightning_liger.head.unsettled import Unsettled
from lightning_liger.head.view import Source

_REDUCTIONS = ("mean", "sum", "none")


@handles(F.cross_entropy)
def cross_entropy(
    input: LazyRows,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """:func:`torch.nn.functional.cross_entropy` on rows whose label counts.

    Args:
        input: ``(N, V)``, ``(V,)``, ``(N, V, d1, ...)``.
        target: class ids ``(N, d1, ...)``, or probabilities of ``input``'s shape (then every row counts).

    Raises:
        IndexError: a label outside of the vocabulary that is not ``ignore_index``.
    """
    if not _is_loss_input(input, target, size_average, reduce, reduction) or isinstance(weight, LazyRows):
        return NotImplemented
    view = input.view_
    if target.shape == input.shape and target.is_floating_point():
        return _against_probabilities(input, target, weight, reduction, label_smoothing)

    def program(z: Tensor, labels: Tensor) -> tuple[Tensor]:
        w = None if weight is None else weight.to(z.dtype)
        return (F.cross_entropy(z, labels, w, reduction="none", label_smoothing=label_smoothing),)

    simple = view if weight is None and isinstance(view.source, Source) and has_known_slope(view.tail) else None
    if weight is not None and weight.requires_grad:
        return NotImplemented
    return _labelled(input, target, ignore_index, reduction, program, simple, weight, label_smoothing)


@handles(F.nll_loss)
def nll_loss(
    input: LazyRows,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """:func:`torch.nn.functional.nll_loss`; after a log-softmax it is the cross entropy of what went in."""
    if not _is_loss_input(input, target, size_average, reduce, reduction) or isinstance(weight, LazyRows):
        return NotImplemented
    if weight is not None and weight.requires_grad:
        return NotImplemented
    view = input.view_

    def program(z: Tensor, labels: Tensor) -> tuple[Tensor]:
        return (F.nll_loss(z, labels, None if weight is None else weight.to(z.dtype), reduction="none"),)

    simple = None
    if weight is None and isinstance(view.source, Source) and view.tail and view.tail[-1].kind == "log_softmax":
        before = view.tail[:-1]
        simple = replace(view, tail=before) if has_known_slope(before) else None
    return _labelled(input, target, ignore_index, reduction, program, simple, weight, 0.0)


def _is_loss_input(input: Any, target: Any, size_average: Any, reduce: Any, reduction: str) -> bool:
    if not isinstance(input, LazyRows) or not isinstance(target, Tensor) or isinstance(target, LazyRows):
        return False
    view = input.view_
    class_dim = 1 if input.dim() > 1 else 0
    known = size_average is None and reduce is None and reduction in _REDUCTIONS
    return known and has_head(view) and view.vdim == class_dim and target.device == view.source.device


def _labelled(
    input: LazyRows,
    target: Tensor,
    ignore_index: int,
    reduction: str,
    program: Program,
    simple: View | None,
    weight: Tensor | None,
    smoothing: float,
) -> Any:
    """A loss of class ids. ``simple``: the view whose plain cross entropy it is, for the one-pass kernels."""
    view = input.view_
    if target.shape != view.position.shape or target.dtype not in (torch.int64, torch.uint8):
        return NotImplemented
    if isinstance(target, Unsettled):
        target = target.settle()
    choice = choose(view, target, ignore_index)
    keep, labels, position = choice.keep, choice.labels, choice.position
    if choice.on_padding and reduction == "none":
        # The losses of padded positions are often masked away afterwards: leave them to whoever reads them.
        alone = losses_of(view, smoothing) if simple is view else None
        return _each_loss(input, target, ignore_index, program, alone).to(_loss_dtype(input))
    if simple is not None and reduction != "none" and not choice.on_padding and keep.numel() and joins_others(view):
        total = _each_loss(input, target, ignore_index, program).sum()
        if reduction == "sum":
            return total.to(_loss_dtype(input))
        return mean_over((total / keep.numel()).to(_loss_dtype(input)), keep.numel())
    input.consume("the loss")
    view.source.head.report.scored(target.numel(), keep.numel(), view.source.head)
    if choice.on_padding:
        view = view.scored("the loss")
        simple = None if simple is None else replace(simple, source=view.source)
    if simple is not None:
        losses = _fused(simple, position, labels, reduction, smoothing)
    elif reduction == "none":
        (losses,) = per_row(view, position, program, (labels,))
    else:
        share = 1.0 / keep.numel() if reduction == "mean" and keep.numel() and weight is None else 1.0
        (losses,) = per_row(view, position, program, (labels,), scale=share)
        if reduction == "mean" and not keep.numel():
            losses = losses + float("nan")
        elif reduction == "mean" and weight is not None:
            losses = losses / weight.to(losses.dtype)[labels].sum()
    if reduction == "none":
        losses = losses.new_zeros(target.numel()).index_put((keep,), losses).view(target.shape)
    losses = losses.to(_loss_dtype(input))
    return mean_over(losses, keep.numel()) if reduction == "mean" and weight is None else losses


def _fused(
    view: View, position: Tensor, labels: Tensor, reduction: str, smoothing: float, total: int | None = None
) -> Tensor:
    """Cross entropy of rows by the one-pass kernels; a mean over ``total`` rows where others have the rest of them."""
    if (share := share_of(view, position)) is not None:
        if reduction == "none":
            (part,) = share.part((labels,))
            return share.of_all((_fused(share.view, share.position, part, reduction, smoothing),))[0]
        part = _fused(share.view, share.own_position, share.own_part(labels), reduction, smoothing, share.count)
        return share.sum(part)
    head = view.source.head
    view.gather()
    losses = linear_cross_entropy(
        view.rows(position),
        head.weight,
        head.bias,
        labels,
        tail=view.tail,
        label_smoothing=smoothing,
        reduction=reduction,
        total=total,
        dtype=head.dtype,
        backend=head.backend,
        observe=observation(view, position),
    )
    view.watch_backward(losses)
    return losses


def _each_loss(
    input: LazyRows, target: Tensor, ignore_index: int, program: Program, alone: Alone | None = None
) -> Tensor:
    ignored = target == ignore_index
    labels = target.masked_fill(ignored, 0).long()

    def masked(z: Tensor, labels: Tensor, ignored: Tensor) -> tuple[Tensor]:
        (loss,) = program(z, labels)
        return (loss.masked_fill(ignored, 0.0),)

    (found,) = rowwise(input, masked, "the loss", (labels, ignored), alone=alone)
    return found.masked_fill(ignored, 0.0)


def _loss_dtype(logits: LazyRows) -> torch.dtype:
    """Cross entropy answers in the dtype of the logits, which autocast lifts to fp32."""
    kind = logits.device.type
    return torch.float32 if torch.is_autocast_enabled(kind) and logits.dtype != torch.float64 else logits.dtype


def _against_probabilities(
    input: LazyRows, target: Tensor, weight: Tensor | None, reduction: str, smoothing: float
) -> Any:
    view = input.view_
    given = given_view(target, view)
    if given is None:
        return NotImplemented
    vocab = view.source.width

    def op(z: Tensor, p: Tensor) -> Tensor:
        p = p.to(z.dtype)
        if smoothing:
            p = p * (1 - smoothing) + smoothing / vocab
        terms = -torch.log_softmax(z, -1) * p
        return terms if weight is None else terms * weight.to(z.dtype)

    from lightning_liger.head.lazy import lazy

    terms = lazy(joined(op, view, given, view.vdim, _loss_dtype(input)))
    terms.parents, terms.replay = (
        (input,),
        lambda values: op(values.movedim(view.vdim, -1), target.movedim(view.vdim, -1)).movedim(-1, view.vdim),
    )
    if reduction == "none":
        return terms.sum(view.vdim)
    total = terms.sum()
    return total if reduction == "sum" else total / max(1, view.position.numel())


@handles(F.kl_div)
def kl_div(
    input: Any,
    target: Any,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Any:
    """:func:`torch.nn.functional.kl_div` between lazy log-probabilities, or one of them and an ordinary tensor."""
    if size_average is not None or reduce is not None or reduction not in (*_REDUCTIONS, "batchmean"):
        return NotImplemented
    tensor = input if isinstance(input, LazyRows) else target
    other = target if tensor is input else input
    if not isinstance(tensor, LazyRows) or not isinstance(other, Tensor) or other.shape != tensor.shape:
        return NotImplemented
    if aligned(tensor, other) is None:
        return NotImplemented

    def pointwise(i: Tensor, t: Tensor) -> Tensor:
        return t.exp() * (t - i) if log_target else torch.xlogy(t, t) - t * i

    terms = mixed(pointwise, input, target)
    if terms is NotImplemented or reduction == "none":
        return terms
    total = terms.sum()
    if reduction == "batchmean":
        return total / tensor.shape[0]
    return total if reduction == "sum" else total / tensor.numel()
