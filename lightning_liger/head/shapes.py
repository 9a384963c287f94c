"""Shape operators on lazy tensors: they move the position map and leave the rows alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_liger.head.lazy import HANDLERS, Handler, LazyRows, View, handles, lazy

T = Tensor


def view_of(*functions: Any) -> Callable[[Handler], Handler]:
    """Register a handler that answers with a :class:`View`; the result remembers how to repeat the step on values.

    The handler names its parameters as torch does, so that keyword arguments reach them.
    """

    def register(handler: Handler) -> Handler:
        for function in functions:
            HANDLERS[function] = functools.partial(_derive, function, handler)
        return handler

    return register


def _derive(function: Any, handler: Handler, *args: Any, **kwargs: Any) -> Any:
    if args:
        tensor, rest, named = args[0], args[1:], kwargs
    else:
        tensor, rest = kwargs.get("input", kwargs.get("self")), ()
        named = {k: v for k, v in kwargs.items() if k not in ("input", "self")}
    if not isinstance(tensor, LazyRows):
        return NotImplemented
    if "axis" in named and "dim" not in named:
        named["dim"] = named.pop("axis")
    try:
        made = handler(tensor.view_, *rest, **named)
    except (TypeError, IndexError, ValueError, RuntimeError):
        # Not how the function is called, or a bad argument: torch says it in its own words, on the values.
        return NotImplemented
    if made is NotImplemented:
        return NotImplemented
    if isinstance(made, View):
        return child_of(tensor, made, lambda values: function(values, *rest, **named))

    def part(i: int) -> Callable[[Tensor], Any]:
        return lambda values: function(values, *rest, **named)[i]

    return tuple(child_of(tensor, v, part(i)) for i, v in enumerate(made))


def child_of(parent: LazyRows, view: View, replay: Callable[[Tensor], Any]) -> LazyRows:
    """A lazy tensor that follows its parent if that is computed, hooked or written to."""
    child = lazy(view)
    child.parents, child.replay = (parent,), replay
    return child


def dim_of(view: View, dim: int) -> int:
    """``dim`` counted from the front."""
    n = len(view.shape)
    if not -n <= dim < n:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-n}, {n - 1}], but got {dim})")
    return dim % n


def lead_dim(view: View, dim: int) -> int:
    """The map's own dim for logical ``dim``, which is not the width."""
    return dim if dim < view.vdim else dim - 1


def sizes_of(shape: tuple[Any, ...]) -> list[int] | None:
    if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)):
        shape = tuple(shape[0])
    return [int(s) for s in shape] if all(isinstance(s, int) for s in shape) else None


# -- new shapes ------------------------------------------------------------------------------------------------------


