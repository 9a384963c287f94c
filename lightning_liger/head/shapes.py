"""Shape operators on lazy tensors: they move the position map and leave the rows alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_liger.head.lazy import HANDLERS, Handler, LazyRows, View, handles, lazy
from lightning_liger.head.linear_cross_entropy import TailOp

T = Tensor


def view_of(*functions: Any) -> Callable[[Handler], Handler]:
    """Register a handler that answers with a :class:`View`; the result remembers how to repeat the step on values."""

    def register(handler: Handler) -> Handler:
        for function in functions:
            HANDLERS[function] = functools.partial(_derive, function, handler)
        return handler

    return register


def _derive(function: Any, handler: Handler, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(tensor, LazyRows):
        return NotImplemented
    made = handler(tensor.view_, *args, **kwargs)
    if made is NotImplemented:
        return NotImplemented
    if isinstance(made, View):
        return _child(tensor, made, lambda values: function(values, *args, **kwargs))

    def part(i: int) -> Callable[[Tensor], Any]:
        return lambda values: function(values, *args, **kwargs)[i]

    return tuple(_child(tensor, v, part(i)) for i, v in enumerate(made))


def _child(parent: LazyRows, view: View, replay: Callable[[Tensor], Any]) -> LazyRows:
    child = lazy(view)
    child.parent, child.replay = parent, replay
    return child


def _dim(view: View, dim: int) -> int:
    """``dim`` counted from the front."""
    n = len(view.shape)
    if not -n <= dim < n:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-n}, {n - 1}], but got {dim})")
    return dim % n


def _lead(view: View, dim: int) -> int:
    """The map's own dim for logical ``dim``, which is not the width."""
    return dim if dim < view.vdim else dim - 1


def _sizes(shape: tuple[Any, ...]) -> list[int] | None:
    if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)):
        shape = tuple(shape[0])
    return [int(s) for s in shape] if all(isinstance(s, int) for s in shape) else None


# -- the same values -------------------------------------------------------------------------------------------------


@view_of(T.contiguous, T.clone, torch.clone)
def _same(view: View, *args: Any, **kwargs: Any) -> Any:
    return NotImplemented if args or kwargs.keys() - {"memory_format"} else view


@handles(T.detach, torch.detach)
def _detach(tensor: LazyRows) -> LazyRows:
    return LazyRows(replace(tensor.view_, source=tensor.view_.source.detached()))


def _cast(dtype: torch.dtype) -> Handler:
    return lambda view, *args, **kwargs: NotImplemented if args or kwargs else replace(view, dtype=dtype)


for _function, _dtype in ((T.float, torch.float32), (T.double, torch.float64)):
    view_of(_function)(_cast(_dtype))
for _function, _dtype in ((T.half, torch.float16), (T.bfloat16, torch.bfloat16)):
    view_of(_function)(_cast(_dtype))


@view_of(T.to, T.type, T.type_as)
def _to(view: View, *args: Any, **kwargs: Any) -> Any:
    """Casts; a move to another device computes the values."""
    dtype: torch.dtype | None = None
    for value in (*args, *(v for k, v in kwargs.items() if k not in ("copy", "non_blocking"))):
        if isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, Tensor):
            if value.device != view.source.rows.device:
                return NotImplemented
            dtype = value.dtype
        elif isinstance(value, (str, torch.device)) and not isinstance(value, bool):
            try:
                device = torch.device(value)
            except RuntimeError:
                return NotImplemented
            if device != view.source.rows.device and device != torch.device(view.source.rows.device.type):
                return NotImplemented
        elif value is not None and not isinstance(value, bool):
            return NotImplemented
    if dtype is not None and not dtype.is_floating_point:
        return NotImplemented
    return view if dtype is None else replace(view, dtype=dtype)


# -- scalar steps ----------------------------------------------------------------------------------------------------


def _scaled(view: View, factor: Any) -> Any:
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or view.source.head is None:
        return NotImplemented
    return replace(view, tail=(*view.tail, TailOp("scale", float(factor))))


@view_of(T.mul, T.__mul__, T.__rmul__, torch.mul, torch.multiply, T.multiply)
def _mul(view: View, other: Any) -> Any:
    return _scaled(view, other)


