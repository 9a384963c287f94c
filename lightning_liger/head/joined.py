"""Rows of several model calls as one source: ``torch.cat([chosen_logits, rejected_logits])``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_liger.head.lazy import LazyRows, handles, lazy
from lightning_liger.head.shapes import dim_of
from lightning_liger.head.view import PlainSource, Source, View


class _JoinedPlain(PlainSource):
    """The padded runs of several calls, one after the other, as ``(P, H)``."""

    def __init__(self, sources: list[Source]) -> None:
        self._sources = sources

    def value(self, path: tuple[Any, ...]) -> Tensor:
        return self._all([None if s.plain is None else s.plain.value(s.path) for s in self._sources])

    def scored(self, what: str) -> None:
        for source in self._sources:
            if source.plain is not None:
                source.plain.scored(what)

    def read(self, path: tuple[Any, ...], what: str, differentiable: bool) -> Tensor | None:
        found = [None if s.plain is None else s.plain.read(s.path, what, differentiable) for s in self._sources]
        return None if all(f is None for f in found) else self._all(found)

    def watch(self, what: str) -> Callable[[Tensor], None] | None:
        hooks = [h for s in self._sources if s.plain is not None and (h := s.plain.watch(what)) is not None]
        return hooks[0] if hooks else None

    def _all(self, found: list[Tensor | None]) -> Tensor:
        return torch.cat(
            [
                s.hidden_at(s.root.reshape(-1)) if f is None else f.reshape(-1, f.shape[-1])
                for s, f in zip(self._sources, found, strict=True)
            ]
        )


def one_source(views: list[View]) -> tuple[Source, list[Tensor]]:
    """One source that holds the rows of all views (same head), and each view's position map into it."""
    found: dict[int, Source] = {id(v.source): v.source for v in views}
    if len(found) == 1:
        return views[0].source, [v.position for v in views]
    together = len({s.sequence for s in found.values()}) == 1
    sources = list(found.values()) if together else [s.whole() for s in found.values()]
    each = sum(s.rows.shape[0] for s in sources)
    starts, rows_before = {}, 0
    positions_before = 0
    row_of = []
    for name, s in zip(found, sources, strict=True):
        starts[name] = positions_before
        row = s.root.reshape(-1) if s.row_of is None else s.row_of
        count = s.rows.shape[0]
        # where rows are divided, each rank has its own of one source after the other
        place = row if s.sequence is None else row // count * each + row % count
        row_of.append(torch.where(row < 0, row, place + rows_before))
        rows_before += count
        positions_before += row.numel()
    padded = any(s.plain is not None for s in sources)
    joined = replace(
        sources[0],
        rows=torch.cat([s.rows for s in sources]),
        row_of=torch.cat(row_of),
        root=torch.arange(positions_before, device=sources[0].device),
        plain=_JoinedPlain(sources) if padded else None,
        path=(),
    )
    return joined, [v.position + starts[id(v.source)] for v in views]


@handles(torch.cat, torch.concat, torch.concatenate)
def _cat(tensors: Any, dim: int = 0, *, out: Any = None, axis: Any = None) -> Any:
    dim = dim if axis is None else axis
    return _together(tensors, lambda view: dim_of(view, dim), torch.cat) if out is None else NotImplemented


@handles(torch.stack)
def _stack(tensors: Any, dim: int = 0, *, out: Any = None) -> Any:
    if out is not None or not all(isinstance(t, LazyRows) for t in tensors):
        return NotImplemented
    if len({tuple(t.shape) for t in tensors}) != 1:
        return NotImplemented
    dim = dim % (tensors[0].dim() + 1)
    made = _cat([t.unsqueeze(dim) for t in tensors], dim)
    if made is NotImplemented and all(t.view_.source.head is not None for t in tensors):
        made = _of_several_heads(tensors, dim)
    if isinstance(made, LazyRows):
        made.stacked = (tuple(tensors), dim)
    return made


def _of_several_heads(tensors: Any, dim: int) -> Any:
    """The stack as an expression: each tensor where its index is, zero elsewhere, and their sum."""
    first = tensors[0]
    if any(t.view_.vdim != first.view_.vdim or t.dtype != first.dtype for t in tensors):
        return NotImplemented
    shape = [len(tensors) if d == dim else 1 for d in range(first.dim() + 1)]
    number = torch.arange(len(tensors), device=first.device).view(shape)
    total: Any = None
    for i, tensor in enumerate(tensors):
        spread = tensor.unsqueeze(dim).expand([len(tensors) if d == dim else -1 for d in range(first.dim() + 1)])
        part = spread.masked_fill(number != i, 0.0)
        total = part if total is None else total + part
    return total


def _together(tensors: Any, axis: Callable[[View], int], function: Callable[..., Tensor]) -> Any:
    """Rows of the same head, of one model call or of several, one after the other."""
    if not tensors or not all(isinstance(t, LazyRows) for t in tensors):
        return NotImplemented
    views = [t.view_ for t in tensors]
    first = views[0]
    dim = axis(first)
    if dim == first.vdim or not all(_joinable(v, first) for v in views):
        return NotImplemented
    source, maps = one_source(views)
    lead = dim if dim < first.vdim else dim - 1
    try:
        position = torch.cat(maps, lead)
    except RuntimeError:  # shapes that do not fit: torch says so on the values
        return NotImplemented
    made = lazy(replace(first, source=source, position=position))
    made.parents, made.replay = tuple(tensors), lambda *values: function(values, dim)
    return made


def _joinable(view: View, first: View) -> bool:
    if (view.vdim, view.tail, view.dtype) != (first.vdim, first.tail, first.dtype):
        return False
    if view.source is first.source:
        return True
    return (
        isinstance(view.source, Source) and isinstance(first.source, Source) and _same_head(view.source, first.source)
    )


def _same_head(a: Source, b: Source) -> bool:
    if a.head is None or b.head is None:
        return a.head is b.head and a.rows.shape[-1] == b.rows.shape[-1] and a.rows.dtype == b.rows.dtype
    return a.head.weight is b.head.weight and a.head.bias is b.head.bias and a.head.dtype == b.head.dtype
