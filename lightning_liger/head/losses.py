"""Consumers that read logits row by row: cross entropy and argmax."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_liger.head.lazy import Head, LazyRows, View, handles
from lightning_liger.head.linear_cross_entropy import apply_tail, chunk_rows, head_product, linear_cross_entropy


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

    Raises:
        IndexError: a label outside of the vocabulary that is not ``ignore_index``.
    """
    if (
        not isinstance(input, LazyRows)
        or isinstance(target, LazyRows)
        or size_average is not None
        or reduce is not None
    ):
        return NotImplemented
    view = input.view_
    head = view.source.head
    class_dim = 1 if input.dim() > 1 else 0
    if head is None or view.vdim != class_dim or view.position.dim() == 0 or reduction not in ("mean", "sum", "none"):
        return NotImplemented
    if target.shape != view.position.shape or target.dtype not in (torch.int64, torch.uint8):
        return NotImplemented
    flat = target.reshape(-1)
    keep = (flat != ignore_index).nonzero()[:, 0]
    labels, position = flat[keep].long(), view.position.reshape(-1)[keep]
    view = _scored_view(view, head, labels, position)
    head.report.scored(flat.numel(), keep.numel())
    rows = view.rows(position)
    if weight is not None:
        losses = _with_class_weights(view, head, rows, labels, weight, reduction, label_smoothing)
    else:
        losses = linear_cross_entropy(
            rows,
            head.weight,
            head.bias,
            labels,
            tail=view.tail,
            label_smoothing=label_smoothing,
            reduction=reduction,
            dtype=head.dtype,
            backend=head.backend,
        )
    if reduction == "none":
        losses = losses.new_zeros(flat.numel()).index_put((keep,), losses).view(target.shape)
    return losses.to(_loss_dtype(input))


def _loss_dtype(logits: LazyRows) -> torch.dtype:
    """Cross entropy answers in the dtype of the logits, which autocast lifts to fp32."""
    kind = logits.device.type
    return torch.float32 if torch.is_autocast_enabled(kind) and logits.dtype != torch.float64 else logits.dtype


def _scored_view(view: View, head: Head, labels: Tensor, position: Tensor) -> View:
    """Check labels and rows with one read of the device; answer with a view that has every row the labels name."""
    source = view.source
    row = position if source.row_of is None else source.row_of[position]
    if not labels.numel():
        return view
    low, high, first_row = torch.stack((labels.min(), labels.max(), row.min())).tolist()
    vocab = head.weight.shape[0]
    if low < 0 or high >= vocab:
        wrong = low if low < 0 else high
        raise IndexError(
            f"label {wrong} is outside of the vocabulary: the LM head has {vocab} rows (labels 0 to {vocab - 1}, and "
            "ignore_index for positions that do not count). Check the tokenizer against the model "
            "(model.resize_token_embeddings) and the ignore_index of the loss."
        )
    if first_row >= 0 or source.plain is None:
        return view
    source.plain.scored("the loss")
    return replace(view, source=source.padded(source.plain.value(source.path)))


def _with_class_weights(
    view: View, head: Head, rows: Tensor, labels: Tensor, weight: Tensor, reduction: str, label_smoothing: float
) -> Tensor:
    """Class weights need every logit of a row once more; only the labelled rows are computed."""
    logits = replace(
        view,
        source=replace(view.source, rows=rows, row_of=None, plain=None),
        position=torch.arange(rows.shape[0], device=rows.device),
        vdim=1,
    ).dense()
    head.report.materialised("cross_entropy(weight=...)")
    return F.cross_entropy(logits.float(), labels, weight, reduction=reduction, label_smoothing=label_smoothing)


@handles(torch.argmax, torch.Tensor.argmax)
def argmax(input: LazyRows, dim: int | None = None, keepdim: bool = False) -> Any:
    """Predicted ids, chunk by chunk."""
    view = input.view_
    head = view.source.head
    if head is None or dim is None or dim % len(view.shape) != view.vdim:
        return NotImplemented
    with torch.no_grad():
        view = input.readable("argmax")
        flat = view.position.reshape(-1)
        found = torch.empty_like(flat)
        source = view.source
        step = chunk_rows(source.width, flat.device)
        for start in range(0, flat.numel(), step):
            part = flat[start : start + step]
            row = part if source.row_of is None else source.row_of[part].clamp_min(0)
            logits = head_product(source.rows[row], head.weight, head.bias, head.dtype)
            found[start : start + step] = apply_tail(logits, view.tail).argmax(-1)
    found = found.view(view.position.shape)
    return found.unsqueeze(view.vdim) if keepdim else found
