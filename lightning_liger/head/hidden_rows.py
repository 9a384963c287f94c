"""Row by row functions of lazily padded hidden states stay on the rows, so that padding is neither computed nor read.

A classifier, a value head, the dense-activation-norm block in front of a masked language model's decoder, an adapter
beside a linear layer: each maps one token's hidden state to another vector. Their result on packed rows, seen through
the same map, is their result on the padded batch. Whoever reads padded positions later gets the same function of the
padded run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_liger.head.lazy import LazyRows, lazy
from lightning_liger.head.unsettled import unsettled
from lightning_liger.head.view import PlainSource, Source, View
from lightning_liger.mirrored import cpu_values

T = Tensor

# Functions of one tensor whose last dimension is the vector; other tensor arguments are weights.
_LAST_DIM: set[Any] = {F.linear, F.layer_norm, F.rms_norm, torch.rms_norm, torch.layer_norm}

_UNARY_NAMES = "relu gelu silu tanh sigmoid softplus elu celu leaky_relu selu mish hardtanh relu6 logsigmoid softsign"
_UNARY_NAMES += " dropout"
_TENSOR_NAMES = "relu tanh sigmoid neg negative exp sqrt rsqrt square abs reciprocal erf pow"
_ELEMENTWISE: set[Any] = {getattr(F, name) for name in _UNARY_NAMES.split()}
_ELEMENTWISE |= {getattr(o, n) for n in _TENSOR_NAMES.split() for o in (torch, T) if hasattr(o, n)}
_ELEMENTWISE |= {T.__pow__, T.__neg__}

_BINARY: set[Any] = {
    getattr(o, n) for n in ("add", "sub", "mul", "div", "subtract", "multiply", "divide") for o in (torch, T)
}
_BINARY |= {T.__add__, T.__radd__, T.__sub__, T.__rsub__, T.__mul__, T.__rmul__, T.__truediv__, T.__rtruediv__}

_OVER_WIDTH: set[Any] = {torch.mean, T.mean}

# One number from each row.
_REDUCTIONS: set[Any] = {
    getattr(o, n) for n in ("argmax", "argmin", "sum", "mean", "amax", "amin", "logsumexp") for o in (torch, T)
}

# After these padding may no longer matter: a mask removes it, or a few of the positions are picked.
_MASKING: set[Any] = {torch.mul, torch.multiply, T.mul, T.multiply, T.__mul__, T.__rmul__, torch.where, T.where}
_MASKING |= {torch.masked_fill, T.masked_fill, T.squeeze, torch.squeeze, T.select, torch.select, T.__getitem__}


@dataclass(frozen=True)
class _Mapped:
    """The padded values of a function of lazy tensors: the function of their padded values."""

    function: Callable[..., Tensor]
    sources: tuple[Source, ...]

    @property
    def _plains(self) -> list[PlainSource]:
        return [s.plain for s in self.sources if s.plain is not None]

    def value(self, path: tuple[Any, ...]) -> Tensor:
        return self.function(*(s.plain.value(s.path) for s in self.sources if s.plain is not None))

    def scored(self, what: str) -> None:
        for plain in self._plains:
            plain.scored(what)

    def read(self, path: tuple[Any, ...], what: str, differentiable: bool) -> Tensor | None:
        found = [s.plain.read(s.path, what, differentiable) for s in self.sources if s.plain is not None]
        return None if any(f is None for f in found) else self.function(*found)

    def watch(self, what: str) -> Callable[[Tensor], None] | None:
        return self._plains[0].watch(what)


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func`` on the rows of the lazy tensors among its arguments, or NotImplemented where that is another function."""
    if func is F.cross_entropy:
        return _cross_entropy(*args, **kwargs)
    result = _on_rows(func, args, kwargs)
    if result is NotImplemented and func in _REDUCTIONS and _is_over_width(args, kwargs):
        return _on_known(func, args, kwargs)
    if result is not NotImplemented or func not in _MASKING:
        return result
    return _on_known(func, args, kwargs)


def _on_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func not in _LAST_DIM and func not in _ELEMENTWISE and func not in _BINARY and func not in _OVER_WIDTH:
        return NotImplemented
    given = [*args, *kwargs.values()]
    lazies = [a for a in given if isinstance(a, LazyRows)]
    views = [t.view_ for t in lazies]
    if len(views) == 1 and _is_small_part(views[0]):
        return _on_part(func, args, kwargs, lazies[0])
    if not _same_rows(views) or not _fits(func, args, kwargs, views[0].source.width):
        return NotImplemented

    def function(*tensors: Tensor) -> Tensor:
        left = iter(tensors)
        filled = [next(left) if isinstance(a, LazyRows) else a for a in args]
        named = {k: next(left) if isinstance(a, LazyRows) else a for k, a in kwargs.items()}
        return func(*filled, **named)

    def as_seen(*tensors: Tensor) -> Tensor:
        """Values of the padded run, in the dtype that the reader's tensors have."""
        return function(*(t.to(v.dtype) for t, v in zip(tensors, views, strict=True)))

    first = views[0]
    rows = as_seen(*(v.source.rows for v in views))
    if rows.dim() != 2 or rows.shape[0] != first.source.rows.shape[0]:
        return NotImplemented
    for tensor in lazies:
        tensor.consume(getattr(func, "__name__", str(func)))
    plain = None if first.source.plain is None else _Mapped(as_seen, tuple(v.source for v in views))
    return lazy(replace(first, source=replace(first.source, rows=rows, plain=plain, path=()), dtype=rows.dtype))


