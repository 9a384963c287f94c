"""Readers of logits and log-probabilities that answer per position, without the full tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_liger.head.hidden_rows import picked
from lightning_liger.head.lazy import HANDLERS, LazyRows, handles, lazy
from lightning_liger.head.likelihood import likelihood_of
from lightning_liger.head.mixing import has_head
from lightning_liger.head.parts import consumes, expanded_index
from lightning_liger.head.rowwise import rounded, rowwise
from lightning_liger.head.shapes import dim_of, lead_dim

T = Tensor


def reader(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a reader of one lazy tensor, whose first parameter is that tensor; ``axis`` reads as ``dim``."""

    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if "axis" in kwargs:
                kwargs["dim"] = kwargs.pop("axis")
            tensor = args[0] if args else kwargs.pop("input", None)
            if not isinstance(tensor, LazyRows) or not has_head(tensor.view_) or kwargs.get("out") is not None:
                return NotImplemented
            try:
                return handler(tensor, *args[1:], **{k: v for k, v in kwargs.items() if k != "out"})
            except TypeError:  # not how the function is called: torch says it in its own words, on the values
                return NotImplemented

        handles(*functions)(call)
        return handler

    return register


# -- picking entries -------------------------------------------------------------------------------------------------


@reader(T.gather, torch.gather)
def _gather(tensor: LazyRows, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Any:
    view = tensor.view_
    dim = dim_of(view, dim)
    if not isinstance(index, Tensor) or isinstance(index, LazyRows) or index.dim() != len(view.shape):
        return NotImplemented
    if dim != view.vdim:
        if index.shape[view.vdim] != view.source.width or index.stride(view.vdim) != 0:
            return NotImplemented
        # the same row for the whole vocabulary: an index that was expanded
        position = view.position.gather(lead_dim(view, dim), index.select(view.vdim, 0))
        made = lazy(replace(view, position=position))
        made.parents, made.replay = (tensor,), lambda values: torch.gather(values, dim, index)
        return made
    wanted = index.movedim(dim, -1)
    lead = wanted.shape[:-1]
    if any(n > full for n, full in zip(lead, view.position.shape, strict=True)):
        return NotImplemented
    if lead != view.position.shape:
        corner = tuple(slice(n) for n in lead)
        tensor = tensor.movedim(view.vdim, -1)[corner]  # type: ignore[assignment]
    alone = likelihood_of(tensor.view_, keepdim=True) if wanted.shape[-1] == 1 else None
    (found,) = rowwise(tensor, lambda z, i: (z.gather(-1, i),), "gather", (wanted,), alone=alone)
    return found.to(view.dtype).movedim(-1, dim)


@reader(T.take_along_dim, torch.take_along_dim)
def _take_along_dim(tensor: LazyRows, indices: Tensor, dim: Any = None) -> Any:
    if dim is None or indices.dim() != tensor.dim():
        return NotImplemented
    dim = dim_of(tensor.view_, dim)
    shape = [indices.shape[d] if d == dim or n == 1 else n for d, n in enumerate(tensor.shape)]
    if any(tensor.shape[d] != n for d, n in enumerate(shape) if d != dim):
        return NotImplemented
    return _gather(tensor, dim, indices.expand(shape))


def _indexed(tensor: LazyRows, index: Any) -> Any:
    """Indices that reach into the vocabulary: ``logp[arange, labels]``, ``logits[:, -1, yes_id]``."""
    view = tensor.view_
    items = expanded_index(view, index) if has_head(view) else None
    if items is None:
        return NotImplemented
    dim, where = 0, -1
    for n, item in enumerate(items):
        if dim <= view.vdim < dim + consumes(item):
            where = n
            break
        dim += consumes(item)
    wanted, rest = items[where], items[:where] + items[where + 1 :]
    if isinstance(wanted, Tensor) and wanted.dtype in (torch.bool, torch.uint8):
        return NotImplemented
    if all(isinstance(i, (int, Tensor)) and not _is_mask(i) for i in rest):
        return _each(tensor, wanted, rest)
    if any(isinstance(i, Tensor) for i in rest) or view.vdim != view.position.dim() or where != len(items) - 1:
        return NotImplemented
    numbers = [n for n, i in enumerate(rest) if isinstance(i, int)]
    if isinstance(wanted, Tensor) and numbers and numbers != list(range(numbers[0], len(rest))):
        return NotImplemented  # torch moves the indexed dims to the front then
    part = tensor[(*rest, slice(None))]
    if not isinstance(part, LazyRows):
        return NotImplemented
    (found,) = rowwise(part, lambda z: (z[:, wanted],), "indexing")
    return found.to(view.dtype)


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)


