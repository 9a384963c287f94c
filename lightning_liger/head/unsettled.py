"""Per-position results whose padded positions nobody has computed, and perhaps nobody will need.

``logp.gather(-1, labels)`` over a padded batch is right at real tokens and unknown at padding. Most code then
multiplies by a mask or selects with one. An :class:`Unsettled` tensor holds the values, zero where unknown, and carries
the map of unknown positions through such steps; once a mask has removed every unknown one the result is an ordinary
tensor. Whoever reads it earlier gets what the padded run gives, by way of ``settle``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_liger.head.memory import is_write, version_of
from lightning_liger.head.pending import note_pending

T = Tensor


class Unsettled(Tensor):
    """An ordinary tensor of values, zero where ``unknown`` says so. Made by :func:`unsettled`."""

    unknown: Tensor
    compute: Callable[[], Tensor]
    base: Unsettled | None
    version: int
    truth: Tensor | None
    with_graph: bool

    def settle(self) -> Tensor:
        """The values of the padded run at every position."""
        if self.truth is None:
            values = native(self)
            # in the grad mode it was made in: a metric may look first, under no_grad, and the loss later
            with torch.set_grad_enabled(self.with_graph):
                self.truth = values if version_of(values) != self.version else self.compute()
        return self.truth

    def settle_for_good(self) -> None:
        """See :mod:`lightning_liger.head.pending`."""
        self.settle()

    def settle_in_place(self) -> Tensor:
        """Make this tensor and every view of it an ordinary one that can be written to."""
        if self.base is not None:
            self.base.settle_in_place()
        values = native(self)
        if version_of(values) == self.version:
            truth = self.settle()
            values = values.copy_(truth)
        self.truth = values
        return values

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(t is not cls and t is not Tensor and t.__name__ == "LazyRows" for t in types):
            return NotImplemented  # logits meet a result of theirs: they know what to do
        return _run(func, args, kwargs or {})


def native(tensor: Tensor) -> Tensor:
    """The values as an ordinary tensor that shares memory and graph."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


# torch.compile cannot trace attributes that are set on a tensor on its way
@torch.compiler.disable
def unsettled(values: Tensor, unknown: Tensor, compute: Callable[[], Tensor], base: Unsettled | None = None) -> Tensor:
    """``values`` with ``unknown`` (bool, same shape) positions that ``compute`` can fill in."""
    with torch._C.DisableTorchFunctionSubclass():
        made: Unsettled = values.as_subclass(Unsettled)
    made.unknown, made.compute, made.base, made.truth = unknown, compute, base, None
    made.version, made.with_graph = version_of(values), torch.is_grad_enabled()
    note_pending(made)
    return made


_SHAPE_NAMES = (
    "view reshape flatten unflatten squeeze unsqueeze transpose permute contiguous clone select narrow expand "
    "expand_as view_as reshape_as unbind split chunk movedim swapaxes index_select flip roll repeat t masked_select "
    "tensor_split repeat_interleave __getitem__ detach"
)
_SAME_POSITION_NAMES = (
    "neg __neg__ exp log log1p expm1 float double half bfloat16 to type type_as abs sigmoid tanh clamp clamp_min "
    "clamp_max logical_not bitwise_not __invert__ long int bool square sqrt relu softplus logsigmoid nan_to_num "
    "isnan isfinite isinf"
)
_PAIR_NAMES = (
    "add sub mul div subtract multiply divide true_divide eq ne lt le gt ge __add__ __radd__ __sub__ __rsub__ __mul__ "
    "__rmul__ __truediv__ __rtruediv__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ maximum minimum logical_and "
    "logical_or bitwise_and bitwise_or __and__ __or__ __rand__ __ror__ pow __pow__ min max logaddexp hypot fmod"
)
_VANISHING_NAMES = "mul multiply __mul__ __rmul__ logical_and bitwise_and __and__ __rand__"


def _functions(names: str) -> set[Any]:
    return {getattr(owner, n) for n in names.split() for owner in (T, torch, F) if hasattr(owner, n)}


