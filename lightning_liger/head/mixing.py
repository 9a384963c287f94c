"""Element-wise steps on lazy tensors, and expressions of two of them.

``logits / temperature``, ``logp.exp()``, ``p * (logp - logq)``, ``logits + mask``: each stays a lazy tensor, so that
whatever reduces it over the vocabulary in the end sees one chunk at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_liger.head.lazy import LazyRows, View, handles, lazy
from lightning_liger.head.memory import detached
from lightning_liger.head.shapes import child_of, dim_of, view_of
from lightning_liger.head.tail import TailOp
from lightning_liger.head.unsettled import Unsettled, native
from lightning_liger.head.view import Given, Mix

T = Tensor


def has_head(view: View) -> bool:
    """Whether these are values of a vocabulary, not hidden states."""
    return view.source.head is not None


def step(view: View, function: Callable[[Tensor], Tensor]) -> Any:
    """``function``, element by element, as one more step of the tail."""
    if not has_head(view):
        return NotImplemented
    dtype = _probe(function, view)
    if dtype is None:
        return NotImplemented
    return _with_dtype(replace(view, tail=(*view.tail, TailOp("call", step=function))), dtype)


def _with_dtype(view: View, dtype: torch.dtype) -> View:
    """Truth values have no gradient, whatever they are cast to later."""
    return replace(view if dtype.is_floating_point else view.mapped(detached), dtype=dtype)


def _probe(function: Callable[..., Tensor], *views: Any) -> torch.dtype | None:
    """The dtype torch answers with, under autocast too; None unless it is a floating one or bool."""
    ones = [torch.ones((1, 1), dtype=v.dtype, device=v.source.device) for v in views]
    with torch.no_grad():
        dtype = function(*ones).dtype
    return dtype if dtype.is_floating_point or dtype == torch.bool else None


# -- one tensor ------------------------------------------------------------------------------------------------------


def _unary(name: str) -> None:
    functions = {getattr(owner, name) for owner in (T, torch, F) if hasattr(owner, name)}
    canonical = getattr(torch, name, None) or getattr(F, name)

    def handler(view: View, *args: Any, **kwargs: Any) -> Any:
        if not all(_is_number(a) for a in (*args, *kwargs.values())):
            return NotImplemented
        return step(view, (lambda z: canonical(z, *args, **kwargs)) if args or kwargs else canonical)

    view_of(*functions)(handler)


_UNARY = (
    "exp log log1p expm1 sigmoid abs sqrt square clamp clamp_min clamp_max clip relu softplus nan_to_num reciprocal "
    "pow erf logsigmoid hardtanh isnan isinf isfinite"
)
for _name in _UNARY.split():
    _unary(_name)
view_of(T.__pow__)(lambda view, exponent: step(view, lambda z: z**exponent) if _is_number(exponent) else NotImplemented)


@view_of(torch.tanh, T.tanh, F.tanh)
def _tanh(view: View) -> Any:
    return replace(view, tail=(*view.tail, TailOp("tanh"))) if has_head(view) else NotImplemented


@view_of(T.neg, T.__neg__, torch.neg, T.negative, torch.negative)
def _neg(view: View) -> Any:
    return _scaled(view, -1.0)


def _normaliser(kind: str, function: Callable[..., Tensor], positional: tuple[str, ...]) -> Callable[..., Any]:
    def handler(view: View, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(positional, args, strict=False)), **kwargs}
        dim, dtype = given.get("dim"), given.get("dtype")
        if not has_head(view) or dim is None or dim_of(view, dim) != view.vdim:
            return NotImplemented
        if dtype is not None:
            view = replace(view, dtype=dtype)
        found = _probe(lambda z: function(z, -1), view)
        return NotImplemented if found is None else replace(view, tail=(*view.tail, TailOp(kind)), dtype=found)

    return handler


view_of(torch.log_softmax, T.log_softmax, torch.special.log_softmax)(
    _normaliser("log_softmax", torch.log_softmax, ("dim", "dtype"))
)
view_of(F.log_softmax)(_normaliser("log_softmax", torch.log_softmax, ("dim", "_stacklevel", "dtype")))
view_of(torch.softmax, T.softmax, torch.special.softmax)(_normaliser("softmax", torch.softmax, ("dim", "dtype")))
view_of(F.softmax)(_normaliser("softmax", torch.softmax, ("dim", "_stacklevel", "dtype")))


def _scaled(view: View, factor: float) -> Any:
    return replace(view, tail=(*view.tail, TailOp("scale", float(factor)))) if has_head(view) else NotImplemented


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# -- two tensors -----------------------------------------------------------------------------------------------------


def _binary(function: Callable[[Any, Any], Tensor], *names: str, reflected: tuple[str, ...] = ()) -> None:
    def handler(reverse: bool, self: Any = None, other: Any = None, **kwargs: Any) -> Any:
        left = kwargs.pop("input", self)
        if kwargs:
            return NotImplemented
        a, b = (other, left) if reverse else (left, other)
        return mixed(function, a, b)

    owners = (T, torch)
    handles(*{getattr(o, n) for n in names for o in owners if hasattr(o, n)})(functools.partial(handler, False))
    if reflected:
        handles(*{getattr(T, n) for n in reflected if hasattr(T, n)})(functools.partial(handler, True))


_binary(torch.add, "add", "__add__", "__radd__")
_binary(torch.sub, "sub", "subtract", "__sub__", reflected=("__rsub__",))
_binary(torch.mul, "mul", "multiply", "__mul__", "__rmul__")
_binary(torch.div, "div", "divide", "true_divide", "__truediv__", reflected=("__rtruediv__", "__rdiv__"))
_binary(torch.maximum, "maximum")
_binary(torch.minimum, "minimum")
_binary(torch.logaddexp, "logaddexp")
for _compare in ("eq", "ne", "lt", "le", "gt", "ge"):
    _binary(getattr(torch, _compare), _compare, f"__{_compare}__")
_binary(torch.xlogy, "xlogy")


def mixed(function: Callable[[Any, Any], Tensor], a: Any, b: Any) -> Any:
    """``function(a, b)`` of a lazy tensor and another, a tensor or a number."""
    tensor, other = (a, b) if isinstance(a, LazyRows) else (b, a)
    if not isinstance(tensor, LazyRows):
        return NotImplemented
    first = isinstance(a, LazyRows)
    view = tensor.view_
    if not has_head(view):
        return NotImplemented
    if _is_number(other) or (isinstance(other, Tensor) and other.dim() == 0 and _is_constant(other)):
        other = other.clone() if isinstance(other, Tensor) else other  # it may change before it is used
        made = _with_number(function, view, other, first)
        return (
            made
            if made is NotImplemented
            else child_of(tensor, made, lambda values: _apply(function, values, other, first))
        )
    if not isinstance(other, Tensor):
        return NotImplemented
    sides = aligned(tensor, other)
    if sides is None:
        return NotImplemented
    left, right = sides if first else sides[::-1]
    dtype = _probe(function, left, right)
    if dtype is None:
        return NotImplemented
    made = lazy(_with_dtype(joined(function, left, right, view.vdim, dtype), dtype))
    if isinstance(other, LazyRows):
        made.parents = (tensor, other) if first else (other, tensor)
        made.replay = function
    else:
        made.parents, made.replay = (tensor,), lambda values: _apply(function, values, other, first)
    return made


def _is_constant(other: Tensor) -> bool:
    return type(other) is Tensor and not other.requires_grad


def _apply(function: Callable[[Any, Any], Tensor], values: Tensor, other: Any, first: bool) -> Tensor:
    return function(values, other) if first else function(other, values)


def _with_number(function: Callable[[Any, Any], Tensor], view: View, other: Any, first: bool) -> Any:
    if _is_number(other):
        if function is torch.mul:
            return _scaled(view, other)
        if function is torch.div and first and other != 0:
            return _scaled(view, 1.0 / other)
        if function in (torch.maximum, torch.minimum, torch.logaddexp):
            return NotImplemented  # torch itself wants two tensors
    elif other.device != view.source.device:
        return NotImplemented
    if function is torch.div and not first and _is_number(other):
        return step(view, lambda z: other / z)
    if function in (torch.add, torch.sub, torch.xlogy) and not first and _is_number(other):
        return step(view, lambda z: function(torch.as_tensor(other, dtype=z.dtype, device=z.device), z))
    return step(view, lambda z: _apply(function, z, other, first))


def aligned(tensor: LazyRows, other: Tensor) -> tuple[View, View] | None:
    """Two views with the same leading shape, the vocabulary (or one value for all of it) at the same dim."""
    view = tensor.view_
    if isinstance(other, LazyRows):
        right = other.view_
        if not has_head(right) or right.shape != view.shape or right.vdim != view.vdim:
            return None
        return (view, right) if right.source.device == view.source.device else None
    if other.device != view.source.device or other.dim() > len(view.shape):
        return None
    given = given_view(other, view)
    return None if given is None else (view, given)


def given_view(other: Tensor, like: View) -> View | None:
    """An ordinary tensor that broadcasts to ``like`` as a view of the same leading shape; None if it does not."""
    wide = other.reshape((1,) * (len(like.shape) - other.dim()) + tuple(other.shape))
    if any(s not in (1, full) for s, full in zip(wide.shape, like.shape, strict=True)):
        return None
    wide = wide.movedim(like.vdim, -1)
    root = torch.arange(wide.shape[:-1].numel(), device=other.device).view(wide.shape[:-1])
    source = _given(wide.reshape(-1, wide.shape[-1]), root)
    return View(source, root.expand(like.position.shape), like.vdim, (), other.dtype)


def _given(values: Tensor, root: Tensor) -> Given:
    if isinstance(values, Unsettled):
        return Given(native(values), root, unknown=values.unknown.any(-1), settled=values.settle)
    return Given(values, root)


def joined(
    function: Callable[[Tensor, Tensor], Tensor], left: View, right: View, vdim: int, dtype: torch.dtype
) -> View:
    """The view of ``function(left, right)``, two views with the same leading shape."""
    root = torch.arange(left.position.numel(), device=left.source.device).view(left.position.shape)
    return View(Mix(function, left, right, root), root, vdim, (), dtype)


@handles(T.masked_fill, torch.masked_fill)
def _masked_fill(input: Any, mask: Any = None, value: Any = None) -> Any:
    if not isinstance(input, LazyRows) or isinstance(mask, LazyRows) or not isinstance(mask, Tensor):
        return NotImplemented
    if isinstance(value, Tensor):
        if value.requires_grad or value.dim():
            return NotImplemented
        value = value.to(input.device)
    return _chosen(mask, input, lambda z, m: z.masked_fill(m, value))


@handles(torch.where, T.where)
def _where(condition: Any, input: Any = None, other: Any = None, **kwargs: Any) -> Any:
    if kwargs or isinstance(condition, LazyRows) or not isinstance(condition, Tensor):
        return NotImplemented
    if isinstance(input, LazyRows) and _is_number(other):
        return _chosen(condition, input, lambda z, m: torch.where(m, z, other))
    if isinstance(other, LazyRows) and _is_number(input):
        return _chosen(condition, other, lambda z, m: torch.where(m, input, z))
    return NotImplemented


def _chosen(mask: Tensor, tensor: LazyRows, op: Callable[[Tensor, Tensor], Tensor]) -> Any:
    if mask.dtype != torch.bool or not has_head(tensor.view_):
        return NotImplemented
    sides = aligned(tensor, mask)
    if sides is None:
        return NotImplemented
    made = lazy(joined(op, *sides, tensor.view_.vdim, tensor.dtype))
    made.parents, made.replay = (tensor,), lambda values: op(values, mask)
    return made
