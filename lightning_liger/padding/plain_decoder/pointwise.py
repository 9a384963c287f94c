"""Element by element: on the rows, with every other tensor read at the real tokens' rows and columns."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_liger.head.rows import take_rows
from lightning_liger.padding.plain_decoder.dispatch import handles, name_of, named
from lightning_liger.padding.plain_decoder.ragged import (
    Packing,
    RaggedTensor,
    Unpackable,
    native,
    note_place,
    rows_of,
    wrap,
)

T = Tensor

_ACTIVATIONS = "relu gelu silu tanh sigmoid softplus elu celu leaky_relu selu mish hardtanh relu6 logsigmoid softsign "
_ACTIVATIONS += "hardswish hardsigmoid threshold dropout alpha_dropout tanhshrink softshrink"
_UNARY = (
    "relu tanh sigmoid neg negative exp exp2 expm1 log log1p log2 sqrt rsqrt square abs absolute reciprocal erf sin "
)
_UNARY += "cos round floor ceil sign trunc isnan isinf isfinite nan_to_num logical_not bitwise_not positive real imag "
_UNARY += "clamp clamp_min clamp_max clip dropout zeros_like ones_like full_like empty_like rand_like randn_like conj"
_BINARY = (
    "add sub mul div true_divide subtract multiply divide maximum minimum fmax fmin pow float_power fmod remainder "
)
_BINARY += "atan2 where masked_fill addcmul addcdiv lerp eq ne lt le gt ge logical_and logical_or logical_xor "
_BINARY += "bitwise_and bitwise_or rsub softmax_backward_data logaddexp polar complex"
_DUNDER = (
    "add radd sub rsub mul rmul truediv rtruediv pow rpow neg pos abs eq ne lt le gt ge and or xor invert mod rdiv"
)

POINTWISE: set[Any] = named(_ACTIVATIONS, F) | named(_UNARY, torch, T) | named(_BINARY, torch, T)
POINTWISE |= named(" ".join(f"__{name}__" for name in _DUNDER.split()), T)

# What may answer with a view of its argument, or with the argument itself.
_ALIASES: set[Any] = named("dropout alpha_dropout positive real imag conj __pos__", torch, T, F)

_CASTS: set[Any] = named("to type_as float half bfloat16 double int long bool type cuda cpu", T)

_IN_PLACE = "add_ sub_ mul_ div_ pow_ neg_ exp_ relu_ tanh_ sigmoid_ clamp_ clamp_min_ clamp_max_ masked_fill_ zero_ "
_IN_PLACE += "fill_ square_ sqrt_ rsqrt_ reciprocal_ addcmul_ addcdiv_ lerp_ dropout_"
_WRITES: set[Any] = named(_IN_PLACE, T, torch, F) | named("__iadd__ __isub__ __imul__ __itruediv__ __ipow__", T)
_BUILT_IN: set[Any] = named("relu_ elu_ leaky_relu_ hardtanh_ selu_ celu_ silu_", F)


@handles(*_CASTS)
def _cast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Other tensors are only asked for their dtype and device."""
    first, *rest = (a.data_ if i and isinstance(a, RaggedTensor) else a for i, a in enumerate(args))
    kwargs = {k: v.data_ if isinstance(v, RaggedTensor) else v for k, v in kwargs.items()}
    if not isinstance(first, RaggedTensor):
        return func(first, *rest, **kwargs)
    rows = rows_of(first)
    result = func(rows, *rest, **kwargs)
    if result is rows:
        return first
    return wrap(result, first.packing, first.batch, first.seq) if isinstance(result, Tensor) else result


@handles(*POINTWISE)
def _pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("out") is not None:
        return NotImplemented
    written = _inplace_flag(func, args, kwargs)
    if written:
        return _write(func, args, kwargs)
    aligned = _Aligned([*args, *kwargs.values()])
    given = [aligned.read(a) for a in args]
    made = aligned.wrap(func, func(*given, **{k: aligned.read(v) for k, v in kwargs.items()}))
    if func in _ALIASES:
        made.shared = True
        for argument in args:
            if isinstance(argument, RaggedTensor):
                argument.shared = True
    return made


