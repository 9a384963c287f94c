"""``lightning`` and ``pytorch_lightning`` are two unrelated class trees; whatever of them is installed is served."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any


def installed_trees() -> list[ModuleType]:
    """The ``lightning.pytorch`` and ``pytorch_lightning`` packages that can be imported.

    Raises:
        ImportError: neither is installed.
    """
    found = []
    for top, name in (("lightning", "lightning.pytorch"), ("pytorch_lightning", "pytorch_lightning")):
        if importlib.util.find_spec(top) is not None:
            found.append(importlib.import_module(name))
    if not found:
        raise ImportError("lightning-liger's callback needs Lightning: pip install 'lightning>=2.6'")
    return found


def callback_bases() -> tuple[type, ...]:
    """The ``Callback`` class of every installed tree."""
    return tuple(dict.fromkeys(tree.Callback for tree in installed_trees()))


def is_deepspeed(strategy: Any) -> bool:
    """Whether this is Lightning's ``DeepSpeedStrategy``, of either tree."""
    return "DeepSpeedStrategy" in {k.__name__ for k in type(strategy).__mro__}