def _each(tensor: LazyRows, wanted: Any, rest: list[Any]) -> Any:
    """One id for each of several positions, all given by tensors or numbers."""
    view = tensor.view_
    if isinstance(wanted, slice):
        (found,) = rowwise(tensor, lambda z: (z[:, wanted],), "indexing") if not rest else (None,)
        return NotImplemented if found is None else found.to(view.dtype)
    device = view.source.device
    ids = torch.as_tensor(wanted, device=device)
    places = [torch.as_tensor(i, device=device) for i in rest]
    ids, *places = torch.broadcast_tensors(ids, *places)
    made = lazy(replace(view, position=view.position[tuple(places)] if places else view.position, vdim=ids.dim()))
    if not places:  # a single row of logits, (V,)
        (found,) = rowwise(tensor, lambda z: (z[:, ids],), "indexing")
        return found.to(view.dtype)
    made.parents, made.replay = (tensor,), lambda values: values.movedim(view.vdim, -1)[tuple(places)]
    alone = likelihood_of(made.view_, keepdim=False)
    (found,) = rowwise(made, lambda z, i: (z.gather(-1, i[:, None])[:, 0],), "indexing", (ids,), alone=alone)
    return found.to(view.dtype)


_moved = HANDLERS[T.__getitem__]


@handles(T.__getitem__)
def _getitem(tensor: Any, index: Any) -> Any:
    made = _moved(tensor, index)
    if isinstance(made, LazyRows) and any(isinstance(i, (Tensor, list)) for i in _items(index)):
        return picked(made)  # a copy: writing into it changes nothing else
    return _indexed(tensor, index) if made is NotImplemented and isinstance(tensor, LazyRows) else made


