"""A module, its random numbers and our own books, as they were before it was run a few more times."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_liger.patching import Binding

_TORCH = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Hooks without which these libraries' modules are not what they are.
_KEPT = ("torch", "transformers", "peft", "accelerate", "deepspeed", "lightning_liger")
_LARGEST_BUFFER = 1 << 26


@contextmanager
def unharmed(modules: Iterable[nn.Module], bindings: list[Binding], device: torch.device) -> Iterator[None]:
    """Inside: no dropout, no hooks of the user's. Afterwards everything is as before, see :func:`as_before`."""
    modules = list(modules)
    parts = _parts(modules)
    restore = as_before(modules, bindings, device)
    try:
        with _without_dropout(parts):
            for m in parts:
                _silence(m)
            for binding in (b for bound in bindings if (b := bound.binding()) is not None):
                if "habits" in vars(binding):
                    binding.habits = type(binding.habits)()  # type: ignore[attr-defined]
                if "off" in vars(binding):
                    binding.off = dict(binding.off)  # type: ignore[attr-defined]
            yield
    finally:
        restore()


def as_before(modules: Iterable[nn.Module], bindings: list[Binding], device: torch.device) -> Callable[[], None]:
    """A function that brings back what there is now: random states (torch, Python, NumPy), buffers and plain attributes
    of the modules, tensors among them, and what our bindings have counted and learnt.
    """
    parts = _parts(modules)
    states = [(m, dict(vars(m)), _contents(m)) for m in parts]
    kept = [
        (t, t.detach().clone())
        for m in parts
        for t in (*m._buffers.values(), *vars(m).values())
        if isinstance(t, Tensor) and not t.is_meta and t.numel() * t.element_size() <= _LARGEST_BUFFER
    ]
    numpy = sys.modules.get("numpy")
    drawn = random.getstate(), None if numpy is None else numpy.random.get_state()
    devices = [device] if device.type == "cuda" else []
    generators = torch.get_rng_state(), [torch.cuda.get_rng_state(d) for d in devices]
    ours = [(b, dict(vars(b))) for bound in bindings if (b := bound.binding()) is not None]

    def restore() -> None:
        for binding, values in ours:
            vars(binding).clear()
            vars(binding).update(values)
        for m, values, contents in states:
            _restore(m, values, contents)
        with torch.no_grad():
            for tensor, before in kept:
                if not torch.equal(tensor, before):
                    tensor.copy_(before)
        torch.set_rng_state(generators[0])
        for d, state in zip(devices, generators[1], strict=True):
            torch.cuda.set_rng_state(state, d)
        random.setstate(drawn[0])
        if numpy is not None:
            numpy.random.set_state(drawn[1])

    return restore


def _parts(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return list(dict.fromkeys(m for module in modules for m in module.modules()))


def reseeding(device: torch.device, seed: int) -> Callable[[int], None]:
    """Sets the generators that code on ``device`` draws from, and no others."""

    def reseed(number: int) -> None:
        torch.default_generator.manual_seed(seed * 100_003 + number)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(seed * 100_003 + number)

    return reseed


def _contents(module: nn.Module) -> dict[str, Any]:
    """Copies of the containers among a module's own attributes."""
    kinds = (list, dict, set, deque)
    return {
        name: value.copy()
        for name, value in vars(module).items()
        if isinstance(value, kinds) and name not in _TORCH and "_hooks" not in name
    }


def _restore(module: nn.Module, values: dict[str, Any], contents: dict[str, Any]) -> None:
    now = vars(module)
    for name in [n for n in now if n not in values]:
        del now[name]
    now.update(values)
    for name, before in contents.items():
        container = now[name]
        if isinstance(container, (list, deque)):
            if len(container) != len(before) or any(a is not b for a, b in zip(container, before, strict=True)):
                container.clear()
                container.extend(before)
        elif container.keys() != before.keys() if isinstance(container, dict) else container != before:
            container.clear()
            container.update(before)
        elif isinstance(container, dict):
            container.update(before)


def _silence(module: nn.Module) -> None:
    """Without the hooks of the user's own; :func:`_restore` brings them back."""
    for name in _HOOKS:
        hooks = vars(module).get(name)
        if hooks:
            vars(module)[name] = OrderedDict((k, hook) for k, hook in hooks.items() if _is_kept(hook))


def _is_kept(hook: Any) -> bool:
    place = getattr(hook, "__module__", None) or type(hook).__module__
    return str(place).split(".")[0] in _KEPT


@contextmanager
def _without_dropout(modules: list[nn.Module]) -> Iterator[None]:
    """Plain and packed runs draw by shape, so that they can only agree where nothing is dropped."""
    owners: dict[int, Any] = {}
    for m in modules:
        owners[id(m)] = m
        for config in (c for c in (vars(m).get("config"), vars(m).get("args")) if hasattr(c, "__dict__")):
            owners[id(config)] = config
    changed: list[tuple[Any, str, float]] = []
    for owner in owners.values():
        is_dropout = isinstance(owner, nn.modules.dropout._DropoutNd)
        for name, value in list(vars(owner).items()):
            named = "drop" in name.lower() or (is_dropout and name == "p")
            if named and isinstance(value, float) and value > 0:
                changed.append((owner, name, value))
                vars(owner)[name] = 0.0
    try:
        yield
    finally:
        for owner, name, value in changed:
            vars(owner)[name] = value
