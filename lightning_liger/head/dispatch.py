"""What happens when a torch function meets a lazy tensor: ask, reshape, consume, or compute the values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_any, tree_leaves, tree_map_only

import lightning_liger.head.casts
import lightning_liger.head.joined
import lightning_liger.head.losses
import lightning_liger.head.mixing
import lightning_liger.head.parts
import lightning_liger.head.readers
import lightning_liger.head.selected
import lightning_liger.head.shapes  # noqa: F401
from lightning_liger.head import hidden_rows
from lightning_liger.head.lazy import HANDLERS, LazyRows, Source
from lightning_liger.head.memory import is_write, share_memory

T = Tensor

# Answered by the tensor's own shape, dtype and place in the graph; no value is read.
_PROPERTIES = (
    "shape dtype device ndim layout requires_grad is_leaf grad_fn is_cuda is_cpu is_meta is_mps is_xpu is_sparse "
    "is_sparse_csr is_quantized is_mkldnn is_nested itemsize nbytes _version output_nr is_vulkan is_mtia _base"
)
_METHODS = (
    "size dim ndimension numel nelement __len__ stride is_contiguous element_size is_floating_point is_complex "
    "is_signed is_inference get_device __hash__ is_same_size is_pinned is_shared _is_view"
)
_QUESTIONS: set[Any] = {getattr(T, name).__get__ for name in _PROPERTIES.split() if hasattr(T, name)}
_QUESTIONS |= {getattr(T, name) for name in _METHODS.split() if hasattr(T, name)}
_QUESTIONS |= {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_inference}

_GRAD: Any = T.grad.__get__  # type: ignore[union-attr]

# The reader wants to see or change what flows through the logits themselves.
_HOOKS: set[Any] = {T.register_hook, T.retain_grad, T.requires_grad_}
_HOOKS |= {T.register_post_accumulate_grad_hook}

# Whose hooks on what a module returns want to know of a backward, and read no gradient. Fabric only asks who called it.
_ENGINES = ("torch.distributed", "deepspeed.", "lightning.fabric.", "lightning_fabric.")

# The engine itself finds the place of a lazy tensor in the graph.
_BACKWARDS: set[Any] = {torch.autograd.grad, torch.autograd.backward, T.backward}


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``func`` answers; see the module's docstring."""
    given = args, kwargs
    args, kwargs = tree_map_only(LazyRows, LazyRows.resolved, given)
    if func in _QUESTIONS:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    name = _name(func)
    first = args[0] if args else None
    if func is T.register_hook and isinstance(first, LazyRows) and _from_an_engine(args, kwargs):
        return tell_about_backward(first, *args[1:], **kwargs)
    if func is _GRAD and isinstance(first, LazyRows):
        return None  # nobody asked to keep it
    if func in _HOOKS and given[0] and isinstance(given[0][0], LazyRows):
        _refuse_late(given[0][0], name)
        return func(given[0][0].pin(name), *args[1:], **kwargs)
    if func in _BACKWARDS:
        wanted = given[1].get("inputs", given[0][1:2] if func is torch.autograd.grad else None)
        _refuse_late(wanted, "backward")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if is_write(name) and given[0] and isinstance(given[0][0], LazyRows):
        target = given[0][0].pin(name)
        result = func(target, *_values(args[1:], name), **_values(kwargs, name))
        return given[0][0] if result is target else result
    if tree_any(_is_lazy, (args, kwargs)) and _all_live(args, kwargs):
        handler = HANDLERS.get(func)
        result = NotImplemented if handler is None else handler(*args, **kwargs)
        if result is NotImplemented:
            result = hidden_rows.run(func, args, kwargs)
        if result is not NotImplemented:
            return result
    return _on_values(func, name, *given)


def tell_about_backward(tensor: LazyRows, hook: Any) -> Any:
    """FSDP and DeepSpeed prepare their backward with a hook on what a module returns: whoever reads these logits calls it.

    As a hook of an outer module it comes before those of inner ones. Where it scales gradients (DeepSpeed, by the number
    of accumulated batches), it must meet those of logits once.
    """
    scales = not _is_of(hook, "torch.distributed")
    sources = [s for s in tensor.view_.leaves() if isinstance(s, Source)]
    for source in sources:
        hold = None
        if source.head is not None:
            source.head.hooks.insert(0, hook)
            hold = source.head.hold
        if scales and source.head is not None:
            continue
        if source.rows.requires_grad and (hold is None or not hold.gathering.is_alone):
            # what made the rows may be sharded together with the head, and be reached when others are done with it
            source.rows.register_hook(hook)
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.register_hook(hook)


def _is_lazy(value: Any) -> bool:
    return isinstance(value, LazyRows)


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name


def _on_values(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func`` on computed values. If its answer is a view of them, a later write into it must be seen everywhere."""
    values = _values(args, name), _values(kwargs, name)
    result = func(*values[0], **values[1])
    answers = [r for r in tree_leaves(result) if isinstance(r, Tensor)]
    shared: list[LazyRows] = []
    for tensor in tree_leaves((args, kwargs)):
        held = tensor.held if isinstance(tensor, LazyRows) and tensor.pinned_at is None else None
        if held is not None and any(share_memory(r, held) for r in answers):
            shared.append(tensor)
    if not shared:
        return result
    for tensor in shared:
        tensor.pin(name)
    return func(*_values(args, name), **_values(kwargs, name))


def _refuse_late(tensors: Any, what: str) -> None:
    """Gradients of logits are looked at, but a loss has taken the rows already."""
    for tensor in tree_leaves(tensors):
        if isinstance(tensor, LazyRows) and tensor.consumed_by is not None:
            raise RuntimeError(
                f"the gradient of logits was asked for ({what}) after {tensor.consumed_by} was computed without them. "
                "Ask before the loss is computed, or set fused_head=False for this module."
            )


def _values(tree: Any, what: str) -> Any:
    return tree_map_only(LazyRows, lambda t: t.values_now(what), tree)


def _all_live(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    live = True

    def check(tensor: LazyRows) -> LazyRows:
        nonlocal live
        live = live and tensor.is_live()
        return tensor

    tree_map_only(LazyRows, check, (args, kwargs))
    return live


def _from_an_engine(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    hook = kwargs.get("hook", args[1] if len(args) > 1 else None)
    return isinstance(args[0], LazyRows) and _is_of(hook, _ENGINES)


def _is_of(hook: Any, packages: str | tuple[str, ...]) -> bool:
    owner = getattr(hook, "__self__", None) or getattr(hook, "func", hook)
    module = getattr(type(owner) if not callable(owner) else owner, "__module__", None) or type(owner).__module__
    return str(module).startswith(packages)