@view_of(T.div, T.__truediv__, torch.div, torch.true_divide, T.true_divide, torch.divide, T.divide)
def _div(view: View, other: Any) -> Any:
    number = isinstance(other, (int, float)) and other != 0
    return _scaled(view, 1.0 / other) if number else NotImplemented


@view_of(torch.tanh, T.tanh)
def _tanh(view: View) -> Any:
    return NotImplemented if view.source.head is None else replace(view, tail=(*view.tail, TailOp("tanh")))


# -- new shapes ------------------------------------------------------------------------------------------------------


@view_of(T.view, T.reshape, torch.reshape)
def _reshape(view: View, *shape: Any, **kwargs: Any) -> Any:
    shape = shape or (kwargs.get("shape") or kwargs.get("size"),)
    sizes = _sizes(shape)
    total, width = view.position.numel(), view.source.width
    if sizes is None or view.vdim != view.position.dim() or not total or not sizes:
        return NotImplemented
    if sizes[-1] == -1:
        known = 1
        for size in sizes[:-1]:
            known *= size
        if -1 in sizes[:-1] or known != total:
            return NotImplemented
    elif sizes[-1] != width:
        return NotImplemented
    return replace(view, position=view.position.reshape(sizes[:-1]), vdim=len(sizes) - 1)


@view_of(T.view_as, T.reshape_as)
def _reshape_as(view: View, other: Tensor) -> Any:
    return _reshape(view, tuple(other.shape))


@view_of(T.flatten, torch.flatten)
def _flatten(view: View, start_dim: int = 0, end_dim: int = -1) -> Any:
    start, end = _dim(view, start_dim), _dim(view, end_dim)
    if start <= view.vdim <= end:
        return view if start == end else NotImplemented
    position = view.position.flatten(_lead(view, start), _lead(view, end))
    return replace(view, position=position, vdim=view.vdim - (end - start if end < view.vdim else 0))


@view_of(T.unflatten, torch.unflatten)
def _unflatten(view: View, dim: int, sizes: Any) -> Any:
    dim = _dim(view, dim)
    if dim == view.vdim:
        return NotImplemented
    position = view.position.unflatten(_lead(view, dim), sizes)
    return replace(view, position=position, vdim=view.vdim + (len(sizes) - 1 if dim < view.vdim else 0))


@view_of(T.unsqueeze, torch.unsqueeze)
def _unsqueeze(view: View, dim: int) -> Any:
    n = len(view.shape) + 1
    if not -n <= dim < n:
        return NotImplemented
    dim %= n
    before = dim <= view.vdim
    return replace(
        view, position=view.position.unsqueeze(dim if before else dim - 1), vdim=view.vdim + (1 if before else 0)
    )


@view_of(T.squeeze, torch.squeeze)
def _squeeze(view: View, dim: Any = None) -> Any:
    if view.source.width == 1:
        return NotImplemented
    dims = range(len(view.shape)) if dim is None else (dim if isinstance(dim, (tuple, list)) else (dim,))
    gone = sorted({d for d in (_dim(view, d) for d in dims) if d != view.vdim and view.shape[d] == 1}, reverse=True)
    position, vdim = view.position, view.vdim
    for d in gone:
        position = position.squeeze(_lead(view, d))
        vdim -= d < view.vdim
    return replace(view, position=position, vdim=vdim)


def _permuted(view: View, order: list[int]) -> View:
    lead = [_lead(view, d) for d in order if d != view.vdim]
    return replace(view, position=view.position.permute(lead), vdim=order.index(view.vdim))


@view_of(T.permute, torch.permute)
def _permute(view: View, *dims: Any, **kwargs: Any) -> Any:
    order = _sizes(dims or (kwargs["dims"],))
    return NotImplemented if order is None else _permuted(view, [_dim(view, d) for d in order])


@view_of(T.transpose, torch.transpose, T.swapaxes, T.swapdims, torch.swapaxes, torch.swapdims)
def _transpose(view: View, dim0: int, dim1: int) -> Any:
    order = list(range(len(view.shape)))
    a, b = _dim(view, dim0), _dim(view, dim1)
    order[a], order[b] = b, a
    return _permuted(view, order)


