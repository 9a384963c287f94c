"""Names of modules around what they run, for profilers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.utils.hooks import RemovableHandle


class ModuleRanges:
    """While it is open, each call of a module is a profiler range, and on CUDA an NVTX range too.

    Args:
        paths: the modules, with the names of their ranges.
    """

    def __init__(self, paths: Mapping[nn.Module, str]) -> None:
        self._paths = paths
        self._nvtx = torch.cuda.is_available()
        self._local = threading.local()  # a backward on a device recomputes layers in a thread of its own
        self._handles: list[RemovableHandle] = []

    def open(self) -> None:
        enter, leave = _Hook(self._enter), _Hook(self._leave)
        for module in self._paths:
            self._handles.append(module.register_forward_pre_hook(enter, prepend=True))
            # also when the call raises: checkpointing ends a recomputation by an exception
            self._handles.append(module.register_forward_hook(leave, always_call=True))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, module: nn.Module, *_: Any) -> None:
        opened = torch.autograd.profiler.record_function(self._paths[module])
        opened.__enter__()
        self._stack().append((module, opened))
        if self._nvtx:
            torch.cuda.nvtx.range_push(self._paths[module])

    def _leave(self, module: nn.Module, *_: Any) -> None:
        stack = self._stack()
        while stack and any(entered is module for entered, _ in stack):
            entered, opened = stack.pop()
            opened.__exit__(None, None, None)
            if self._nvtx:
                torch.cuda.nvtx.range_pop()
            if entered is module:
                return

    def _stack(self) -> list[tuple[nn.Module, Any]]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        return self._local.stack


class _Hook:
    """A hook that does nothing in copies of its module, which are not watched."""

    def __init__(self, act: Callable[..., None]) -> None:
        self._act = act

    def __call__(self, *args: Any) -> None:
        self._act(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> str:
        return "_nothing"


def _nothing(*args: Any) -> None:
    """What a copied hook does."""