def _items(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


# -- reductions over the vocabulary ----------------------------------------------------------------------------------


def _reduction(program: Callable[[Tensor], Tensor], rest: Callable[..., Tensor]) -> Callable[..., Any]:
    """``program`` over the vocabulary, ``rest`` over the other dims that are asked for."""

    def handler(tensor: LazyRows, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
        view = tensor.view_
        if dtype is not None:
            if not dtype.is_floating_point:
                return NotImplemented
            view = replace(view, dtype=dtype)
        given = (dim,) if isinstance(dim, int) else tuple(dim) if dim is not None and len(dim) else None
        dims = range(len(view.shape)) if given is None else [dim_of(view, d) for d in given]
        if tensor.stacked is not None and list(dims) == [tensor.stacked[1]] and rest in _OF_PAIRS and dtype is None:
            # a mixture of models: logsumexp(stack([p, q]), 0)
            parts: tuple[Any, ...] = tensor.stacked[0]
            made = functools.reduce(_OF_PAIRS[rest], parts)
            return made.unsqueeze(dims[0]) if keepdim else made
        if view.vdim not in dims or len(set(dims)) != len(dims):
            return NotImplemented
        with torch.no_grad():
            answer = rest(torch.ones((1, 1), dtype=view.dtype, device=view.source.device), dim=-1).dtype
        (found,) = rowwise(tensor, lambda z: (program(z),), getattr(rest, "__name__", "reduction"), key="over width")
        found = found.to(answer)
        if keepdim:
            found = found.unsqueeze(view.vdim)
            others = [d for d in dims if d != view.vdim]
        else:
            others = [lead_dim(view, d) for d in dims if d != view.vdim]
        return rest(found, dim=others, keepdim=keepdim) if others else found

    return handler


_OF_PAIRS: dict[Any, Callable[..., Tensor]] = {torch.logsumexp: torch.logaddexp, torch.sum: torch.add}

reader(T.sum, torch.sum)(_reduction(lambda z: z.sum(-1), torch.sum))
reader(T.mean, torch.mean)(_reduction(lambda z: z.mean(-1), torch.mean))
reader(T.logsumexp, torch.logsumexp, torch.special.logsumexp)(_reduction(lambda z: z.logsumexp(-1), torch.logsumexp))
reader(T.amax, torch.amax)(_reduction(lambda z: z.amax(-1), torch.amax))
reader(T.amin, torch.amin)(_reduction(lambda z: z.amin(-1), torch.amin))


def _question(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def handler(tensor: LazyRows, dim: Any = None, keepdim: bool = False) -> Any:
        view = tensor.view_
        if dim is not None and (not isinstance(dim, int) or dim_of(view, dim) != view.vdim):
            return NotImplemented
        (found,) = rowwise(tensor, lambda z: (function(z, -1),), function.__name__, key="question")
        if dim is None:
            return function(found)
        return found.unsqueeze(view.vdim) if keepdim else found

    return handler


reader(T.any, torch.any)(_question(torch.any))
reader(T.all, torch.all)(_question(torch.all))


def _extreme(function: Callable[..., Any], answer: Any) -> Callable[..., Any]:
    def handler(tensor: LazyRows, dim: Any = None, keepdim: bool = False) -> Any:
        view = tensor.view_
        if isinstance(dim, Tensor):
            return NotImplemented
        if dim is None:
            (best,) = rowwise(tensor, lambda z: (function(z, -1).values,), function.__name__, key="best")
            return function(best).to(view.dtype)
        if dim_of(view, dim) != view.vdim:
            return NotImplemented
        program = rounded(lambda z: tuple(function(z, -1)), view.dtype)
        values, ids = rowwise(tensor, program, function.__name__, key="with ids")
        if keepdim:
            values, ids = values.unsqueeze(view.vdim), ids.unsqueeze(view.vdim)
        return answer((values.to(view.dtype), ids))

    return handler


reader(T.max, torch.max)(_extreme(torch.max, torch.return_types.max))
reader(T.min, torch.min)(_extreme(torch.min, torch.return_types.min))


def _best_id(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def handler(tensor: LazyRows, dim: Any = None, keepdim: bool = False) -> Any:
        view = tensor.view_
        if dim is None or dim_of(view, dim) != view.vdim:
            return NotImplemented
        with torch.no_grad():
            program = rounded(lambda z: (function(z, -1),), view.dtype)
            (ids,) = rowwise(tensor, program, function.__name__, key="ids")
        return ids.unsqueeze(view.vdim) if keepdim else ids

    return handler


reader(T.argmax, torch.argmax)(_best_id(torch.argmax))
reader(T.argmin, torch.argmin)(_best_id(torch.argmin))


@reader(T.topk, torch.topk)
def _topk(tensor: LazyRows, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    view = tensor.view_
    if dim_of(view, dim) != view.vdim or not 0 < k <= view.source.width:
        return NotImplemented
    best = functools.partial(torch.topk, k=k, dim=-1, largest=largest, sorted=sorted)
    program = rounded(lambda z: tuple(best(z)), view.dtype)
    values, ids = rowwise(tensor, program, "topk", key=(k, largest, sorted))
    made = (values.to(view.dtype).movedim(-1, view.vdim), ids.movedim(-1, view.vdim))
    return torch.return_types.topk(made)


def _spread(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def handler(tensor: LazyRows, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
        view = tensor.view_
        if not isinstance(dim, int) or dim_of(view, dim) != view.vdim or kwargs.keys() - {"correction", "unbiased"}:
            return NotImplemented
        program = functools.partial(function, dim=-1, **kwargs)
        (found,) = rowwise(tensor, lambda z: (program(z),), function.__name__, key=tuple(sorted(kwargs.items())))
        found = found.to(view.dtype)
        return found.unsqueeze(view.vdim) if keepdim else found

    return handler


reader(T.var, torch.var)(_spread(torch.var))
reader(T.std, torch.std)(_spread(torch.std))
