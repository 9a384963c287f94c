"""What a tape is made of: calls, the tensors that they were given, and what they depended on besides."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_SILENT = ("batch_norm", "instance_norm", "batch_norm_update_stats")


class CannotRepeat(Exception):
    """Why the way from the model to the loss cannot be gone again."""


class Ref:
    """A tensor of the tape, by number."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Given:
    """A tensor that was not made from the model's outputs.

    Attributes:
        leaf: part of a graph that is not made again. scratch: the call writes into it (running statistics).
    """

    __slots__ = ("leaf", "scratch", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.leaf = has_graph(tensor)
        self.scratch = False
        self.tensor = tensor.detach() if self.leaf else tensor
        self.version = version_of(tensor)

    def note_writes(self, function: Any) -> None:
        """After the call."""
        # running statistics are written to without a note in their version
        silently = getattr(function, "__name__", "").endswith(_SILENT) and not self.tensor.requires_grad
        if silently or version_of(self.tensor) != self.version:
            self.scratch, self.tensor = True, self.tensor.detach().clone()
            self.version = version_of(self.tensor)

    def check(self) -> None:
        if not self.scratch and version_of(self.tensor) != self.version:
            raise CannotRepeat("a tensor, or a weight, was written to after the loss had used it")

    def unchanged(self) -> Tensor:
        self.check()
        return self.tensor.clone() if self.scratch else self.tensor


@dataclasses.dataclass
class Call:
    function: Any
    args: Any
    kwargs: Any
    outputs: list[int | None]
    surroundings: Surroundings
    unit: Any = None
    writes: bool = False


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What the result of a call depends on besides its arguments."""

    gradients: bool
    dtype: torch.dtype
    autocast: tuple[tuple[str, torch.dtype], ...]

    @staticmethod
    def now(kinds: tuple[str, ...]) -> Surroundings:
        autocast = tuple((k, torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k))
        return Surroundings(torch.is_grad_enabled(), torch.get_default_dtype(), autocast)

    @contextmanager
    def again(self, kinds: tuple[str, ...]) -> Iterator[None]:
        before = torch.get_default_dtype()
        enabled = dict(self.autocast)
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            for kind in kinds:
                stack.enter_context(torch.autocast(kind, enabled.get(kind), enabled=kind in enabled))
            torch.set_default_dtype(self.dtype)
            try:
                yield
            finally:
                torch.set_default_dtype(before)


def tensors(value: Any) -> list[Tensor]:
    """All tensors of what a function was given, or returned, in a fixed order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for v in value.values() for t in tensors(v)]
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in tensors(v)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [t for f in dataclasses.fields(value) for t in tensors(getattr(value, f.name, None))]
    return []


def leaves_of(tree: Any) -> list[Any]:
    found: list[Any] = []
    tree_map(found.append, tree)
    return found


def has_graph(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.grad_fn is not None


def version_of(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return 0 if tensor.is_inference() else tensor._version


def writes_into(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the function changes its first argument (or ``out=``)."""
    name = getattr(func, "__name__", "")
    if kwargs.get("out") is not None or name in ("__setitem__", "__set__"):
        return True
    if name.startswith("__i") and name.endswith("__"):
        return name not in ("__init__", "__invert__", "__index__", "__int__", "__iter__")
    return name.endswith("_") and not name.endswith("__")
