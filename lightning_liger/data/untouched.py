"""A module that is run on trial is afterwards what it was: buffers, tensors, counters, lists and meters of its own."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

# What these keep in their objects is caches, and parts of the training that is set up.
_FOREIGN = (
    "torch",
    "lightning",
    "pytorch_lightning",
    "lightning_liger",
    "transformers",
    "peft",
    "deepspeed",
    "builtins",
)
_DEEP = 6
_LONG = 10_000

Restore = Callable[[], Any]


@contextmanager
def nothing_logged(module: Any) -> Iterator[None]:
    """Inside, ``self.log`` of a LightningModule does nothing."""
    silenced = ("log", "log_dict")
    before = {name: vars(module)[name] for name in silenced if name in vars(module)}
    try:
        for name in silenced:
            vars(module)[name] = lambda *args, **kwargs: None
        yield
    finally:
        for name in silenced:
            vars(module).pop(name, None)
        vars(module).update(before)


@contextmanager
def module_untouched(module: nn.Module, option: str, remedy: str) -> Iterator[None]:
    """
    Args:
        option: that asks for the trial, and ``remedy``: what to do if it fails, for messages.

    Raises:
        ValueError: parameters were written, which cannot be undone.
    """
    versions = {name: p._version for name, p in module.named_parameters()}
    gradients = {p: p.grad for p in module.parameters()}
    restores = [_attributes(part, complete=part is module) for part in module.modules()]
    for part in module.modules():
        restores.append(_kept(part._buffers, 0, set()))
    try:
        yield
    finally:
        for restore in restores:
            restore()
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
    written = [name for name, p in module.named_parameters() if versions.get(name, 0) != p._version]
    if written:
        raise ValueError(f"{option} runs training_step on trial, and that writes parameters ({written[0]}). {remedy}")


def _attributes(part: nn.Module, *, complete: bool) -> Restore:
    own = {k: v for k, v in vars(part).items() if k not in ("_parameters", "_buffers", "_modules")}
    restores = {name: _kept(value, 0, set()) for name, value in own.items()}

    def restore() -> None:
        if complete:
            for name in [n for n in vars(part) if n not in own and n not in ("_parameters", "_buffers", "_modules")]:
                del vars(part)[name]
        for name, put_back in restores.items():
            vars(part)[name] = put_back()

    return restore


def _kept(value: Any, depth: int, inside: set[int]) -> Restore:
    """What puts ``value`` back to what it holds now, in place, and gives it."""
    if depth > _DEEP or id(value) in inside or isinstance(value, (nn.Parameter, nn.Module)):
        return lambda: value
    inside = inside | {id(value)}
    if isinstance(value, Tensor):
        return _kept_tensor(value)
    put = _putting_back(value)
    if put is not None:
        put_back = put
        return lambda: (put_back(), value)[-1]
    if isinstance(value, (list, deque, dict, set)):
        return _kept_container(value, depth, inside)
    if type(value).__module__.split(".")[0] not in _FOREIGN and isinstance(getattr(value, "__dict__", None), dict):
        fields = _kept_container(vars(value), depth, inside)
        return lambda: (fields(), value)[1]
    return lambda: value


def _putting_back(value: Any) -> Callable[[], object] | None:
    """For generators and arrays."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.ndarray):
        return partial(np.copyto, value, value.copy())
    return None


def _kept_tensor(value: Tensor) -> Restore:
    if value.is_meta or isinstance(value, DTensor):
        return lambda: value
    copied = value.detach().clone()

    def restore() -> Tensor:
        # not by its version: batch norm writes its averages without counting
        if not torch.equal(value, copied):
            with torch.no_grad():
                value.copy_(copied)
        return value

    return restore


def _kept_container(value: Any, depth: int, inside: set[int]) -> Restore:
    def each(held: Any) -> Restore:
        return (lambda: held) if len(value) > _LONG else _kept(held, depth + 1, inside)

    if isinstance(value, dict):
        named = {key: each(held) for key, held in value.items()}

        def restore_dict() -> Any:
            for key in [k for k in value if k not in named]:
                del value[key]
            value.update({key: put_back() for key, put_back in named.items()})
            return value

        return restore_dict
    items = [each(held) for held in value]

    def restore() -> Any:
        held = [put_back() for put_back in items]
        value.clear()
        value.update(held) if isinstance(value, set) else value.extend(held)
        return value

    return restore
