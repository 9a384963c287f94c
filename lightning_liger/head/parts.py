"""Parts of lazy tensors: cuts, indices and masks over positions, ranges of the vocabulary, and joining them again."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_liger.head.lazy import LazyRows, Source, View, handles
from lightning_liger.head.shapes import dim_of, lead_dim, view_of
from lightning_liger.head.tail import is_elementwise

T = Tensor


def narrowed(view: View, index: Any) -> Any:
    """The view on a part of the vocabulary, ``index`` being a slice or a 1-D integer tensor."""
    source = view.source
    if not isinstance(source, Source) or source.head is None or not is_elementwise(view.tail):
        return NotImplemented
    head = source.head
    view.gather()
    bias = None if head.bias is None else head.bias[index]
    return replace(view, source=replace(source, head=replace(head, weight=head.weight[index], bias=bias)))


@view_of(T.narrow, torch.narrow)
def _narrow(view: View, dim: int, start: Any, length: int) -> Any:
    dim = dim_of(view, dim)
    start = int(start)
    if dim == view.vdim:
        size = view.source.width
        start = start + size if start < 0 else start
        return narrowed(view, slice(start, start + length)) if 0 <= start <= size - length else NotImplemented
    return replace(view, position=view.position.narrow(lead_dim(view, dim), start, length))


@view_of(T.select, torch.select)
def _select(view: View, dim: int, index: int) -> Any:
    dim = dim_of(view, dim)
    if dim == view.vdim:
        return NotImplemented
    position = view.position.select(lead_dim(view, dim), index)
    return replace(view, position=position, vdim=view.vdim - (1 if dim < view.vdim else 0))


@view_of(T.index_select, torch.index_select)
def _index_select(view: View, dim: int, index: Tensor) -> Any:
    dim = dim_of(view, dim)
    if dim == view.vdim:
        return narrowed(view, index) if index.dim() == 1 else NotImplemented
    return replace(view, position=view.position.index_select(lead_dim(view, dim), index))


def _parts(view: View, dim: int, cut: Callable[[Tensor, int], Any]) -> Any:
    dim = dim_of(view, dim)
    if dim == view.vdim:
        return NotImplemented
    return tuple(replace(view, position=p) for p in cut(view.position, lead_dim(view, dim)))


@view_of(T.split, torch.split)
def _split(view: View, split_size_or_sections: Any = None, dim: int = 0, *, split_size: Any = None) -> Any:
    size = split_size_or_sections if split_size is None else split_size
    return _parts(view, dim, lambda p, d: p.split(size, d))


@view_of(T.split_with_sizes, torch.split_with_sizes)
def _split_with_sizes(view: View, split_sizes: Any, dim: int = 0) -> Any:
    return _parts(view, dim, lambda p, d: p.split(list(split_sizes), d))


@view_of(T.tensor_split, torch.tensor_split)
def _tensor_split(
    view: View, indices_or_sections: Any = None, dim: int = 0, *, indices: Any = None, sections: Any = None
) -> Any:
    where: Any = next((w for w in (indices_or_sections, indices, sections) if w is not None), None)
    return _parts(view, dim, lambda p, d: p.tensor_split(where, dim=d))


@view_of(T.chunk, torch.chunk)
def _chunk(view: View, chunks: int, dim: int = 0) -> Any:
    return _parts(view, dim, lambda p, d: p.chunk(chunks, d))


@view_of(T.unbind, torch.unbind)
def _unbind(view: View, dim: int = 0) -> Any:
    dim = dim_of(view, dim)
    if dim == view.vdim:
        return NotImplemented
    vdim = view.vdim - (1 if dim < view.vdim else 0)
    return tuple(replace(view, position=p, vdim=vdim) for p in view.position.unbind(lead_dim(view, dim)))


@handles(T.__iter__)
def _iterate(tensor: LazyRows) -> Any:
    return iter(tensor.unbind(0)) if tensor.dim() > 1 else NotImplemented


@view_of(T.__getitem__)
def _getitem(view: View, index: Any) -> Any:
    """Any indexing of the other dims while the width is taken whole, or in one range."""
    items = expanded_index(view, index)
    if items is None:
        return NotImplemented
    advanced = any(isinstance(i, Tensor) for i in items)
    if advanced and view.vdim != view.position.dim():
        return NotImplemented
    dim, out, where = 0, 0, -1
    for n, item in enumerate(items):
        takes = consumes(item)
        if dim <= view.vdim < dim + takes:
            where = n
            break
        dim += takes
        out += 0 if isinstance(item, int) else 1
    width = items[where]
    if not isinstance(width, slice):
        return NotImplemented
    rest = items[:where] + items[where + 1 :]
    position = view.position[tuple(rest)] if rest else view.position
    # With tensors among the indices the width is last, behind whatever shape they make.
    trailing = sum(i is None for i in items[where + 1 :])
    made = replace(view, position=position, vdim=position.dim() - trailing if advanced else out)
    return made if width == slice(None) else narrowed(made, width)


def expanded_index(view: View, index: Any) -> list[Any] | None:
    """One entry for every dim that is taken, lists as tensors, no ellipsis; None where torch must answer."""
    items = list(index) if isinstance(index, tuple) else [index]
    device = view.source.device
    items = [torch.tensor(i, device=device) if isinstance(i, (list, range)) and len(i) else i for i in items]
    items = [operator.index(i) if isinstance(i, numbers.Integral) and not isinstance(i, bool) else i for i in items]
    understood = (int, slice, Tensor, type(None), type(Ellipsis))
    if any(isinstance(i, (LazyRows, bool)) or not isinstance(i, understood) for i in items):
        return None
    if any(isinstance(i, Tensor) and i.dtype.is_floating_point for i in items):
        return None
    free = len(view.shape) - sum(consumes(i) for i in items)
    dots = [n for n, i in enumerate(items) if i is Ellipsis]
    if free < 0 or len(dots) > 1:
        return None
    at = dots[0] if dots else len(items)
    items[at : at + len(dots)] = [slice(None)] * free
    return items


def consumes(item: Any) -> int:
    """How many dims one index takes."""
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.dim()
    return 1
