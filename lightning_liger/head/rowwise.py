"""One answer per position: run a reader on the rows that are known, and leave padding to whoever asks for it."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from lightning_liger.head.lazy import LazyRows
from lightning_liger.head.likelihood import Alone
from lightning_liger.head.per_row import Program
from lightning_liger.head.sharing import read
from lightning_liger.head.unsettled import Unsettled, unsettled


def rowwise(
    tensor: LazyRows,
    program: Program,
    what: str,
    extras: tuple[Tensor, ...] = (),
    key: Hashable = None,
    alone: Alone | None = None,
) -> tuple[Tensor, ...]:
    """``program`` at every position of ``tensor``.

    Args:
        program: as for :func:`per_row`: from ``(n, V)`` to a tuple of tensors with ``n`` rows.
        what: the reader's name, for reports and errors.
        extras: tensors of ``(*lead, ...)``, cut like the rows.
        key, alone: as for :func:`read`.

    Returns:
        Tensors of ``(*lead, ...)``, where ``lead`` is the tensor's shape without the vocabulary. Rows of padding are
        not computed; see :class:`lightning_liger.head.unsettled.Unsettled`.
    """
    view = tensor.view_
    tensor.consume(what)
    lead, flat = view.position.shape, view.flat
    flat_extras = tuple(e.reshape((flat.numel(), *e.shape[len(lead) :])) for e in extras)
    pads = view.padding(flat)
    keep = None if pads is None else (~pads).nonzero()[:, 0]
    differentiable = torch.is_grad_enabled() and tensor.node is not None
    whole = pads is None or keep is None or keep.numel() == flat.numel()
    head, computed = view.source.head, flat.numel() if whole or keep is None else keep.numel()
    if differentiable:  # metrics are not what the head's rows are counted for
        head.report.scored(flat.numel(), computed, head)
    else:
        head.report.read(computed, head)
    if whole or pads is None or keep is None:
        settled = tuple(e.settle() if isinstance(e, Unsettled) else e for e in flat_extras)
        return tuple(o.view((*lead, *o.shape[1:])) for o in read(view, flat, program, what, settled, key, alone))
    known = read(view, flat[keep], program, what, tuple(_known(e, keep) for e in flat_extras), key, alone)
    filled: list[tuple[Tensor, ...]] = []

    def fill() -> tuple[Tensor, ...]:
        if not filled:
            full = view.with_padding(what, differentiable)
            settled = tuple(e.settle() if isinstance(e, Unsettled) else e for e in flat_extras)
            found = read(full, flat, program, what, settled, key, alone)
            filled.append(tuple(o.view((*lead, *o.shape[1:])) for o in found))
            for o in filled[0]:
                full.watch_padding(o, what)
        return filled[0]

    return tuple(_scattered(o, i, keep, pads.view(lead), lead, fill) for i, o in enumerate(known))


def _known(extra: Tensor, keep: Tensor) -> Tensor:
    """The rows that are read; what the other rows of an unsettled tensor hold does not matter then."""
    part = extra[keep]
    return part.settle() if isinstance(part, Unsettled) else part


def _scattered(known: Tensor, i: int, keep: Tensor, pads: Tensor, lead: torch.Size, fill: object) -> Tensor:
    values = known.new_zeros(pads.numel(), *known.shape[1:]).index_put((keep,), known)
    values = values.view((*lead, *known.shape[1:]))
    unknown = pads.view((*lead, *(1,) * (known.dim() - 1))).expand(values.shape)
    return unsettled(values, unknown, lambda: fill()[i])  # type: ignore[operator]


def rounded(program: Callable[[Tensor], tuple[Tensor, ...]], dtype: torch.dtype) -> Program:
    """``program`` on values rounded as the user's logits would be: ties between ids must fall as they do there."""
    return lambda z: program(z.to(dtype))
