"""Which rows of a loss count: read on the CPU wherever the labels are known there, and checked before they are used."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_liger.head.view import View
from lightning_liger.mirrored import cpu_values, ordinary, sent


@dataclass(frozen=True)
class Choice:
    """The positions whose label is not ignored.

    Attributes:
        keep: ``(K,)`` int64 into the flattened labels; ``labels``: ``(K,)`` int64, what stands there.
        position: ``(K,)`` int64 into the view's source.
        on_padding: whether some of them are padding.
    """

    keep: Tensor
    labels: Tensor
    position: Tensor
    on_padding: bool


def choose(view: View, target: Tensor, ignore_index: int) -> Choice:
    """The rows of ``view`` whose ``target``, of the shape of its positions, counts.

    Raises:
        IndexError: a label outside of the vocabulary that is not ``ignore_index``.
    """
    flat, where = target.reshape(-1), view.flat
    values, places = cpu_values(flat), cpu_values(where)
    if values is None:
        _say(view)
    if values is None or places is None or (flat.device.type == "cpu" and type(flat) is Tensor):
        keep = (flat != ignore_index).nonzero()[:, 0]
        labels, position = flat[keep].long(), where[keep]
    else:
        chosen = (values != ignore_index).nonzero()[:, 0]
        together = torch.stack((chosen, values[chosen].long(), places[chosen]))  # one copy, not three
        keep, labels, position = sent(together, flat.device).unbind(0)
    on_padding = _checked(view, labels, position)
    return Choice(ordinary(keep), ordinary(labels), ordinary(position), on_padding)


def _checked(view: View, labels: Tensor, position: Tensor) -> bool:
    """Whether padded positions are among those that count; at most one read of the device.

    Raises:
        IndexError: a label outside of the vocabulary.
    """
    if not labels.numel():
        return False
    pads, values = view.padding(position), cpu_values(labels)
    if values is not None:
        low, high = int(values.min()), int(values.max())
        on_padding = pads is not None and bool(pads.any())
    else:
        padded = labels.new_zeros(()) if pads is None else pads.any().to(labels.dtype)
        low, high, on_padding = torch.stack((labels.min(), labels.max(), padded)).tolist()
    vocab = view.source.width
    if low < 0 or high >= vocab:
        wrong = low if low < 0 else high
        raise IndexError(
            f"label {wrong} is outside of the vocabulary: the LM head has {vocab} rows (labels 0 to {vocab - 1}, and "
            "ignore_index for positions that do not count). Check the tokenizer against the model "
            "(model.resize_token_embeddings) and the ignore_index of the loss."
        )
    return bool(on_padding)


def _say(view: View) -> None:
    view.source.head.report.refuse(
        "labels made on the device by operators that are not followed, or moved there by hand: each loss waits for the "
        "device to learn which rows count"
    )
