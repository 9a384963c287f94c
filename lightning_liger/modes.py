"""What changes a module's forward without a write to its weights: the switches of PEFT's adapters."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn as nn

_SWITCHES = ("_disable_adapters", "_active_adapter")
# module -> how many parameters it had, and the layers in it that can be switched: looking at every module of a deep
# model takes milliseconds, which every call would pay
_LAYERS: weakref.WeakKeyDictionary[nn.Module, tuple[int, list[weakref.ref[nn.Module]]]] = weakref.WeakKeyDictionary()


class Modes:
    """The modes of the adapters inside of ``module``, as they are when this is made.

    Args:
        module: what is called.
        parameters: how many it has; another number than before means that adapters may have come.
    """

    def __init__(self, module: nn.Module, parameters: int = 0) -> None:
        self._layers = _switchable(module, parameters)
        self._found = _read(self._layers)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside of this context every adapter, and every parameter of one, is in the mode that it was in."""
        now = _read(self._layers)
        changed = [key for key, value in self._found.items() if now.get(key) != value]
        _write(changed, self._found)
        try:
            yield
        finally:
            _write(changed, now)


def _switchable(module: nn.Module, parameters: int) -> list[nn.Module]:
    known = _LAYERS.get(module)
    if known is None or known[0] != parameters:
        # an attribute of PEFT's classes until it is first changed; asking the instance would search its parameters
        found = [m for m in module.modules() if hasattr(type(m), _SWITCHES[0]) or _SWITCHES[0] in m.__dict__]
        known = _LAYERS[module] = parameters, [weakref.ref(m) for m in found]
    return [m for reference in known[1] if (m := reference()) is not None]


def _read(layers: list[nn.Module]) -> dict[tuple[Any, str], Any]:
    found: dict[tuple[Any, str], Any] = {}
    for layer in layers:
        for name in _SWITCHES:
            found[layer, name] = getattr(layer, name)
        for parameter in layer.parameters():
            found[parameter, "requires_grad"] = parameter.requires_grad
    return found


def _write(entries: list[tuple[Any, str]], values: dict[tuple[Any, str], Any]) -> None:
    for owner, name in entries:
        if (owner, name) in values:  # else it has come since
            setattr(owner, name, values[owner, name])