@handles(*_WRITES, *_BUILT_IN)
def _write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In place, where nobody else holds the memory; what the padded run would have changed beside it is not known."""
    target = args[0] if args else None
    if not isinstance(target, RaggedTensor) or target.shared or target.node is not None or target.outside:
        raise Unpackable(f"{name_of(func)} writes into a tensor that others may read")
    aligned = _Aligned([*args, *kwargs.values()])
    rows = rows_of(target)
    given = [rows, *(aligned.read(a) for a in args[1:])]
    result = func(*given, **{k: aligned.read(v) for k, v in kwargs.items()})
    if result is not rows:
        raise Unpackable(f"{name_of(func)} did not write in place")
    if rows.requires_grad:
        native(target, T.requires_grad_, True)
    return target


def _inplace_flag(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if kwargs.get("inplace"):
        return True
    if func is F.dropout:
        return len(args) > 3 and bool(args[3])
    return func in (F.relu, F.silu, F.elu, F.mish, F.selu, F.celu, F.relu6) and any(a is True for a in args[1:])


class _Aligned:
    """The arguments of a broadcasting function, side by side as rows.

    Dimensions are counted from the last one; every ragged argument must have its own in the same places.
    """

    def __init__(self, given: list[Any]) -> None:
        ragged = [a for a in given if isinstance(a, RaggedTensor)]
        if not ragged:
            raise Unpackable("ragged tensors inside of lists")
        first = ragged[0]
        self.packing: Packing = first.packing
        dims = first.dim()
        self.ends = first.batch - dims, first.seq - dims
        for other in ragged[1:]:
            ends = other.batch - other.dim(), other.seq - other.dim()
            if other.packing.layout is not self.packing.layout or ends != self.ends:
                raise Unpackable("tensors whose tokens stand in different dimensions meet")
        self.dims = max(a.dim() for a in given if isinstance(a, Tensor))
        self.batch, self.seq = self.ends[0] + self.dims, self.ends[1] + self.dims

    def read(self, value: Any) -> Any:
        """``value`` as a tensor ``(T or 1, *others)``."""
        if isinstance(value, RaggedTensor):
            rows = rows_of(value)
            missing = self.dims - value.dim()
            if missing and rows.dim() > 1:
                return rows[(slice(None), *(None,) * missing)]
            return rows
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        return read_dense(value, self.packing, self.dims, self.batch, self.seq)

    def wrap(self, func: Any, result: Any) -> Any:
        if not isinstance(result, Tensor) or result.shape[:1] != (self.packing.layout.tokens,):
            raise Unpackable(f"{name_of(func)} gave something else than a tensor of tokens")
        return wrap(result, self.packing, self.batch, self.seq)


def read_dense(value: Tensor, packing: Packing, dims: int, batch: int, seq: int) -> Tensor:
    """A padded or broadcast tensor at the real tokens: ``(T or 1, *others)``, ``dims`` counted with the ragged ones.

    Raises:
        Unpackable: it has another size where the tokens stand.
    """
    if value.dim() < dims - max(batch, seq):
        return value  # lies wholly behind the ragged dimensions, and broadcasts as it is
    rows, length = packing.layout.shape
    merged = batch == seq
    flat = value.reshape((1,) * (dims - value.dim()) + tuple(value.shape))
    flat = flat.movedim(batch, 0) if merged else flat.movedim((batch, seq), (0, 1))
    sizes = tuple(flat.shape[: 1 if merged else 2])
    if sizes == (1,):
        return flat
    if sizes == (1, 1):
        return flat[0]
    note_place("a tensor over the batch or the sequence")
    gather = packing.layout.on(value.device).gather
    if sizes == (rows * length,):
        return flat[gather]
    if sizes == (rows, length):
        return flat.flatten(0, 1)[gather]
    if sizes == (1, length):
        return _columns(flat[0], gather % length)
    if sizes == (rows, 1):
        return _columns(flat[:, 0], torch.div(gather, length, rounding_mode="floor"))
    raise Unpackable(f"a tensor of shape {tuple(value.shape)} meets tokens of shape {(rows, length)}")


def _columns(values: Tensor, index: Tensor) -> Tensor:
    """``values[index]``; every entry is taken many times, so that gradients are summed in fp32."""
    if not values.requires_grad:
        return values[index]
    return take_rows(values.reshape(len(values), -1), index).reshape(len(index), *values.shape[1:])
