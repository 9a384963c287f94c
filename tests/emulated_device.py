"""A device of its own on a machine without one: tensors that may not be asked for their values.

What was moved "to the device" is a copy that is marked, and so is everything computed from it. An operator that would
wait for a real device (reading a value, choosing by a mask) fails on marked tensors while :attr:`strict` is set.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_liger.mirrored import tensor

_WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "item", "equal", "_unique2", "unique_consecutive")
_WAITING += ("unique_dim", "bincount", "repeat_interleave", "is_nonzero", "nonzero_numpy", "_assert_async")


class Device(TorchDispatchMode):
    """Marks memory; see the module's docstring."""

    def __init__(self) -> None:
        super().__init__()
        self.strict = False
        # held, so that no address comes back for memory that is not marked
        self._marked: dict[int, Any] = {}

    def mark(self, tensor: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            storage = tensor.untyped_storage()
        self._marked[storage._cdata] = storage
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            try:
                return tensor.untyped_storage()._cdata in self._marked
            except (NotImplementedError, RuntimeError):
                return False  # a lazy tensor has no memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        ours = any(isinstance(t, Tensor) and self.holds(t) for t in tree_leaves((args, kwargs)))
        if self.strict and ours and self._waits(func, args):
            raise AssertionError(f"{func} waits for the device")
        result = func(*args, **kwargs)
        if ours:
            for t in tree_leaves(result):
                if isinstance(t, Tensor):
                    self.mark(t)
        return result

    def _waits(self, func: Any, args: Any) -> bool:
        name = func._schema.name.split("::")[1]
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8) and self.holds(i)]
            return bool(masks) and (name == "index" or args[2].numel() != 1)
        return name in _WAITING

    @contextmanager
    def forbidden_to_wait(self) -> Iterator[None]:
        before, self.strict = self.strict, True
        try:
            yield
        finally:
            self.strict = before

    def batch(self, batch: Any) -> Any:
        """A copy of the batch on the device."""
        return apply_to_collection(batch, Tensor, lambda t: self.mark(t.clone()))


@contextmanager
def emulated_device(patch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Inside, everything that this package moves to a device is marked."""
    device = Device()
    patch.setattr(tensor, "_is_on_cpu", lambda t: not device.holds(t))
    patch.setattr(tensor, "to_device", lambda values, to: device.mark(values.clone()))
    with device:
        yield device