def _is_over_width(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    tensor = args[0] if args else None
    if not isinstance(tensor, LazyRows) or not isinstance(dim, int) or isinstance(dim, bool):
        return False
    return dim % tensor.dim() == tensor.view_.vdim and not kwargs.get("keepdim") and len(args) < 3


def _on_known(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func`` on values that know which of them nobody has computed yet."""
    lazies = [a for a in (*args, *kwargs.values()) if isinstance(a, LazyRows)]
    if len(lazies) != 1 or not isinstance(lazies[0].view_.source, Source) or lazies[0].view_.source.head is not None:
        return NotImplemented
    view, what = lazies[0].view_, getattr(func, "__name__", str(func))
    pads = view.padding()
    if pads is None or not bool(pads.any()):
        return NotImplemented
    differentiable = torch.is_grad_enabled() and lazies[0].node is not None
    lazies[0].consume(what)

    def compute() -> Tensor:
        full = view.with_padding(what, differentiable)
        values = full.dense()
        full.watch_padding(values, what)
        return values

    values = view.dense()
    if func in _REDUCTIONS:
        return unsettled(func(values, *args[1:], **kwargs), pads, lambda: func(compute(), *args[1:], **kwargs))
    known = unsettled(values, pads.unsqueeze(view.vdim).expand(values.shape), compute)
    args = tuple(known if isinstance(a, LazyRows) else a for a in args)
    return func(*args, **{k: known if isinstance(a, LazyRows) else a for k, a in kwargs.items()})


def _is_small_part(view: View) -> bool:
    """``hidden[:, 0]``: cheaper read than computed together with all the other rows."""
    return isinstance(view.source, Source) and 2 * view.position.numel() <= view.source.root.numel()


def picked(tensor: LazyRows) -> Tensor:
    """A few rows that were picked by number, none of them padding, as ordinary values: a reward at each last token."""
    view = tensor.view_
    if not view.is_hidden_rows() or not _is_small_part(view) or cpu_values(view.position) is None:
        return tensor
    pads = view.padding()
    if pads is not None and bool(pads.any()):
        return tensor
    tensor.consume("indexing")
    return view.dense()


def _on_part(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: LazyRows) -> Any:
    """``func`` on the values of a few rows, if none of them is padding."""
    view = tensor.view_
    pads = view.padding()
    if _writes(func, args, kwargs) or not view.is_hidden_rows() or (pads is not None and bool(pads.any())):
        return NotImplemented
    tensor.consume(getattr(func, "__name__", str(func)))
    values = view.dense()
    filled = [values if isinstance(a, LazyRows) else a for a in args]
    return func(*filled, **{k: values if isinstance(a, LazyRows) else a for k, a in kwargs.items()})


def _same_rows(views: list[View]) -> bool:
    """Hidden states, mostly whole, of one call."""
    if not all(v.is_hidden_rows() and v.source.row_of is not None for v in views):
        return False
    first = views[0]
    if _is_small_part(first):
        return False
    return all(
        _same(v.position, first.position)
        and _same(v.source.row_of, first.source.row_of)
        and (v.source.plain is None) == (first.source.plain is None)
        and v.source.rows.shape[0] == first.source.rows.shape[0]
        and v.source.sequence == first.source.sequence
        for v in views[1:]
    )


def _same(a: Tensor, b: Tensor) -> bool:
    """One map or a copy of it; maps are made by ``arange`` or shared, so equal geometry on equal memory is enough."""
    if a is b:
        return True
    if a.shape != b.shape or a.device != b.device:
        return False
    if a.data_ptr() == b.data_ptr():
        return a.stride() == b.stride()
    return a.device.type == "cpu" and torch.equal(a, b)


def _writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the function changes its argument, or another tensor, in place."""
    if kwargs.get("inplace") or kwargs.get("out") is not None:
        return True
    if func is F.dropout:
        return len(args) > 3 and bool(args[3])
    return func in (F.relu, F.silu, F.elu, F.mish, F.selu) and any(a is True for a in args[1:])


def _fits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], width: int) -> bool:
    others = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, Tensor)]
    if _writes(func, args, kwargs):
        return False
    alone = bool(args) and isinstance(args[0], LazyRows) and not any(isinstance(a, LazyRows) for a in others)
    if func in _LAST_DIM:
        return alone and (func is F.linear or _one_dim(args, kwargs))
    if func in _OVER_WIDTH:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        keep = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
        return alone and dim in (-1, (-1,), [-1]) and keep is True
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and not isinstance(a, LazyRows)]
    return all(a.dim() == 0 or (a.dim() == 1 and a.shape[0] in (1, width)) for a in tensors)


def _one_dim(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
    return isinstance(shape, (tuple, list, torch.Size)) and len(shape) == 1


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Scores of a classifier over tokens: the rows whose label counts, so that padding is not read."""
    if (
        not isinstance(input, LazyRows)
        or isinstance(target, LazyRows)
        or size_average is not None
        or reduce is not None
    ):
        return NotImplemented
    view, labels = input.view_, target
    if not isinstance(view.source, Source) or view.source.head is not None or view.tail:
        return NotImplemented
    if view.vdim != (1 if input.dim() > 1 else 0) or labels.is_floating_point() or not view.position.dim():
        return NotImplemented
    if labels.shape != view.position.shape or view.source.row_of is None or not 0 <= view.vdim <= 1:
        return NotImplemented
    flat = labels.reshape(-1)
    keep = (flat != ignore_index).nonzero()[:, 0]
    position = view.position.reshape(-1)[keep]
    if view.source.plain is not None and bool((view.source.row_of[position] < 0).any()):
        view = view.scored("the loss")
    input.consume("cross_entropy")
    rows = view.rows(position).to(view.dtype)
    loss = F.cross_entropy(rows, flat[keep], weight, reduction=reduction, label_smoothing=label_smoothing)
    if reduction == "none":
        return loss.new_zeros(flat.numel()).index_put((keep,), loss).view(labels.shape)
    return loss
