"""Rebinding a method on one module instance, and taking it back.

A rebound method lives in the instance's ``__dict__``; classes, modelling modules and other instances never change.
The binding object follows copies of the module: a deep copy shares the original's switch (so ``revert()`` silences it
too), a pickled one holds the original method and needs nothing of this package to be loaded.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

_BYPASS: ContextVar[str | None] = ContextVar("lightning_liger_bypass", default=None)


@contextmanager
def bypass(reason: str | None) -> Iterator[None]:
    """Inside this context every rebound method runs the original code; None ends an outer one."""
    token = _BYPASS.set(reason)
    try:
        yield
    finally:
        _BYPASS.reset(token)


def bypass_reason() -> str | None:
    """Why replacements are bypassed here; None where they run."""
    return _BYPASS.get()


class Switch:
    """One on/off flag, shared by all that was applied in one go and by every deep copy of it."""

    def __init__(self, on: bool = False) -> None:
        self.on = on

    def __deepcopy__(self, memo: dict[int, Any]) -> Switch:
        return self

    def __reduce__(self) -> tuple[type[Switch], tuple[bool]]:
        return Switch, (False,)


class Rebound:
    """A replacement for ``module.<name>``; calls the original whenever its switch is off.

    Subclasses implement :meth:`call`. ``self.original`` is the bound method that was found.

    Attributes:
        feature: what the kernel proof calls the replacement; ``""`` where there is nothing to prove.
        runs: calls in which the replacement really did its work.
        called: whether there was a call at all since somebody set this to False.
        why: why the latest call ran the original code, or ``""``.
        bypassed: the reason of the latest :func:`bypass` around a call, or ``""``.
        muted: run the original code, whatever the switch says.
        resting: the original code runs instead, although it is bound and switched on.
        waits: the latest call ran the original code for a reason that is nothing wrong.
    """

    name = "forward"
    feature = ""
    runs = 0
    called = False
    why = ""
    bypassed = ""
    muted = False
    resting = False
    waits = False

    def __init__(self, module: Any, switch: Switch) -> None:
        # Any: transformers and torch modules carry attributes that nn.Module's type does not know
        self.module: Any = module
        self.switch = switch
        self.previous: Callable[..., Any] | None = module.__dict__.get(self.name)
        method = getattr(type(module), self.name)
        self.__name__ = getattr(method, "__name__", self.name)
        self.__doc__ = getattr(method, "__doc__", None)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)

    @property
    def original(self) -> Callable[..., Any]:
        if self.previous is not None:
            return self.previous
        return getattr(type(self.module), self.name).__get__(self.module)

    @property
    def launches(self) -> tuple[str, ...]:
        """Parts of names of GPU kernels, one of which a run must launch; empty where that depends."""
        return ()

    def call(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def traced_form(self) -> Callable[..., Any] | None:
        """What stands for the replacement in compiled code; None leaves the method as it was found."""
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> Rebound:
        made = memo[id(self)] = object.__new__(type(self))
        vars(made).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        below = self.previous
        while isinstance(below, Rebound):
            below = below.previous
        if below is not None:
            return functools.partial, (below,)
        # the unpickled module has no attributes yet when this is asked of it, so that its class answers
        return getattr, (self.module, self.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and self.previous is None:
            # traced code has one shape and no lazy tensors in it; written so that Dynamo sees which function is meant
            return getattr(type(self.module), self.name)(self.module, *args, **kwargs)
        reason = _BYPASS.get()
        if not self.switch.on or self.muted or self.resting or reason is not None:
            self.bypassed = reason or ""
            return self.original(*args, **kwargs)
        self.called = True
        return self.call(*args, **kwargs)

    def bind(self) -> None:
        self.module.__dict__[self.name] = self

    def unbind(self) -> None:
        """Put back what was there. If somebody rebound the method over ours, ours stays below theirs, switched off."""
        if self.module.__dict__.get(self.name) is not self:
            return
        if self.previous is None:
            del self.module.__dict__[self.name]
        else:
            self.module.__dict__[self.name] = self.previous


@dataclass(frozen=True)
class Binding:
    """What was bound, weakly: ``binding`` is gone when somebody else put another method in its place."""

    binding: weakref.ref[Rebound]
    module: weakref.ref[nn.Module]
    feature: str


def live_binding(module: nn.Module, name: str, switch: Switch, kind: type[Rebound] = Rebound) -> Rebound | None:
    """The binding of ``switch`` and of class ``kind`` on ``module.<name>``, or None.

    A binding that a copy brought along from another ``accelerate`` call is dropped here, so that it is not wrapped
    a second time.
    """
    found = module.__dict__.get(name)
    while isinstance(found, Rebound) and (found.module is not module or not found.switch.on):
        found.module = module
        found.unbind()
        found = module.__dict__.get(name)
    while isinstance(found, Rebound):
        if found.switch is switch and isinstance(found, kind):
            return found
        found = found.previous
    return None


def bindings_of(module: nn.Module, name: str = "forward") -> Iterator[Rebound]:
    """What is bound on ``module.<name>``, the outermost first; ends where somebody else's replacement begins."""
    found = module.__dict__.get(name)
    while isinstance(found, Rebound):
        yield found
        found = found.previous


class BypassedGenerate(Rebound):
    """``generate`` on the original code: its loop reads single rows and manages a KV cache."""

    name = "generate"

    def call(self, *args: Any, **kwargs: Any) -> Any:
        with bypass("generate"):
            return self.original(*args, **kwargs)


def inside_compiled(module: nn.Module) -> set[nn.Module]:
    """All that runs as part of a compiled graph, where a rebound method would be traced, or call itself."""
    found: set[nn.Module] = set()
    for model in module.modules():
        compiled = (
            getattr(model, "_compiled_call_impl", None) is not None  # model.compile()
            or type(model).__name__ == "OptimizedModule"  # torch.compile(model); its class is slow to import
            or vars(model).get("_compiler_ctx") is not None  # Trainer.fit(torch.compile(lightning_module))
        )
        if compiled and model not in found:
            found.update(model.modules())
    return found


# Whose compiled functions, if any, are not handed what a step makes of its batch.
_LIBRARIES = ("torch", "transformers", "lightning", "pytorch_lightning", "peft", "lightning_liger", "builtins", "abc")


def calls_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile``d functions stand beside the code of ``module``: in its attributes, classes or files."""
    seen: set[Any] = set()
    for part in module.modules():
        # what `module.compile()` leaves on a module is for inside_compiled() to find
        if any(_is_compiled(value) for name, value in vars(part).items() if name != "_compiled_call_impl"):
            return True
        for kind in type(part).__mro__:
            if kind in seen or kind.__module__.split(".")[0] in _LIBRARIES:
                continue
            seen.add(kind)
            file = vars(sys.modules[kind.__module__]) if kind.__module__ in sys.modules else {}
            if any(_is_compiled(value) for value in (*vars(kind).values(), *file.values())):
                return True
    return False


def _is_compiled(value: Any) -> bool:
    if not inspect.isfunction(value):
        return False
    return "_torchdynamo_orig_callable" in vars(value) and "_torchdynamo_disable" not in vars(value)
