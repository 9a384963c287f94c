"""The state of a module apart from its parameters: buffers, counters, caches, the sums that metrics keep."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_liger.head.memory import version_of

# Of a module's own bookkeeping; parameters do not change in a forward, submodules are asked themselves.
_SKIPPED = ("_parameters", "_modules", "forward")
_LARGEST = 1 << 22


class Remembered:
    """What the attributes of one module hold now, tensors, lists and dictionaries with their contents."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        self._values = {name: value for name, value in attributes.items() if name not in _SKIPPED}
        self._contents = {name: _contents(value) for name, value in self._values.items()}

    def restore(self, attributes: dict[str, Any]) -> None:
        """Put it all back, in place."""
        for name in attributes.keys() - self._values.keys() - set(_SKIPPED):
            del attributes[name]
        for name, value in self._values.items():
            attributes[name] = value
            _put_back(value, self._contents[name])


def _contents(value: Any) -> Any:
    if isinstance(value, Tensor):
        small = value.numel() <= _LARGEST and not value.is_inference()
        return (version_of(value), value.detach().clone()) if small else None
    if type(value) in (list, dict, set):
        inner = {k: _contents(v) for k, v in value.items() if isinstance(v, Tensor)} if type(value) is dict else None
        return type(value)(value), inner
    return None


def _put_back(value: Any, contents: Any) -> None:
    if contents is None:
        return
    if isinstance(value, Tensor):
        if version_of(value) != contents[0]:
            value.detach().copy_(contents[1])
        return
    held, inner = contents
    if isinstance(value, list):
        value[:] = held
        return
    value.clear()
    value.update(held)
    for name, of_tensor in (inner or {}).items():
        _put_back(value[name], of_tensor)
