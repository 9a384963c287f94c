"""How many bytes of tensors are alive, now and at most, on devices whose allocator does not say."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Counts what operators make inside of it, until it is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._see((args, kwargs), made=False)
        result = func(*args, **(kwargs or {}))
        self._see(result, made=True)
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


def memory_after(forward: Callable[[], Tensor]) -> int:
    """Bytes that live on for the backward of what ``forward`` returns."""
    with Live() as live:
        output = forward()
        graph = output.grad_fn
        del output
        gc.collect()
        kept = live.bytes
    del graph
    return kept
