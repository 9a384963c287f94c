"""From a step's model calls to its loss, as a list of calls that can be made again.

The code of a ``training_step`` is not run twice: it may log, count, draw from an iterator, fill a replay buffer or step
an optimizer. What is written down while it runs is what its tensors went through: calls of the modules that were
accelerated (units), and every function of torch that was given what came out of them. Made again in order, with other
code inside of the units, they give the loss that the step would have had. Decisions (integers and booleans) stay the
step's; tensors of the step are never written to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _get_current_function_mode_stack,
    _pop_mode_temporarily,
)
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_liger.proof.own_functions import seen_by
from lightning_liger.proof.recorded import (
    Call,
    CannotRepeat,
    Given,
    Ref,
    Surroundings,
    has_graph,
    leaves_of,
    tensors,
    writes_into,
)


class Tape(TorchFunctionMode):
    """Records while it is entered. ``kinds``: device types whose autocast matters."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.kinds = kinds
        self.recording = True
        self.problem = ""
        self._calls: list[Call] = []
        self._numbers: Any = WeakTensorKeyDictionary()
        self._count = 0
        self._initial: dict[int, Tensor] = {}
        self._without_graph: set[int] = set()
        self.rows = 1

    # -- writing down ----------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = self._before(func, args, kwargs)
        out = func(*args, **kwargs)
        if before is not None:
            self._after(func, before, out, None)
        return out

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Write down functions of torch, and ``torch.autograd.Function``s, as well as units."""
        with ExitStack() as stack:
            stack.enter_context(seen_by(self._see))
            stack.enter_context(self)
            yield

    def _see(self, apply: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if not self.recording or not any(mode is self for mode in _get_current_function_mode_stack()):
            return apply(*args)  # inside of a function that is written down itself
        before = self._before(apply, args, {})
        with self.suspended():
            out = apply(*args)
        if before is not None:
            before.writes = any(t is given for t in tensors(out) for given in tensors(args))
            self._after(apply, before, out, None)
        return out

    def call_unit(self, unit: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call of a unit and write it down."""
        before = self._before(None, args, kwargs)
        with self.suspended():
            out = function(*args, **kwargs)
        if before is not None:
            self._after(None, before, out, unit)
        return out

    def _before(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """The call that is about to be made; None if it has nothing to do with the units."""
        if not self.recording:
            return None
        try:
            if function is not None and not any(t in self._numbers for t in tensors((args, kwargs))):
                return None
            writes = function is not None and writes_into(function, kwargs)
            if writes and (first := tensors(args)) and first[0] not in self._numbers:
                # into a tensor of the user's own: a copy stands in for it from here on
                self._initial[self._number(first[0])] = first[0].detach().clone()
            written, named = self._written((args, kwargs))
            return Call(function, written, named, [], Surroundings.now(self.kinds), writes=writes)
        except Exception as error:  # whatever the step is made of: it must go on
            self._give_up(error)
            return None

    def _after(self, function: Any, call: Call, out: Any, unit: Any) -> None:
        try:
            for value in leaves_of((call.args, call.kwargs)):
                if isinstance(value, Given):
                    value.note_writes(function)
            made = tensors(out)
            if made or call.writes:
                call.unit = unit
                self._note(call, made)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.recording, self.problem = False, f"the step could not be written down ({type(error).__name__}: {error})"

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
            return Given(value) if number is None else Ref(number)

        return tree_map(one, tree)

    def _check_graph(self, tensor: Tensor, number: int) -> None:
        # the forward of an autograd function is seen, its backward is not
        if number in self._without_graph and has_graph(tensor):
            self.problem = "an autograd function of the user's own, which functions of torch cannot stand in for"

    def _note(self, call: Call, made: list[Tensor]) -> None:
        # decisions stay what they were: a token that was drawn, an index that was sorted
        call.outputs = outputs = [
            (self.number_of(t) or self._number(t)) if t.is_floating_point() or t.is_complex() else None for t in made
        ]
        if call.unit is not None:
            self.rows = max(self.rows, *(t.numel() // max(t.shape[-1], 1) for t in made if t.dim() > 1), 1)
        if not call.surroundings.gradients:
            self._without_graph.update(n for n in outputs if n is not None)
        if call.writes or any(n is not None for n in outputs):
            self._calls.append(call)

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
                    needed |= {r.number for r in leaves_of((call.args, call.kwargs)) if isinstance(r, Ref)}
            self._calls = kept[::-1]
        if not any(call.unit is not None for call in self._calls):
            raise CannotRepeat("no accelerated module has a part in the loss")

    def forget(self) -> None:
        """Let go of the step's tensors at once: logits that somebody still holds when an optimizer steps are computed."""
        self._calls.clear()
        self._numbers.clear()
        self._initial.clear()

    def check(self) -> None:
        """Raise :class:`CannotRepeat` if what was written down is no longer what it was."""
        for call in self._calls:
            for value in leaves_of((call.args, call.kwargs)):
                if isinstance(value, Given):
                    value.check()

    @property
    def units(self) -> list[Any]:
        return list(dict.fromkeys(call.unit for call in self._calls if call.unit is not None))

    def unit_calls(self) -> Iterator[tuple[Any, Any, Any]]:
        """``(unit, args, kwargs)`` of the calls with gradients whose arguments were made by no other call."""
        for call in self._calls:
            given = leaves_of((call.args, call.kwargs))
            if call.unit is None or not call.surroundings.gradients or any(isinstance(v, Ref) for v in given):
                continue
            args, kwargs = tree_map(lambda v: v.unchanged() if isinstance(v, Given) else v, (call.args, call.kwargs))
            yield call.unit, args, kwargs

    def again(self, reseed: Callable[[int], None]) -> tuple[Tensor, list[Tensor]]:
        """Go the way again; returns the loss, and the leaves that stand for graphs that are not made again.

        Args:
            reseed: called before each call of the tape with its number, so that runs draw the same numbers.
        """
        values: dict[int, Tensor] = {n: t.clone() for n, t in self._initial.items()}
        leaves: dict[int, Tensor] = {}

        def given(value: Any) -> Any:
            if isinstance(value, Ref):
                return values[value.number]
            if isinstance(value, Given):
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
