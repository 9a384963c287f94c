"""Which operators give the same on the CPU as on any device, bit for bit (see :mod:`lightning_liger.mirrored`).

Arithmetic is followed on integers and truth values only. On floating-point numbers, masks as some write them, nothing
is followed that could round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

T = Tensor

_SHAPE_NAMES = (
    "view reshape flatten unflatten squeeze unsqueeze transpose permute contiguous clone select narrow expand ravel "
    "unbind split chunk movedim swapaxes index_select flip roll repeat t tensor_split repeat_interleave __getitem__ "
    "detach gather take_along_dim cat concat concatenate stack hstack vstack pad tile broadcast_to diagonal tril triu "
    "split_with_sizes moveaxis swapdims alias"
)
_CAST_NAMES = "to long int bool float double half bfloat16 short type type_as cuda"
_SELECTING_NAMES = (
    "eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ where masked_fill any all isin logical_not "
    "logical_and logical_or logical_xor full_like zeros_like ones_like new_full new_zeros new_ones index_fill"
)
_INTEGER_NAMES = (
    "add sub mul neg abs subtract multiply negative __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __neg__ "
    "bitwise_and bitwise_or bitwise_xor bitwise_not __and__ __rand__ __or__ __ror__ __xor__ __rxor__ __invert__ "
    "clamp clamp_min clamp_max clip maximum minimum min max amin amax argmax argmin sum cumsum diff count_nonzero "
    "remainder floor_divide __mod__ __floordiv__ cumprod prod sign"
)
_ANSWER_NAMES = "__bool__ __int__ __float__ __index__ item tolist __contains__ equal is_nonzero"
_CHOICE_NAMES = "nonzero argwhere masked_select unique unique_consecutive bincount repeat_interleave"
_WRITE_NAMES = "masked_fill_ fill_ zero_ copy_ clamp_ clamp_min_ clamp_max_ clip_ neg_ abs_ sign_ logical_not_ "
_WRITE_NAMES += "bitwise_not_ add_ sub_ mul_ logical_and_ logical_or_ bitwise_and_ bitwise_or_ remainder_ "
_WRITE_NAMES += "__iadd__ __isub__ __imul__ __iand__ __ior__ __ixor__ eq_ ne_ lt_ le_ gt_ ge_ cumsum_ tril_ triu_"


def _functions(names: str) -> set[Any]:
    return {getattr(owner, n) for n in names.split() for owner in (T, torch, F) if hasattr(owner, n)}


CASTS = _functions(_CAST_NAMES)
# the second argument says nothing but a shape
AS_ANOTHER: dict[Any, Callable[[Tensor, Any], Tensor]] = {
    T.view_as: T.view,
    T.reshape_as: T.reshape,
    T.expand_as: T.expand,
}
_EXACT = _functions(_SHAPE_NAMES) | CASTS | _functions(_SELECTING_NAMES) | set(AS_ANOTHER)
_EXACT |= {T.mT.__get__, T.T.__get__, T.data.__get__}  # type: ignore[attr-defined]
FOLLOWED = _EXACT | _functions(_INTEGER_NAMES)

# Python asks for a value.
ANSWERED = _functions(_ANSWER_NAMES)
# How many entries the answer has depends on the values.
CHOSEN = _functions(_CHOICE_NAMES) | {torch.where}
# Whatever these make of a subclass, they make of it by its class.
NEEDS_ITSELF = {T.__deepcopy__, T.__reduce_ex__, T.__reduce__, T.__repr__, T.__format__, T.__str__}


def is_exact(function: Any, dtype: torch.dtype) -> bool:
    """Whether a result of ``dtype`` is the same on every device."""
    return function in _EXACT or not (dtype.is_floating_point or dtype.is_complex)


def _in_integers(args: tuple[Any, ...]) -> bool:
    return not args[0].is_floating_point()


def _any(args: tuple[Any, ...]) -> bool:
    return True


def _places(args: tuple[Any, ...]) -> bool:
    """``x[index] = value``, unless several values could meet in one place, of which any may win."""
    index, value = args[1], args[2]
    items = index if isinstance(index, tuple) else (index,)
    numbers = [i for i in items if isinstance(i, (Tensor, list))]
    masks = all(isinstance(i, Tensor) and i.dtype == torch.bool for i in numbers)
    return masks or not isinstance(value, Tensor) or value.numel() == 1


# Writes that are followed, each with a condition on its arguments.
WRITTEN: dict[Any, Callable[[tuple[Any, ...]], bool]] = dict.fromkeys(_functions(_WRITE_NAMES), _in_integers)
WRITTEN |= dict.fromkeys(_functions("masked_fill_ fill_ zero_ copy_"), _any)
WRITTEN[T.__setitem__] = _places
