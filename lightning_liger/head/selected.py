"""``masked_select`` of whole rows: flat, until somebody gives it back the shape ``(-1, V)``, as distillation code does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_liger.head.lazy import HANDLERS, LazyRows, handles
from lightning_liger.head.mixing import has_head

T = Tensor

_PROPERTIES = "shape dtype device ndim layout is_cuda is_cpu is_meta"
_METHODS = "size dim numel nelement __len__ is_floating_point get_device __hash__ is_contiguous stride"
_QUESTIONS = {getattr(T, n).__get__ for n in _PROPERTIES.split()} | {getattr(T, n) for n in _METHODS.split()}
_GRAPH: set[Any] = {getattr(T, n).__get__ for n in ("requires_grad", "grad_fn", "is_leaf")}
_RESHAPES = {T.view, T.reshape, torch.reshape}


class FlatRows(Tensor):
    """``(K * V,)`` values of ``rows`` ``(K, V)``, one row after the other."""

    rows: LazyRows

    @staticmethod
    def __new__(cls, rows: LazyRows) -> FlatRows:
        made: FlatRows = torch.Tensor._make_wrapper_subclass(
            cls, (rows.numel(),), dtype=rows.dtype, device=rows.device, requires_grad=False
        )
        made.rows = rows
        return made

    # __new__ took everything; Tensor.__init__ takes no arguments
    def __init__(self, rows: LazyRows) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in _QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if isinstance(first, FlatRows) and (func in _RESHAPES or func in _GRAPH):
            return func(first.rows, *args[1:], **kwargs)
        return func(*tree_map_only(FlatRows, _values, args), **tree_map_only(FlatRows, _values, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise RuntimeError(f"{func} reads selected logits that were never computed. Set fused_head=False.")


def _values(flat: FlatRows) -> Tensor:
    return flat.rows.values_now("masked_select").reshape(-1)


@handles(T.masked_select, torch.masked_select)
def _masked_select(input: Any, mask: Any) -> Any:
    if not isinstance(input, LazyRows) or isinstance(mask, LazyRows) or not has_head(input.view_):
        return NotImplemented
    view = input.view_
    if view.vdim != len(view.shape) - 1 or mask.dtype != torch.bool or mask.dim() > len(view.shape):
        return NotImplemented
    if any(m not in (1, n) for m, n in zip(reversed(mask.shape), reversed(view.shape), strict=False)):
        return NotImplemented
    whole = mask.expand(view.shape)
    if whole.stride(-1) != 0:
        return NotImplemented
    rows: Any = input[whole.select(-1, 0)]
    return FlatRows(rows)


_of_lazy = HANDLERS[T.expand_as]


@handles(T.expand_as)
def _expand_as(input: Any, other: Any) -> Any:
    if isinstance(other, LazyRows) and not isinstance(input, LazyRows):
        return input.expand(other.shape)  # a mask that is made as wide as the logits
    return _of_lazy(input, other)
