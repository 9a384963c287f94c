"""Device tensors whose values the CPU knows as well, so that asking for them does not wait for the device.

A batch comes from the CPU. Its labels, masks and ids keep a copy there when they are moved, and what a step does to
them on the device (shift, pad, compare, fill, in place or not) is done to the copy too, in microseconds. Which labels
count, whether one is out of range, where a mask is true: such questions are answered from the copy, and index tensors
that follow from the answer are sent to the device without waiting for it.

A copy is never trusted by itself: each knows how often its device tensor had been written to when both were equal, and
an operator that is not followed leaves an ordinary tensor behind.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_liger.head.memory import version_of
from lightning_liger.mirrored.operators import NEEDS_ITSELF

_DECIDE_THEMSELVES = ("LazyRows", "Unsettled")


class Memory:
    """What all views of one memory share: how often it had been written to when its copy was last equal."""

    __slots__ = ("version",)

    def __init__(self, version: int) -> None:
        self.version = version


class Mirrored(Tensor):
    """An ordinary tensor in all but its class. Made by :func:`mirror`."""

    _mirror: Tensor
    _memory: Memory

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():
            return _outside_of_graphs(func, args, kwargs)
        others = [t for t in types if t is not cls and t is not Tensor]
        if any(t.__name__ in _DECIDE_THEMSELVES for t in others):
            return NotImplemented
        if others or func in NEEDS_ITSELF:
            args, kwargs = ordinary((args, kwargs))
            return func(*args, **kwargs)
        from lightning_liger.mirrored.running import run

        return run(func, args, kwargs)


# Compiled graphs take tensors of no other class: what is asked of ours breaks them, and is done in between.
@torch.compiler.disable
def _outside_of_graphs(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def mirror(tensor: Tensor, values: Tensor) -> Tensor:
    """Tell ``tensor`` that it holds ``values`` (CPU, same shape and dtype), which nobody else may write to.

    The object itself changes its class, so that whoever holds it need not be found.
    """
    if type(tensor) is Tensor and tensor.shape == values.shape and tensor.dtype == values.dtype:
        become(tensor, values, Memory(version_of(tensor)))
    return tensor


def become(tensor: Any, values: Tensor, memory: Memory) -> None:
    tensor.__class__ = Mirrored
    tensor._mirror, tensor._memory = values, memory


def forget(tensor: Tensor) -> None:
    """Make ``tensor`` an ordinary one again."""
    if type(tensor) is Mirrored:
        same: Any = tensor
        del same._mirror, same._memory
        same.__class__ = Tensor


def cpu_values(tensor: Tensor) -> Tensor | None:
    """The values of ``tensor`` on the CPU, where they are known without asking its device. Not to be written to."""
    if type(tensor) is Mirrored:
        return tensor._mirror if tensor._memory.version == native_version(tensor) else None
    if _is_on_cpu(tensor):
        return tensor
    base: Any = tensor._base if type(tensor) is Tensor else None
    if type(base) is not Mirrored or (values := cpu_values(base)) is None:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        same_layout = base.stride() == values.stride() and base.storage_offset() == values.storage_offset() == 0
        if not same_layout or tensor.dtype != values.dtype:
            return None
    return values.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def native_version(tensor: Tensor) -> int:
    """:func:`version_of`, asked of the tensor itself."""
    with torch._C.DisableTorchFunctionSubclass():
        return version_of(tensor)


def _is_on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def ordinary(tree: Any) -> Any:
    """``tree`` with ordinary tensors on the same memory, for code that should meet nothing else."""
    return tree_map_only(Mirrored, _ordinary, tree)


def _ordinary(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def sent(values: Tensor, device: torch.device) -> Tensor:
    """A tensor on ``device`` with these values, which it will have before anything that is launched after this."""
    moved = to_device(values, device)
    return moved if moved is values else mirror(moved, values)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A copy through pinned memory: from other memory, CUDA waits for the copy to end."""
    if device.type == "cuda" and values.device.type == "cpu" and values.numel():
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def arange(count: int, device: torch.device) -> Tensor:
    """``arange(count)`` on ``device``, known on the CPU too."""
    values = torch.arange(count)
    return values if device.type == "cpu" else mirror(torch.arange(count, device=device), values)
