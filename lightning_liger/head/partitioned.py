"""A head whose weight ZeRO stage 3 gathers for the head's own forward and frees before the loss reads the logits.

DeepSpeed fetches a module's parameters in a forward pre-hook, frees those that no running module marks as in use in a
forward hook, and puts autograd functions on the module's inputs and outputs to do both again around its backward
(``deepspeed/runtime/zero/parameter_offload.py``). :class:`Partitioned` marks the head's parameters for as long as lazy
logits of a call live, and stands in for those functions, so that lazy tensors pass them: whoever reads the logits then
triggers the fetching, and the gradient of the hidden rows the freeing. Gradients reach the parameters themselves, whose
own hooks reduce them. All ranks free at the start of a forward and of a backward, so that their collectives agree.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_liger.head.dispatch import tell_about_backward
from lightning_liger.head.lazy import LazyRows, lazy
from lightning_liger.head.memory import forget_detached

_MARK = "lazy logits"


def is_partitioned(module: nn.Module) -> bool:
    """Whether ZeRO stage 3 holds ``module.weight`` in pieces."""
    return hasattr(module.weight, "ds_id")


def partitioned(module: nn.Module) -> Partitioned | None:
    """The engine that fetches ``module``'s parameters; None if no hooks of one do."""
    if not is_partitioned(module) or "pre_bwd_fn" not in module.__dict__:
        return None
    for hook in module._forward_hooks.values():
        for value in _enclosed(hook):
            if type(value).__name__ == "DeepSpeedZeRoOffload":
                return Partitioned(module, value)
    return None


def _enclosed(function: Any, depth: int = 3) -> Iterator[Any]:
    """What the closure of a function, and of functions that it wraps, holds."""
    function = inspect.unwrap(function) if callable(function) else function
    for cell in getattr(function, "__closure__", None) or ():
        yield cell.cell_contents
        if depth and inspect.isfunction(cell.cell_contents):
            yield from _enclosed(cell.cell_contents, depth - 1)


class Partitioned:
    """The parameters of one head under ZeRO stage 3, and the lazy logits that still need them."""

    # nothing in front of the head needs its weights
    is_alone = True

    def __init__(self, module: nn.Module, offload: Any) -> None:
        self._module: Any = module
        self._offload = offload
        self._holds = 0
        self._stand_ins: list[tuple[nn.Module, str, Any]] = []
        self._handle: Any = None

    @property
    def _parameters(self) -> list[Any]:
        return list(self._module.parameters(recurse=False))

    def gathered(self, weight: Tensor) -> bool:
        """Whether ``weight`` is one of the engine's; False for one that replaced it."""
        return any(p is weight for p in self._parameters)

    def shards(self) -> list[Tensor]:
        """What an optimizer writes into when it changes the weights."""
        return [p.ds_tensor for p in self._parameters]

    # -- one call of the head ----------------------------------------------------------------------------------------

    def keep(self) -> None:
        """Called in the forward that the weights were gathered for."""
        self._holds += 1
        self._mark()

    def _mark(self) -> None:
        for p in self._parameters:
            p.ds_active_sub_modules.add(_MARK)

    def drop(self) -> None:
        self._holds -= 1
        if self._holds == 0:
            self.give_back()

    def give_back(self, _: Any = None) -> None:
        """Let the engine free what it would have freed after forward. No communication."""
        marked = [p for p in self._parameters if _MARK in p.ds_active_sub_modules]
        for p in marked:
            p.ds_active_sub_modules.discard(_MARK)
            forget_detached(p)
        if marked and not any(self._module.ds_id in p.ds_active_sub_modules for p in marked):
            self._offload.get_param_coordinator().release_sub_module(self._module, forward=True)

    def ensure(self, _: Any = None) -> None:
        """Gather for a reader that comes after the weights were freed, such as a metric after a backward."""
        for p in self._parameters:
            if p.ds_status.name == "INFLIGHT":
                self._offload.module.ds_inflight_param_registry.pop(p).wait()
            elif p.ds_status.name == "NOT_AVAILABLE":
                p.all_gather()
        if self._holds:
            self._mark()

    # -- around the engine's hooks -----------------------------------------------------------------------------------

    def attach(self) -> None:
        """Let lazy tensors pass the autograd functions that the engine puts on inputs and outputs."""
        if self._handle is not None:
            return
        root = self._offload.module
        self._handle = root.register_forward_pre_hook(lambda *_: self.give_back(), prepend=True)
        for module in root.modules():
            for name, kind in (("pre_bwd_fn", _BeforeBackward), ("post_bwd_fn", _AfterBackward)):
                function = module.__dict__.get(name)
                if function is not None and not isinstance(function, _StandIn):
                    self._stand_ins.append((module, name, function))
                    setattr(module, name, kind(function, module))

    def detach(self) -> None:
        for module, name, function in self._stand_ins:
            setattr(module, name, function)
        self._stand_ins.clear()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


class _StandIn:
    """In the place of one of the autograd functions that DeepSpeed made for ``module``."""

    def __init__(self, function: Any, module: nn.Module) -> None:
        self._function = function
        self._module = module

    def apply(self, tensor: Any) -> Any:
        if not isinstance(tensor, LazyRows) or not tensor.is_live():
            return self._function.apply(tensor)
        return self._pass(tensor)

    def _pass(self, tensor: LazyRows) -> Any:
        raise NotImplementedError

    def _when_read(self, tensor: LazyRows) -> Any:
        """Call the function's backward before the backward of whoever reads ``tensor``, once in each backward."""
        if tensor.node is None:
            return tensor
        context, sign = SimpleNamespace(), torch.empty(0, requires_grad=True)
        if "setup_context" in vars(self._function):
            self._function.setup_context(context, (sign,), sign)
        else:
            self._function.forward(context, sign)
        tell_about_backward(tensor, _once(lambda: self._function.backward(context)))
        return tensor


class _BeforeBackward(_StandIn):
    """On what a module returns: its parameters are fetched when a gradient arrives."""

    def _pass(self, tensor: LazyRows) -> Any:
        return self._when_read(tensor)


class _AfterBackward(_StandIn):
    """On what a module is given: its parameters are freed when a gradient leaves it."""

    def _pass(self, tensor: LazyRows) -> Any:
        view = tensor.view_
        if view.is_hidden_rows():
            tensor.consume("the module's backward")
            rows = self._function.apply(view.source.rows)
            return lazy(replace(view, source=replace(view.source, rows=rows)))
        if any(True for _ in self._module.parameters(recurse=False)):
            return self._function.apply(tensor)
        return self._when_read(tensor)  # a loss without parameters


def _once(function: Callable[[], Any]) -> Callable[[Tensor], None]:
    last = -1

    def hook(grad: Tensor) -> None:
        nonlocal last
        task = torch._C._current_graph_task_id()
        if task != last:
            last = task
            function()

    return hook
