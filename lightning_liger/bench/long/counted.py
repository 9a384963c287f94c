"""A bound on the memory of tensors where the device has none of its own: for trials on a CPU."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CountedMemory(TorchDispatchMode):
    """Counts the storages that operators make inside of it, and runs out of memory beyond ``limit`` bytes.

    Attributes:
        bytes: alive now. peak: the most that were alive.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.bytes = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._see((args, kwargs), made=False)
        result = func(*args, **(kwargs or {}))
        self._see(result, made=True)
        if self.bytes > self.limit:
            raise torch.OutOfMemoryError(f"out of memory: {self.bytes} of {self.limit} bytes")
        return result

    def _see(self, tree: Any, *, made: bool) -> None:
        for tensor in tree_leaves(tree):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes() if made else 0
            if key in self._known:
                continue

            def gone(_: Any, key: int = key, size: int = size) -> None:
                if self._known.pop(key, None) is not None:
                    self.bytes -= size

            self._known[key] = weakref.ref(storage, gone)
            self.bytes += size
            self.peak = max(self.peak, self.bytes)
