"""Hooks on the modules inside of a block, which run Python that compiled code would not, or not again, run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn as nn

_DICTIONARIES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def inner_hooks(block: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """``(module, hook)`` of all below ``block``."""
    for module in block.modules():
        if module is not block:
            for name in _DICTIONARIES:
                if hooks := vars(module)[name]:
                    yield from ((module, hook) for hook in hooks.values())


def foreign_hook(block: nn.Module) -> str:
    """Where somebody else's hook sits, in words, or ``""``. Ours stay for one step."""
    for module, hook in inner_hooks(block):
        place = getattr(hook, "__module__", None) or type(hook).__module__
        if not place.startswith("lightning_liger."):
            return f"a hook on its {type(module).__name__} ({place}) runs in every call"
    return ""


@contextmanager
def without_inner_hooks(block: nn.Module) -> Iterator[None]:
    """Inside, nobody notices what runs in the block."""
    taken = []
    for module in block.modules():
        for name in _DICTIONARIES:
            hooks = vars(module)[name]
            if module is not block and hooks:
                taken.append((hooks, dict(hooks)))
                hooks.clear()
    try:
        yield
    finally:
        for hooks, before in taken:
            hooks.update(before)