@view_of(T.mT.__get__)  # type: ignore[attr-defined]
def _mt(view: View) -> Any:
    return _transpose(view, -2, -1)


@view_of(T.movedim, torch.movedim, T.moveaxis, torch.moveaxis)
def _movedim(view: View, source: Any, destination: Any) -> Any:
    if not isinstance(source, int) or not isinstance(destination, int):
        return NotImplemented
    dims = [d for d in range(len(view.shape)) if d != _dim(view, source)]
    dims.insert(_dim(view, destination), _dim(view, source))
    return _permuted(view, dims)


# -- parts -----------------------------------------------------------------------------------------------------------


@view_of(T.narrow, torch.narrow)
def _narrow(view: View, dim: int, start: Any, length: int) -> Any:
    dim = _dim(view, dim)
    if dim == view.vdim or not isinstance(start, int):
        return NotImplemented
    return replace(view, position=view.position.narrow(_lead(view, dim), start, length))


@view_of(T.select, torch.select)
def _select(view: View, dim: int, index: int) -> Any:
    dim = _dim(view, dim)
    if dim == view.vdim:
        return NotImplemented
    position = view.position.select(_lead(view, dim), index)
    return replace(view, position=position, vdim=view.vdim - (1 if dim < view.vdim else 0))


@view_of(T.index_select, torch.index_select)
def _index_select(view: View, dim: int, index: Tensor) -> Any:
    dim = _dim(view, dim)
    if dim == view.vdim:
        return NotImplemented
    return replace(view, position=view.position.index_select(_lead(view, dim), index))


def _parts(view: View, dim: int, cut: Callable[[Tensor, int], Any]) -> Any:
    dim = _dim(view, dim)
    if dim == view.vdim:
        return NotImplemented
    return tuple(replace(view, position=p) for p in cut(view.position, _lead(view, dim)))


@view_of(T.split, torch.split, T.split_with_sizes)
def _split(view: View, split_size: Any, dim: int = 0) -> Any:
    return _parts(view, dim, lambda p, d: p.split(split_size, d))


@view_of(T.chunk, torch.chunk)
def _chunk(view: View, chunks: int, dim: int = 0) -> Any:
    return _parts(view, dim, lambda p, d: p.chunk(chunks, d))


@view_of(T.unbind, torch.unbind)
def _unbind(view: View, dim: int = 0) -> Any:
    dim = _dim(view, dim)
    if dim == view.vdim:
        return NotImplemented
    vdim = view.vdim - (1 if dim < view.vdim else 0)
    return tuple(replace(view, position=p, vdim=vdim) for p in view.position.unbind(_lead(view, dim)))


@handles(T.__iter__)
def _iterate(tensor: LazyRows) -> Any:
    return iter(tensor.unbind(0)) if tensor.dim() > 1 else NotImplemented


@view_of(T.__getitem__)
def _getitem(view: View, index: Any) -> Any:
    """Any indexing of the other dims while the width is taken whole."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(i, (list, LazyRows, bool)) for i in items):
        return NotImplemented
    consumed = sum(_consumes(i) for i in items)
    free = len(view.shape) - consumed
    if free < 0:
        return NotImplemented
    dots = [n for n, i in enumerate(items) if i is Ellipsis]
    if len(dots) > 1:
        return NotImplemented
    at = dots[0] if dots else len(items)
    items[at : at + len(dots)] = [slice(None)] * free
    advanced = any(isinstance(i, Tensor) for i in items)
    if advanced and view.vdim != view.position.dim():
        return NotImplemented
    dim, out, where = 0, 0, -1
    for n, item in enumerate(items):
        takes = _consumes(item)
        if dim <= view.vdim < dim + takes:
            if item != slice(None):
                return NotImplemented
            where = n
            break
        dim += takes
        out += 0 if isinstance(item, int) else 1
    rest = items[:where] + items[where + 1 :]
    position = view.position[tuple(rest)] if rest else view.position
    # With tensors among the indices the width is last, behind whatever shape they make.
    return replace(
        view, position=position, vdim=position.dim() - _trailing_new(items[where + 1 :]) if advanced else out
    )


def _trailing_new(items: list[Any]) -> int:
    return sum(i is None for i in items)


def _consumes(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.dim()
    return 1
