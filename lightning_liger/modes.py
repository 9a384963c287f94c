"""What changes a module's forward without a write to its weights: training flags, and the switches of PEFT's adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn as nn

_SWITCHES = ("_disable_adapters", "_active_adapter")


class Modes:
    """The modes of ``module``, and of all inside of it, as they are when this is made."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._found = _read(module)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside of this context every module and parameter is in the mode that it was in."""
        now = _read(self._module)
        changed = [(owner, name) for (owner, name), value in self._found.items() if now.get((owner, name)) != value]
        _write(changed, self._found)
        try:
            yield
        finally:
            _write(changed, now)


def _read(module: nn.Module) -> dict[tuple[Any, str], Any]:
    found: dict[tuple[Any, str], Any] = {}
    for part in module.modules():
        found[part, "training"] = part.training
        # an attribute of PEFT's classes until it is first changed; asking the instance would search its parameters
        if "_disable_adapters" in part.__dict__ or hasattr(type(part), "_disable_adapters"):
            found.update({(part, name): getattr(part, name) for name in _SWITCHES})
    for parameter in module.parameters():
        found[parameter, "requires_grad"] = parameter.requires_grad
    return found


def _write(entries: list[tuple[Any, str]], values: dict[tuple[Any, str], Any]) -> None:
    for owner, name in entries:
        if (owner, name) in values:  # else it has come since
            setattr(owner, name, values[owner, name])
