"""Running one operator on the device and on the CPU's copy of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_liger.head.memory import is_write, share_memory
from lightning_liger.mirrored import tensor as on_device
from lightning_liger.mirrored.operators import ANSWERED, AS_ANOTHER, CASTS, CHOSEN, FOLLOWED, WRITTEN, is_exact
from lightning_liger.mirrored.tensor import Memory, Mirrored, become, cpu_values, native_version, sent

T = Tensor
_BROKEN = -1


class _Unknown(Exception):
    """A value that the CPU does not know takes part."""


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``func`` answers, mirrored where that can be followed."""
    if func in ANSWERED or (func in CHOSEN and _depends_on_values(func, args, kwargs)):
        try:
            answer = func(*_known(args), **_known(kwargs))
        except _Unknown:
            return _native(func, args, kwargs)
        return answer if func in ANSWERED else tree_map_only(Tensor, lambda t: sent(t, _device_of(args)), answer)
    if func in WRITTEN or (is_write(func.__name__) and args and isinstance(args[0], Mirrored)):
        return _write(func, args, kwargs)
    if func not in FOLLOWED or kwargs.get("out") is not None:
        return _native(func, args, kwargs)
    try:
        known = _before(func, args, kwargs)
    except _Unknown:
        known = None
    result = _native(func, _without_masks(func, args), kwargs)
    if known is None:
        return result
    try:
        values = known(result)
    except (RuntimeError, IndexError, TypeError, ValueError):  # what is bad for the device, the device reports
        return result
    return _both(func, result, values, args, kwargs)


def _native(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _device_of(args: Iterable[Any]) -> torch.device:
    return next(a for a in args if isinstance(a, Mirrored)).device


def _known(tree: Any) -> Any:
    """``tree`` on the CPU.

    Raises:
        _Unknown: the CPU does not know a tensor in it.
    """
    if isinstance(tree, Tensor):
        values = cpu_values(tree)
        if values is None:
            raise _Unknown
        return values
    if isinstance(tree, torch.device):
        return torch.device("cpu")
    if type(tree) in (tuple, list):
        return type(tree)(_known(t) for t in tree)
    return {k: _known(t) for k, t in tree.items()} if type(tree) is dict else tree


def _before(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], Any]:
    """How to do on the CPU what ``func`` does, given what it gave on the device."""
    if func in CASTS:
        values = _known(args[0])
        return lambda result: values.to(result.dtype, copy=True)
    if func in AS_ANOTHER:
        values, how = _known(args[0]), AS_ANOTHER[func]
        return lambda result: how(values, result.shape)
    known, named = _known(args), _known(kwargs)
    if "device" in named:
        named["device"] = "cpu"
    return lambda result: func(*known, **named)


def _both(func: Any, result: Any, values: Any, args: Any, kwargs: Any) -> Any:
    """``result``, each tensor of which learns its values."""
    if type(result) in (tuple, list) and type(values) is type(result):
        return type(result)(_both(func, r, v, args, kwargs) for r, v in zip(result, values, strict=True))
    if type(result) is not Tensor or not isinstance(values, Tensor) or values.shape != result.shape:
        return result
    if values.dtype != result.dtype or not is_exact(func, result.dtype):
        return result
    given = [a for a in _leaves((args, kwargs)) if type(a) is Mirrored]
    if result.device != given[0].device:
        return result
    parent = next((g for g in given if share_memory(result, g)), None)
    if parent is not None:
        if share_memory(values, parent._mirror):  # a write through one must be a write through the other
            become(result, values, parent._memory)
        return result
    if any(share_memory(values, t) for t in _leaves((_known(args), _known(kwargs))) if isinstance(t, Tensor)):
        values = values.clone()
    become(result, values, Memory(native_version(result)))
    return result


def _leaves(tree: Any) -> Iterable[Any]:
    if isinstance(tree, (tuple, list)):
        for t in tree:
            yield from _leaves(t)
    elif isinstance(tree, dict):
        yield from _leaves(list(tree.values()))
    else:
        yield tree


def _write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = args[0]
    if type(target) is not Mirrored:
        return _native(func, _without_masks(func, args), kwargs)
    followed = func in WRITTEN and WRITTEN[func](args)
    try:
        known, named = (_known(args), _known(kwargs)) if followed else (None, None)
    except _Unknown:
        known = None
    result = _native(func, _without_masks(func, args), kwargs)
    target._memory.version = _BROKEN
    if known is not None and named is not None:
        try:
            func(*known, **named)
        except (RuntimeError, IndexError, TypeError, ValueError):
            return result
        target._memory.version = native_version(target)
    return result


# -- masks -----------------------------------------------------------------------------------------------------------


def _depends_on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the shape of what ``func`` gives is known only when its arguments' values are."""
    given = [*args, *kwargs.values()]
    if func is torch.where:
        return len(given) == 1
    if func in (torch.repeat_interleave, T.repeat_interleave):
        return any(isinstance(a, Tensor) for a in given[1:])
    return True


def _without_masks(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Indexing with masks as indexing with numbers, which is what torch makes of it after asking the device."""
    if func is T.__getitem__ or (func is T.__setitem__ and isinstance(args[2], Tensor) and args[2].numel() != 1):
        return (args[0], _numbers(args[0], args[1]), *args[2:])
    return args


def _numbers(tensor: Tensor, index: Any) -> Any:
    items, dim, found = index if isinstance(index, tuple) else (index,), 0, []
    for item in items:
        if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) and item.dim():
            values = cpu_values(item) if type(item) is Mirrored else None
            if values is None or values.shape != tensor.shape[dim : dim + values.dim()]:
                return index  # torch says so in its own words
            found += [on_device.to_device(i, item.device) for i in values.nonzero(as_tuple=True)]
            dim += values.dim()
        elif item is Ellipsis or isinstance(item, (bool, list, tuple)):
            return index
        else:
            found.append(item)
            dim += item is not None
    return tuple(found)
