"""What happens when a torch function meets a ragged tensor."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from lightning_liger.padding.plain_decoder.ragged import (
    OUTSIDE,
    RUN,
    RaggedTensor,
    Unpackable,
    is_outside_blocks,
)

T = Tensor
# From torch 2.14 on, ``apply`` is compiled and has no frame; the function's own ``forward`` has one.
_APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)

# Code of what calls a block.
BLOCKS: set[Any] = set()
_CHECKPOINT = inspect.unwrap(checkpoint).__code__

# Whether every call is looked at for what only shows in backward.
WATCHED: ContextVar[bool] = ContextVar("lightning_liger_watched", default=False)

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
HANDLERS: dict[Any, Handler] = {}

# Answered by the wrapper itself: no value is read.
_PROPERTIES = "shape dtype device ndim layout requires_grad is_leaf grad_fn grad is_cuda is_cpu is_meta is_mps is_xpu "
_PROPERTIES += "is_sparse is_sparse_csr is_quantized is_mkldnn is_nested itemsize nbytes _version output_nr"
_METHODS = "size dim ndimension numel nelement __len__ stride is_contiguous element_size is_floating_point is_complex "
_METHODS += "is_signed is_inference get_device __hash__ is_same_size is_pinned requires_grad_"
_OWN: set[Any] = {getattr(T, name).__get__ for name in _PROPERTIES.split() if hasattr(T, name)}
_OWN |= {getattr(T, name) for name in _METHODS.split() if hasattr(T, name)}
_OWN |= {T.requires_grad.__set__, T.grad.__set__}  # type: ignore[union-attr,attr-defined]
_OWN |= {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_inference, torch.is_same_size}
_OWN |= {torch.autograd.backward, torch.autograd.grad}

_NEW: set[Any] = {T.new_zeros, T.new_ones, T.new_full, T.new_empty, T.new_tensor}
_GEOMETRY: set[Any] = {T.expand_as, T.view_as, T.reshape_as}


def handles(*functions: Any) -> Callable[[Handler], Handler]:
    """Register a handler, called with the function and its arguments; NotImplemented where it cannot help."""

    def register(handler: Handler) -> Handler:
        for function in functions:
            HANDLERS[function] = handler
        return handler

    return register


def named(names: str, *owners: Any) -> set[Any]:
    """The functions of these names that the owners have."""
    return {getattr(owner, name) for name in names.split() for owner in owners if hasattr(owner, name)}


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``func`` answers.

    Raises:
        Unpackable: it is not known to work on real tokens alone.
    """
    if func in _OWN:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if WATCHED.get():
        _refuse_functions()
    handler = HANDLERS.get(func)
    result = NotImplemented if handler is None else handler(func, args, kwargs)
    return _unknown(func, args, kwargs) if result is NotImplemented else result


RUN.append(run)


def _refuse_functions() -> None:
    """A custom autograd function shows in the graph, but not where reentrant checkpointing runs it without one.

    Raises:
        Unpackable: the caller is inside of one.
    """
    frame: Any = sys._getframe(2)
    checkpointed = False
    while frame is not None:
        function = _function_of(frame)
        if function is not None and function is not CheckpointFunction:
            raise Unpackable(f"an autograd function of its own ({function.__name__})")
        if function is not None:
            checkpointed = True
        elif checkpointed and frame.f_code in BLOCKS:
            raise Unpackable(
                "reentrant checkpointing of parts of a block; checkpoint whole blocks, or use_reentrant=False"
            )
        frame = frame.f_back


def _function_of(frame: Any) -> Any:
    """The autograd function whose forward this frame is, or None."""
    if _APPLY is not None:
        return frame.f_locals["cls"] if frame.f_code is _APPLY else None
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    return getattr(first, "_forward_cls", None) if isinstance(first, torch.autograd.function.FunctionCtx) else None


def refuse_checkpoint(what: str, scope: Any) -> None:
    """What is done at the borders of a decoder is not done again when a part of it is recomputed in backward.

    Args:
        scope: code object of the function that runs the decoder; checkpointing around that is another matter.

    Raises:
        Unpackable: the caller is inside of checkpointing.
    """
    frame: Any = sys._getframe(1) if WATCHED.get() else None
    while frame is not None and frame.f_code is not scope:
        if frame.f_code is _CHECKPOINT:
            raise Unpackable(f"{what} is inside of gradient checkpointing")
        frame = frame.f_back


def _unknown(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = name_of(func)
    first: Any = args[0] if args else None
    if func in _NEW and isinstance(first, RaggedTensor):
        return func(first.data_.detach(), *args[1:], **kwargs)
    if func in _GEOMETRY and len(args) == 2 and isinstance(args[1], RaggedTensor):
        shape = args[1].size_
        return first.expand(shape) if func is T.expand_as else first.reshape(shape)
    if func is T.__repr__:
        return f"RaggedTensor(shape={tuple(first.shape)}, dtype={first.dtype})"
    outside = OUTSIDE.get()
    if outside is not None and is_outside_blocks():
        return outside(func, args, kwargs)
    raise Unpackable(f"{name} is not known token by token")


def name_of(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name


import lightning_liger.padding.plain_decoder.attending  # noqa: E402
import lightning_liger.padding.plain_decoder.joining  # noqa: E402
import lightning_liger.padding.plain_decoder.multihead  # noqa: E402
import lightning_liger.padding.plain_decoder.pointwise  # noqa: E402
import lightning_liger.padding.plain_decoder.rowwise  # noqa: E402
import lightning_liger.padding.plain_decoder.views  # noqa: E402, F401