_SHAPES = _functions(_SHAPE_NAMES)
_SAME = _functions(_SAME_POSITION_NAMES)
_PAIRS = _functions(_PAIR_NAMES)
_VANISHING = _functions(_VANISHING_NAMES)
# with anything else these mean another function
_PAIRS_OF_TENSORS = _functions("min max")
_COPIES = _functions("contiguous clone detach")
_RESHAPES = _functions("view reshape view_as reshape_as")
_JOINS = {torch.cat, torch.stack, torch.concat, torch.concatenate}
_PROPERTIES = "shape dtype device ndim layout requires_grad is_leaf grad_fn is_cuda is_cpu is_meta _version _base"
_METHODS = "size dim numel __len__ stride is_contiguous is_floating_point __hash__"
_QUESTIONS = {getattr(T, n).__get__ for n in _PROPERTIES.split()} | {getattr(T, n) for n in _METHODS.split()}


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func in _QUESTIONS:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    first = args[0] if args else None
    if isinstance(first, Unsettled) and first.truth is None:
        if func in _SHAPES and not _others(args[1:], kwargs):
            return _shaped(func, first, args[1:], kwargs)
        if func in _SAME and not _others(args[1:], kwargs):
            return _like(func(native(first), *args[1:], **kwargs), first.unknown, func, args, kwargs)
    if func in _PAIRS and len(args) == 2 and not kwargs and (func not in _PAIRS_OF_TENSORS or _two(args)):
        return _pair(func, args)
    if func in _JOINS and isinstance(first, (tuple, list)):
        return _join(func, first, args[1:], kwargs)
    if func in (T.masked_fill, torch.masked_fill, torch.where, T.where) and len(args) == 3 and not kwargs:
        return _choice(func, args)
    if is_write(getattr(func, "__name__", "")) and isinstance(first, Unsettled):
        first.settle_in_place()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(first, *_settled(args[1:]), **_settled(kwargs))
        return first if isinstance(result, Tensor) and result is first else result
    return func(*_settled(args), **_settled(kwargs))


def _two(args: tuple[Any, ...]) -> bool:
    return all(isinstance(a, Tensor) for a in args)


def _settled(tree: Any) -> Any:
    return tree_map_only(Unsettled, Unsettled.settle, tree)


def _natives(tree: Any) -> Any:
    return tree_map_only(Unsettled, lambda t: native(t) if t.truth is None else t.truth, tree)


def _others(args: Any, kwargs: Any) -> bool:
    found = False

    def see(tensor: Unsettled) -> Unsettled:
        nonlocal found
        found = True
        return tensor

    tree_map_only(Unsettled, see, (args, kwargs))
    return found


def _like(values: Any, unknown: Tensor, func: Any, args: Any, kwargs: Any, base: Unsettled | None = None) -> Any:
    """``values`` with what is still unknown in them; ordinary when nothing is."""
    if not isinstance(values, Tensor) or not bool(unknown.any()):
        return values
    return unsettled(values, unknown, lambda: func(*_settled(args), **_settled(kwargs)), base)


def _shaped(func: Any, tensor: Unsettled, args: Any, kwargs: Any) -> Any:
    values = func(native(tensor), *args, **kwargs)
    known = {k: v for k, v in kwargs.items() if k != "memory_format"}
    if func in _COPIES:
        unknown: Any = tensor.unknown
    elif func in _RESHAPES:
        # the map's own memory may be laid out otherwise than the values'
        unknown = tensor.unknown.reshape(values.shape)
    else:
        unknown = func(tensor.unknown, *args, **known)
    if isinstance(values, Tensor):
        return _like(values, unknown, func, (tensor, *args), kwargs, tensor)

    def part(i: int) -> Callable[..., Any]:
        return lambda *a, **k: func(*a, **k)[i]

    pairs = enumerate(zip(values, unknown, strict=True))
    return tuple(_like(v, u, part(i), (tensor, *args), kwargs, tensor) for i, (v, u) in pairs)


def _unknown(value: Any, shape: torch.Size) -> Tensor | None:
    if isinstance(value, Unsettled) and value.truth is None:
        return value.unknown.expand(shape)
    return None


def _pair(func: Any, args: tuple[Any, Any]) -> Any:
    values = func(*_natives(args))
    if not isinstance(values, Tensor):
        return values
    maps = [_unknown(a, values.shape) for a in args]
    if func in _VANISHING:
        for i, other in ((0, args[1]), (1, args[0])):
            here = maps[i]
            if here is not None and maps[1 - i] is None and isinstance(other, Tensor):
                maps[i] = here & (_natives(other) != 0)
    known = [m for m in maps if m is not None]
    if not known:
        return values
    return _like(values, known[0] if len(known) == 1 else known[0] | known[1], func, args, {})


def _join(func: Any, tensors: Any, args: Any, kwargs: Any) -> Any:
    values = func(_natives(list(tensors)), *args, **kwargs)
    maps = [
        t.unknown if isinstance(t, Unsettled) and t.truth is None else torch.zeros_like(t, dtype=torch.bool)
        for t in tensors
    ]
    return _like(values, func(maps, *args, **kwargs), func, (tensors, *args), kwargs)


def _choice(func: Any, args: tuple[Any, Any, Any]) -> Any:
    """``where(c, a, b)``, ``a.where(c, b)``, ``a.masked_fill(m, v)``: what is not chosen need not be known."""
    values = func(*_natives(args))
    if func is torch.where:
        condition, taken, other = args
    elif func is T.where:
        taken, condition, other = args
    else:
        other, condition, taken = args
    if isinstance(condition, Unsettled):
        return func(*_settled(args))
    none = torch.zeros((), dtype=torch.bool, device=values.device)
    left, right = _unknown(taken, values.shape), _unknown(other, values.shape)
    unknown = torch.where(condition, none if left is None else left, none if right is None else right)
    return _like(values, unknown.expand(values.shape), func, args, {})
