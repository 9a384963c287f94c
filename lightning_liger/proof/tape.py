"""From a step's model calls to its loss, as a list of calls that can be made again.

The code of a ``training_step`` is not run twice: it may log, count, draw from an iterator, fill a replay buffer or step
an optimizer. What is written down while it runs is what its tensors went through: calls of the modules that were
accelerated (units), and every function of torch that was given what came out of them. Made again in order, with other
code inside of the units, they give the loss that the step would have had. Decisions (integers and booleans) stay the
step's; tensors of the step are never written to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

_SILENT = ("batch_norm", "instance_norm", "batch_norm_update_stats")


class CannotRepeat(Exception):
    """Why the way from the model to the loss cannot be gone again."""


class _Ref:
    """A tensor of the tape, by number."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class _Given:
    """A tensor that was not made from the model's outputs.

    Attributes:
        leaf: part of a graph that is not made again. scratch: the call writes into it (running statistics).
    """

    __slots__ = ("leaf", "scratch", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.leaf = _has_graph(tensor)
        self.scratch = False
        self.tensor = tensor.detach() if self.leaf else tensor
        self.version = _version(tensor)

    def note_writes(self, function: Any) -> None:
        """After the call."""
        # running statistics are written to without a note in their version
        silently = getattr(function, "__name__", "").endswith(_SILENT) and not self.tensor.requires_grad
        if silently or _version(self.tensor) != self.version:
            self.scratch, self.tensor = True, self.tensor.detach().clone()
            self.version = _version(self.tensor)

    def unchanged(self) -> Tensor:
        if self.scratch:
            return self.tensor.clone()
        if _version(self.tensor) != self.version:
            raise CannotRepeat("a tensor, or a weight, was written to after the loss had used it")
        return self.tensor


@dataclasses.dataclass
class _Call:
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


class Tape(TorchFunctionMode):
    """Records while it is entered. ``kinds``: device types whose autocast matters."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.kinds = kinds
        self.recording = True
        self.problem = ""
        self._calls: list[_Call] = []
        self._numbers: Any = WeakTensorKeyDictionary()
        self._count = 0
        self._initial: dict[int, Tensor] = {}
        self._without_graph: set[int] = set()
        self.rows = 1

    # -- writing down ----------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.recording or not any(t in self._numbers for t in tensors((args, kwargs))):
            return func(*args, **kwargs)
        writes = _writes(func, kwargs)
        if writes and tensors(args) and tensors(args)[0] not in self._numbers:
            # into a tensor of the user's own: a copy stands in for it from here on
            target = tensors(args)[0]
            number = self._number(target)
            self._initial[number] = target.detach().clone()
        surroundings = Surroundings.now(self.kinds)
        written, named = self._written((args, kwargs))
        out = func(*args, **kwargs)
        for value in _leaves((written, named)):
            if isinstance(value, _Given):
                value.note_writes(func)
        made = tensors(out)
        if made or writes:
            self._note(func, written, named, made, surroundings, None, writes)
        return out

    def call_unit(self, unit: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call of a unit and write it down."""
        if not self.recording:
            return function(*args, **kwargs)
        surroundings = Surroundings.now(self.kinds)
        written, named = self._written((args, kwargs))
        with self.suspended():
            out = function(*args, **kwargs)
        self._note(None, written, named, tensors(out), surroundings, unit, False)
        return out

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Nothing is written down inside, and compiled code does not see the mode where that can be helped."""
        before, self.recording = self.recording, False
        try:
            if _get_current_function_mode() is self:
                with _pop_mode_temporarily():
                    yield
            else:
                yield
        finally:
            self.recording = before

    def number_of(self, tensor: Tensor) -> int | None:
        found: int | None = self._numbers.get(tensor)
        return found

    def _number(self, tensor: Tensor) -> int:
        self._count += 1
        self._numbers[tensor] = self._count
        return self._count

    def _written(self, tree: Any) -> Any:
        def one(value: Any) -> Any:
            if not isinstance(value, Tensor):
                if any(t in self._numbers for t in tensors(value)):
                    self.problem = f"the model's outputs are handed on inside of a {type(value).__name__}"
                return value
            number = self.number_of(value)
            if number is not None:
                self._check_graph(value, number)
            return _Given(value) if number is None else _Ref(number)

        return tree_map(one, tree)

    def _check_graph(self, tensor: Tensor, number: int) -> None:
        # the forward of an autograd function is seen, its backward is not
        if number in self._without_graph and _has_graph(tensor):
            self.problem = "an autograd function of the user's own, which functions of torch cannot stand in for"

    def _note(
        self,
        function: Any,
        args: Any,
        kwargs: Any,
        made: list[Tensor],
        surroundings: Surroundings,
        unit: Any,
        writes: bool,
    ) -> None:
        # decisions stay what they were: a token that was drawn, an index that was sorted
        outputs = [
            (self.number_of(t) or self._number(t)) if t.is_floating_point() or t.is_complex() else None for t in made
        ]
        if unit is not None:
            self.rows = max(self.rows, *(t.numel() // max(t.shape[-1], 1) for t in made if t.dim() > 1), 1)
        if not surroundings.gradients:
            self._without_graph.update(n for n in outputs if n is not None)
        if writes or any(n is not None for n in outputs):
            self._calls.append(_Call(function, args, kwargs, outputs, surroundings, unit, writes))

    # -- doing it again --------------------------------------------------------------------------------------------

    def cut(self, loss: Tensor) -> None:
        """Keep what leads to ``loss``.

        Raises:
            CannotRepeat: it is not made from what the units returned.
        """
        self.loss = self.number_of(loss)
        if self.loss is not None:
            self._check_graph(loss, self.loss)
        if self.problem:
            raise CannotRepeat(self.problem)
        if self.loss is None:
            raise CannotRepeat("the loss does not come out of the accelerated modules by functions of torch")
        if not any(call.writes for call in self._calls):
            needed, kept = {self.loss}, []
            for call in reversed(self._calls):
                if needed.intersection(n for n in call.outputs if n is not None):
                    kept.append(call)
                    needed |= {r.number for r in _leaves((call.args, call.kwargs)) if isinstance(r, _Ref)}
            self._calls = kept[::-1]
        if not any(call.unit is not None for call in self._calls):
            raise CannotRepeat("no accelerated module has a part in the loss")

    @property
    def units(self) -> list[Any]:
        return list(dict.fromkeys(call.unit for call in self._calls if call.unit is not None))

    def unit_calls(self) -> Iterator[tuple[Any, Any, Any]]:
        """``(unit, args, kwargs)`` of the calls with gradients whose arguments were made by no other call."""
        for call in self._calls:
            given = _leaves((call.args, call.kwargs))
            if call.unit is None or not call.surroundings.gradients or any(isinstance(v, _Ref) for v in given):
                continue
            args, kwargs = tree_map(lambda v: v.unchanged() if isinstance(v, _Given) else v, (call.args, call.kwargs))
            yield call.unit, args, kwargs

    def again(self, reseed: Callable[[int], None]) -> tuple[Tensor, list[Tensor]]:
        """Go the way again; returns the loss, and the leaves that stand for graphs that are not made again.

        Args:
            reseed: called before each call of the tape with its number, so that runs draw the same numbers.
        """
        values: dict[int, Tensor] = {n: t.clone() for n, t in self._initial.items()}
        leaves: dict[int, Tensor] = {}

        def given(value: Any) -> Any:
            if isinstance(value, _Ref):
                return values[value.number]
            if isinstance(value, _Given):
                tensor = value.unchanged()
                if not value.leaf:
                    return tensor
                if id(tensor) not in leaves:
                    leaves[id(tensor)] = tensor.detach().requires_grad_()
                return leaves[id(tensor)]
            return value

        for index, call in enumerate(self._calls):
            args, kwargs = tree_map(given, (call.args, call.kwargs))
            reseed(index)
            function = call.function if call.unit is None else call.unit.original
            with call.surroundings.again(self.kinds):
                out = function(*args, **kwargs)
            made = tensors(out)
            if len(made) != len(call.outputs):
                raise CannotRepeat("a module returns another number of tensors in its plain run")
            values.update({n: t for n, t in zip(call.outputs, made, strict=True) if n is not None})
        assert self.loss is not None
        return values[self.loss], list(leaves.values())


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


def _leaves(tree: Any) -> list[Any]:
    found: list[Any] = []
    tree_map(found.append, tree)
    return found


def _has_graph(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.grad_fn is not None


def _version(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return 0 if tensor.is_inference() else tensor._version


def _writes(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the function changes its first argument (or ``out=``)."""
    name = getattr(func, "__name__", "")
    if kwargs.get("out") is not None or name in ("__setitem__", "__set__"):
        return True
    if name.startswith("__i") and name.endswith("__"):
        return name not in ("__init__", "__invert__", "__index__", "__int__", "__iter__")
    return name.endswith("_") and not name.endswith("__")
