"""Where the real tokens of a decoder's call are.

What an argument means is not known from its name: a mask may mark tokens or padding, and attention may use it or not.
So a layout is only a proposal here. Attention refuses it where it does not agree with what the decoder really masks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_liger.padding.layout import Layout, LayoutBook, NotPackable
from lightning_liger.padding.sources import Note, Unsuitable, find_layout
from lightning_liger.report import NO_PADDING


def token_ids(call: dict[str, Any]) -> Tensor | None:
    """The first ``(B, S)`` integer tensor, which is how token ids stand among a decoder's arguments."""
    for value in call.values():
        if isinstance(value, Tensor) and value.dim() == 2 and value.dtype in (torch.int64, torch.int32):
            return value
    return None


def propose_layout(call: dict[str, Any], ids: Tensor, book: LayoutBook, note: Note) -> Layout:
    """The layout of a call.

    Raises:
        Unsuitable, NotPackable: it must run as it is.
    """
    for name, value in call.items():
        if isinstance(value, Tensor) and value is not ids and value.shape == ids.shape and "mask" in name.lower():
            return _from_mask(value, ids, book)
    return find_layout({"input_ids": ids}, ids, book, note, causal=True, flash=False, pad=None)


def _from_mask(mask: Tensor, ids: Tensor, book: LayoutBook) -> Layout:
    tokens = book.read(ids)

    def make(values: Tensor) -> Layout:
        if values.is_floating_point() and bool((values <= 0).all()):
            values = values == 0  # added to scores: 0 and -inf
        marked = values != 0
        if not torch.equal(marked.to(values.dtype), values):
            raise NotPackable("the mask holds values other than 0 and 1")
        if bool(marked.all()) or not bool(marked.any()):
            raise Unsuitable(NO_PADDING)
        fitting = [real for real in (marked, ~marked) if _is_padding(~real, tokens)]
        if len(fitting) != 1:
            raise NotPackable("it cannot be told whether the mask marks tokens or padding")
        return Layout.from_mask(fitting[0])

    return book.layout(mask, make, ("decoder mask", id(tokens)))


def _is_padding(padding: Tensor, ids: Tensor) -> bool:
    """Whether all these positions hold one token, and every row has others."""
    held = ids[padding]
    return bool((~padding).any(1).all()) and bool((held == held[0]).all())
