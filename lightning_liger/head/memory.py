"""Who writes into whose memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether a write into one is seen in the other."""
    return bool(torch._C._is_alias_of(a, b))  # type: ignore[attr-defined]


_OPERATORS = ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_IN_PLACE = {f"__i{name}__" for name in (*_OPERATORS, "lshift", "rshift")}


def is_write(name: str) -> bool:
    """Whether a torch function of this name writes into its first argument."""
    return name == "__setitem__" or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def version_of(tensor: Tensor) -> int:
    """How often the memory of ``tensor`` was written to; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version


_DETACHED = WeakTensorKeyDictionary()


def detached(tensor: Tensor) -> Tensor:
    """``tensor.detach()``, the same object every time, so that readers can see that they read the same rows."""
    if not tensor.requires_grad:
        return tensor
    found: Tensor | None = _DETACHED.get(tensor)
    if found is None or not _is_whole_view(found, tensor):  # somebody may have put other data into a parameter
        found = _DETACHED[tensor] = tensor.detach()
    return found


def forget_detached(tensor: Tensor) -> None:
    """Let go of the memory that ``tensor`` has had so far."""
    _DETACHED.pop(tensor, None)


def _is_whole_view(a: Tensor, b: Tensor) -> bool:
    same_kind = a.dtype == b.dtype and a.device == b.device and a.shape == b.shape and a.stride() == b.stride()
    return same_kind and share_memory(a, b) and a.storage_offset() == b.storage_offset()
