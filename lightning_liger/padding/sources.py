"""Which tokens of a call are real, and where documents begin: read from what the call says, in a fixed order.

1. ``cu_seq_lens_q``: the documents, as flash attention takes them.
2. ``attention_mask``: 0/1 of any dtype, or document numbers.
3. ``position_ids`` that restart at 0, where no mask is passed.
4. No mask at all and a causal model: the constant tail of each row. Nothing real attends to it, and whoever reads
   there is given the padded run, so this needs no label to be right.

What transformers itself makes of document numbers is "attend to each other": for it a 2 is a 1. That stays so, unless
``position_ids`` restart with the documents as well: then they are kept apart, which is what both arguments together
say. The same goes for restarting positions without a mask, which transformers honours only while no KV cache is made,
and for ``cu_seq_lens_q``, which it honours only with flash attention. A 0/1 mask, all ones included, joins what
it marks, as in the plain run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_liger.mirrored import cpu_values
from lightning_liger.padding.layout import Layout, LayoutBook, NotPackable
from lightning_liger.report import NO_PADDING

Note = Callable[[str], None]


class Unsuitable(Exception):
    """This call runs as it is; the text says why."""


def find_layout(
    call: dict[str, Any],
    tokens: Tensor,
    book: LayoutBook,
    note: Note,
    *,
    causal: bool,
    flash: bool,
    pad: int | None,
    keep_full: bool = True,
) -> Layout:
    """The layout of one call, whose arguments are known by name.

    Args:
        tokens: ``(B, S)`` ids or ``(B, S, H)`` embeddings.
        note: told, once per text, what the user should know.
        causal: real tokens are known not to attend to what follows them.
        flash: the model's own attention reads ``cu_seq_lens_q``.
        pad: the padding token, if the configuration names one.
        keep_full: a batch without padding runs as it is.

    Raises:
        Unsuitable, NotPackable: the call must run as it is.
        ValueError: the call cannot be right either way.
    """
    shape = (tokens.shape[0], tokens.shape[1])
    mask = call.get("attention_mask")
    if call.get("cu_seq_lens_q") is not None:
        return _from_cu_seq_lens(call, shape, book, note, flash)
    if mask is None:
        layout = _from_positions(call.get("position_ids"), shape, book)
        if layout is not None:
            note("position_ids restart: documents in one row do not see each other")
            return layout
        try:
            return _from_tails(call.get("input_ids"), book, causal, pad)
        except Unsuitable:
            if keep_full:
                raise
            return _full(shape)  # the plain run attends to all of it as well
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise Unsuitable("the attention mask is not (B, S)")
    if tuple(mask.shape) != shape:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)} but the tokens have shape {shape}: each token needs "
            "its own mask value. Pad both alike in the collate function."
        )
    try:
        layout = book.layout(mask)
    except NotPackable:
        return _from_other_masks(mask, call.get("position_ids"), book, note, keep_full)
    if not layout.has_padding and keep_full:
        if pad is not None and _looks_padded(call.get("input_ids"), pad):
            raise Unsuitable("the attention mask is all ones over what looks like padding, so it is attended to")
        raise Unsuitable(NO_PADDING)
    return layout


def _from_cu_seq_lens(
    call: dict[str, Any], shape: tuple[int, int], book: LayoutBook, note: Note, flash: bool
) -> Layout:
    if flash:
        raise Unsuitable("the call is packed already, and the model's attention reads cu_seq_lens_q")
    if call.get("attention_mask") is not None or shape[0] != 1:
        raise Unsuitable("cu_seq_lens_q together with a mask or with several rows")
    ends = book.read(call["cu_seq_lens_q"]).to(torch.int64)
    lengths = torch.diff(ends)
    if ends.dim() != 1 or int(ends[0]) != 0 or int(ends[-1]) != shape[1] or bool((lengths <= 0).any()):
        raise Unsuitable("cu_seq_lens_q does not cut the row into documents")
    note("cu_seq_lens_q: documents in one row do not see each other")
    return Layout.from_documents(torch.repeat_interleave(torch.arange(1, lengths.numel() + 1), lengths)[None])


def _from_positions(positions: Any, shape: tuple[int, int], book: LayoutBook) -> Layout | None:
    """Documents begin where ``(B, S)`` positions drop to 0; None if they never do."""
    if positions is None:
        return None
    if positions.dim() != 2 or positions.shape[1] != shape[1] or positions.shape[0] not in (1, shape[0]):
        raise Unsuitable("no attention_mask was passed, and position_ids are not (B, S)")
    ids = book.read(positions)
    if not ((ids[:, 1:] == 0) & (ids[:, :-1] > 0)).any():
        if bool((torch.diff(ids, dim=1) != 1).any()):
            raise Unsuitable("no attention_mask was passed, and position_ids jump")
        return None
    # any other jump is a document of its own for transformers, which is told apart by the same rule here
    number = torch.ones_like(ids)
    number[:, 1:] += (torch.diff(ids, dim=1) != 1).cumsum(1)
    return Layout.from_documents(number.expand(shape))


def _from_other_masks(mask: Tensor, positions: Any, book: LayoutBook, note: Note, keep_full: bool) -> Layout:
    values = book.read(mask)
    if values.is_floating_point() and bool((values <= 0).all()):
        # to be added to scores, its author thinks; the plain run makes a bool of it and attends to the -inf
        raise NotPackable("a (B, S) mask of 0 and -inf, which transformers reads the other way round")
    if bool((values < 0).any()) or not torch.equal(values, values.round()):
        raise NotPackable("the attention mask holds values other than 0 and 1")
    real = values != 0
    joined = Layout.from_mask(real)
    if isinstance(positions, Tensor) and positions.dim() == 2 and positions.shape == mask.shape:
        ids = book.read(positions)
        begins = (values[:, 1:] != values[:, :-1]) & real[:, 1:] & real[:, :-1]
        if torch.equal(begins, begins & (ids[:, 1:] == 0)) and bool(begins.any()):
            note("attention_mask numbers documents and position_ids restart with them: they do not see each other")
            return Layout.from_documents(values.to(torch.int64))
    note(
        "attention_mask holds document numbers, which transformers takes as 'attend': documents in one row see each "
        "other, as in the plain run; pass position_ids that restart with each document to keep them apart"
    )
    if not joined.has_padding and keep_full:
        raise Unsuitable(NO_PADDING)
    return joined


def _full(shape: tuple[int, int]) -> Layout:
    return Layout.from_mask(torch.ones(shape, dtype=torch.bool))


def _constant_tails(ids: Tensor) -> tuple[Tensor, Tensor]:
    """``(B,)``: the last token of each row and how often it is repeated there."""
    last = ids[:, -1:]
    return last[:, 0], (ids.flip(1) == last).to(torch.int64).cumprod(1).sum(1)


def _looks_padded(ids: Any, pad: int) -> bool:
    if not isinstance(ids, Tensor) or ids.dim() != 2 or (source := cpu_values(ids)) is None:
        return False
    token, length = _constant_tails(source)
    return bool(((token == pad) & (length > 1)).any())


def _from_tails(ids: Any, book: LayoutBook, causal: bool, pad: int | None) -> Layout:
    if not causal:
        raise Unsuitable("no attention_mask was passed, and the model looks ahead")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or cpu_values(ids) is None:
        raise Unsuitable("no attention_mask was passed, and the tokens are not known on the CPU")

    def from_tails(source: Tensor) -> Layout:
        token, length = _constant_tails(source)
        if pad is not None and not bool((token == pad).any()):
            token = torch.full_like(token, -1)
        # One of the tail stays: where the padding token also ends documents, the first of them is real.
        longest = int(length.argmax())
        cut = torch.where(token == token[longest], length - 1, 0)
        columns = torch.arange(source.shape[1])
        return Layout.from_mask(columns < (source.shape[1] - cut)[:, None])

    layout = book.layout(ids, from_tails, ("tails", pad))
    if not layout.has_padding:
        raise Unsuitable("no attention_mask was passed, and rows do not end in a repeated token")
    return layout
