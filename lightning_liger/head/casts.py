"""Operators that leave the values as they are, or only round them: copies, casts, detaching."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_liger.head.lazy import Handler, LazyRows, View, handles
from lightning_liger.head.memory import detached
from lightning_liger.head.shapes import view_of

T = Tensor


@view_of(T.contiguous, T.clone, torch.clone, T.positive, torch.positive, T.__pos__)
def _same(view: View, memory_format: Any = None) -> Any:
    # view() asks the map whether the values would be one block
    return replace(view, position=view.position.contiguous())


@handles(T.detach, torch.detach, T.data.__get__)  # type: ignore[attr-defined]
def _detach(tensor: LazyRows) -> LazyRows:
    made = LazyRows(tensor.view_.mapped(detached))
    # a detached view shares the values: a write into it is seen here as in torch
    made.parents, made.replay = (tensor,), torch.Tensor.detach
    return made


def _cast(dtype: torch.dtype) -> Handler:
    return lambda view, memory_format=None: replace(view, dtype=dtype)


for _function, _dtype in ((T.float, torch.float32), (T.double, torch.float64)):
    view_of(_function)(_cast(_dtype))
for _function, _dtype in ((T.half, torch.float16), (T.bfloat16, torch.bfloat16)):
    view_of(_function)(_cast(_dtype))


@view_of(T.to, T.type_as)
def _to(view: View, *args: Any, **kwargs: Any) -> Any:
    """Casts; a move to another device computes the values."""
    dtype: torch.dtype | None = None
    for value in (*args, *(v for k, v in kwargs.items() if k not in ("copy", "non_blocking", "memory_format"))):
        if isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, Tensor):
            if value.device != view.source.device:
                return NotImplemented
            dtype = value.dtype
        elif isinstance(value, (str, torch.device)):
            device = torch.device(value)
            if device != view.source.device and device != torch.device(view.source.device.type):
                return NotImplemented
        elif value is not None and not isinstance(value, bool):
            return NotImplemented
    if dtype is not None and not dtype.is_floating_point:
        return NotImplemented
    return view if dtype is None else replace(view, dtype=dtype)


@view_of(T.type)
def _type(view: View, dtype: Any, non_blocking: bool = False) -> Any:
    return _to(view, dtype) if isinstance(dtype, torch.dtype) else NotImplemented


# -- tensors of the same shape or kind, whose values are others ------------------------------------------------------

_LIKE = "zeros_like ones_like empty_like full_like rand_like randn_like"
_NEW = "new_zeros new_ones new_empty new_full new_tensor"
_OTHERS = [getattr(torch, n) for n in _LIKE.split()] + [getattr(T, n) for n in _NEW.split()]


def _other(function: Any) -> Handler:
    def handler(*args: Any, **kwargs: Any) -> Any:
        tensor = args[0] if args else kwargs.pop("input", None)
        if not isinstance(tensor, LazyRows) or any(isinstance(a, LazyRows) for a in (*args[1:], *kwargs.values())):
            return NotImplemented
        blank = torch.empty((1,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
        return function(blank, *args[1:], **kwargs)

    return handler


for _function in _OTHERS:
    handles(_function)(_other(_function))