def _reshaped(view: View, sizes: list[int], how: Callable[..., Tensor] = T.reshape) -> Any:
    """Any shape in which the vocabulary stays a dim of its own."""
    total, width = math.prod(view.shape), view.source.width
    if not total or width == 1:
        return NotImplemented
    if -1 in sizes:
        known = math.prod(s for s in sizes if s != -1)
        if sizes.count(-1) > 1 or not known or total % known:
            return NotImplemented
        sizes = [total // known if s == -1 else s for s in sizes]
    before, seen = math.prod(view.position.shape[: view.vdim]), 1
    for vdim, size in enumerate(sizes):
        if size == width and seen == before and math.prod(sizes) == total:
            return replace(view, position=how(view.position, sizes[:vdim] + sizes[vdim + 1 :]), vdim=vdim)
        seen *= size
    return NotImplemented


@view_of(T.view)
def _view(view: View, *size: Any, dtype: Any = None) -> Any:
    if dtype is not None or (len(size) == 1 and isinstance(size[0], torch.dtype)):
        return NotImplemented
    sizes = sizes_of(size)
    # torch refuses a view that needs a copy, and so does view() of the map (an error computes the values)
    return NotImplemented if sizes is None else _reshaped(view, sizes, T.view)


@view_of(T.reshape, torch.reshape)
def _reshape(view: View, *shape: Any, **kwargs: Any) -> Any:
    sizes = sizes_of(shape or (kwargs["shape"],))
    return NotImplemented if sizes is None else _reshaped(view, sizes)


@view_of(T.view_as, T.reshape_as)
def _reshape_as(view: View, other: Tensor) -> Any:
    return _reshaped(view, list(other.shape))


@view_of(T.flatten, torch.flatten)
def _flatten(view: View, start_dim: int = 0, end_dim: int = -1) -> Any:
    start, end = dim_of(view, start_dim), dim_of(view, end_dim)
    if start <= view.vdim <= end:
        return view if start == end else NotImplemented
    position = view.position.flatten(lead_dim(view, start), lead_dim(view, end))
    return replace(view, position=position, vdim=view.vdim - (end - start if end < view.vdim else 0))


@view_of(T.unflatten, torch.unflatten)
def _unflatten(view: View, dim: int, sizes: Any) -> Any:
    dim = dim_of(view, dim)
    if dim == view.vdim:
        return NotImplemented
    position = view.position.unflatten(lead_dim(view, dim), sizes)
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
    gone = sorted({d for d in (dim_of(view, d) for d in dims) if d != view.vdim and view.shape[d] == 1}, reverse=True)
    position, vdim = view.position, view.vdim
    for d in gone:
        position = position.squeeze(d if d < vdim else d - 1)
        vdim -= d < vdim
    return replace(view, position=position, vdim=vdim)


def _permuted(view: View, order: list[int]) -> Any:
    if sorted(order) != list(range(len(view.shape))):
        return NotImplemented
    lead = [lead_dim(view, d) for d in order if d != view.vdim]
    return replace(view, position=view.position.permute(lead), vdim=order.index(view.vdim))


@view_of(T.permute, torch.permute)
def _permute(view: View, *dims: Any, **kwargs: Any) -> Any:
    order = sizes_of(dims or (kwargs["dims"],))
    return NotImplemented if order is None else _permuted(view, [dim_of(view, d) for d in order])


@view_of(T.transpose, torch.transpose)
def _transpose(view: View, dim0: int, dim1: int) -> Any:
    order = list(range(len(view.shape)))
    a, b = dim_of(view, dim0), dim_of(view, dim1)
    order[a], order[b] = b, a
    return _permuted(view, order)


@view_of(T.swapaxes, torch.swapaxes)
def _swapaxes(view: View, axis0: int, axis1: int) -> Any:
    return _transpose(view, axis0, axis1)


view_of(T.swapdims, torch.swapdims)(_transpose)


@view_of(T.mT.__get__)  # type: ignore[attr-defined]
def _mt(view: View) -> Any:
    return _transpose(view, -2, -1)


@view_of(T.t, torch.t, T.T.__get__)  # type: ignore[attr-defined]
def _t(view: View) -> Any:
    return _transpose(view, 0, 1) if len(view.shape) == 2 else NotImplemented


@view_of(T.movedim, torch.movedim, T.moveaxis, torch.moveaxis)
def _movedim(view: View, source: Any, destination: Any) -> Any:
    sources = [dim_of(view, d) for d in ((source,) if isinstance(source, int) else source)]
    targets = [dim_of(view, d) for d in ((destination,) if isinstance(destination, int) else destination)]
    if len(sources) != len(targets) or len({*sources}) != len(sources) or len({*targets}) != len(targets):
        return NotImplemented
    rest = iter(d for d in range(len(view.shape)) if d not in sources)
    at = dict(zip(targets, sources, strict=True))
    return _permuted(view, [at[n] if n in at else next(rest) for n in range(len(view.shape))])


@view_of(T.expand, T.broadcast_to, torch.broadcast_to)
def _expand(view: View, *size: Any, **kwargs: Any) -> Any:
    sizes = sizes_of(size or (kwargs["size"],))
    if sizes is None or len(sizes) < len(view.shape):
        return NotImplemented
    vdim = view.vdim + len(sizes) - len(view.shape)
    if sizes[vdim] not in (-1, view.source.width):
        return NotImplemented
    lead = sizes[:vdim] + sizes[vdim + 1 :]
    return replace(view, position=view.position.expand(lead), vdim=vdim)


@view_of(T.expand_as)
def _expand_as(view: View, other: Tensor) -> Any:
    return _expand(view, tuple(other.shape))


@handles(torch.broadcast_tensors)
def _broadcast_tensors(*tensors: Any) -> Any:
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    made = tuple(t.expand(shape) for t in tensors)
    return made if any(isinstance(t, LazyRows) for t in made) else NotImplemented


@view_of(T.repeat, torch.tile, T.tile)
def _repeat(view: View, *repeats: Any, **kwargs: Any) -> Any:
    counts = sizes_of(repeats or (kwargs.get("repeats", kwargs.get("dims")),))
    if counts is None or len(counts) < len(view.shape):
        return NotImplemented
    vdim = view.vdim + len(counts) - len(view.shape)
    if counts[vdim] != 1:
        return NotImplemented
    lead = counts[:vdim] + counts[vdim + 1 :]
    return replace(view, position=view.position.repeat(lead), vdim=vdim)


@view_of(T.repeat_interleave, torch.repeat_interleave)
def _repeat_interleave(view: View, repeats: Any, dim: Any = None, *, output_size: Any = None) -> Any:
    if dim is None or dim_of(view, dim) == view.vdim:
        return NotImplemented
    lead = lead_dim(view, dim_of(view, dim))
    return replace(view, position=view.position.repeat_interleave(repeats, lead, output_size=output_size))


@view_of(T.flip, torch.flip)
def _flip(view: View, *dims: Any, **kwargs: Any) -> Any:
    given = sizes_of(dims or (kwargs["dims"],))
    if given is None or view.vdim in (found := [dim_of(view, d) for d in given]):
        return NotImplemented
    return replace(view, position=view.position.flip([lead_dim(view, d) for d in found]))


@view_of(T.roll, torch.roll)
def _roll(view: View, shifts: Any, dims: Any = None) -> Any:
    found = [dim_of(view, d) for d in ((dims,) if isinstance(dims, int) else dims or ())]
    if not found or view.vdim in found:
        return NotImplemented
    return replace(view, position=view.position.roll(shifts, [lead_dim(view, d) for d in found]))
