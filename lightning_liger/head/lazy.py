"""A tensor that knows which hidden rows it is made of, and is computed only if somebody needs its values.

:class:`LazyRows` looks like ``(B, S, V)`` logits (or ``(B, S, H)`` hidden states) and holds a :class:`View`: hidden
rows, a map from each logical position to its row, and the head. Shape operators act on the map alone (``shapes.py``),
losses and other readers take just the rows they need (``losses.py``, ``readers.py``), and everything else computes
the values and goes on with an ordinary tensor.

The tensor is the output of an autograd function, so that code which never asks ``__torch_function__`` (C++, custom
functions, checkpointing) still gets the right values and the right gradients, at plain cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_any, tree_map_only

from lightning_liger.head.memory import detached, share_memory, version_of
from lightning_liger.head.padded_gradients import reaches_padding, through_the_padded_run
from lightning_liger.head.pending import NEWCOMERS, note_pending
from lightning_liger.head.view import Head, PlainSource, Source, View
from lightning_liger.mirrored import arange
from lightning_liger.sequence import SequenceGroup

__all__ = ["HANDLERS", "Handler", "Head", "LazyRows", "PlainSource", "Source", "View", "handles", "lazy"]


class _Lazify(torch.autograd.Function):
    """Gives a lazy tensor a place in the graph. Its backward only runs for readers that went past ``LazyRows``."""

    @staticmethod
    def forward(ctx: Any, view: View, *inputs: Tensor) -> Tensor:
        ctx.view = view
        return LazyRows(view)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        view: View = ctx.view
        needs = ctx.needs_input_grad[1:]
        if reaches_padding(view, grad):
            through_the_padded_run(view, grad)
            return (None, *(None for _ in needs))
        if torch.is_grad_enabled():  # create_graph=True: the gradient must itself be differentiable
            wanted = [t for t, need in zip(view.tensors(), needs, strict=True) if need]
            dense = view.dense()
        else:
            fresh = {id(t): t.detach().requires_grad_(need) for t, need in zip(view.tensors(), needs, strict=True)}
            wanted = [t for t in fresh.values() if t.requires_grad]
            with torch.enable_grad():
                dense = view.mapped(lambda t: fresh[id(t)]).dense()
        found = iter(torch.autograd.grad(dense, wanted, grad, allow_unused=True, create_graph=torch.is_grad_enabled()))
        return (None, *(next(found) if need else None for need in needs))


def lazy(view: View) -> LazyRows:
    """The lazy tensor of ``view``, with a place in the autograd graph."""
    inputs = view.tensors()
    if not torch.is_grad_enabled():  # what is made without gradients has none later either
        return LazyRows(view.mapped(detached))
    if not view.dtype.is_floating_point or not any(t.requires_grad for t in inputs):
        return LazyRows(view)
    made: LazyRows = _Lazify.apply(view, *inputs)
    made.node = _native(made, _GRAD_FN)
    with torch._C.DisableTorchFunctionSubclass():
        view.watch_backward(made)
    return made


_GRAD_FN: Any = vars(torch._C.TensorBase)["grad_fn"].__get__  # a property's getter; stubs know its value


def _native(tensor: Tensor, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return function(tensor, *args, **kwargs)


Handler = Callable[..., Any]
HANDLERS: dict[Any, Handler] = {}


def handles(*functions: Any) -> Callable[[Handler], Handler]:
    """Register a handler: called with the arguments of the torch function; NotImplemented computes the values."""

    def register(handler: Handler) -> Handler:
        for function in functions:
            HANDLERS[function] = handler
        return handler

    return register


class LazyRows(Tensor):
    """See the module's docstring. Made by :func:`lazy`, :meth:`hidden` and :meth:`logits`."""

    view_: View
    node: Any
    held: Tensor | None
    held_without_graph: Tensor | None
    parents: tuple[LazyRows, ...]
    replay: Callable[..., Any] | None
    pinned_at: int | None
    consumed_by: str | None
    stacked: tuple[tuple[LazyRows, ...], int] | None
    versions: list[tuple[Tensor, int]]

    @staticmethod
    def __new__(cls, view: View) -> LazyRows:
        made: LazyRows = torch.Tensor._make_wrapper_subclass(
            cls, view.shape, dtype=view.dtype, device=view.source.device, requires_grad=False
        )
        made.view_ = view
        made.node = made.held = made.held_without_graph = made.replay = made.pinned_at = None
        made.consumed_by = made.stacked = None
        made.parents = ()
        made.versions = [(t, version_of(t)) for t in view.written_to()]
        note_pending(made)
        return made

    # __new__ took everything; Tensor.__init__ takes no arguments
    def __init__(self, view: View) -> None:
        super().__init__()

    @staticmethod
    def hidden(
        rows: Tensor,
        index: Tensor,
        *,
        has_pads: bool,
        plain: PlainSource | None = None,
        path: tuple[Any, ...] = (),
        sequence: SequenceGroup | None = None,
    ) -> LazyRows:
        """Hidden states of logical shape ``(B, S, H)``.

        Args:
            rows: ``(T, H)``; ``index``: ``(B, S)`` row of each position, -1 for padding.
            has_pads: whether ``index`` holds -1 at all (known on the CPU, so nobody has to ask the device).
            sequence: who has the other rows, where these are ``(T / k, H)``.
        """
        for newcomer in list(NEWCOMERS):
            newcomer.look_for_shards()
        root = arange(index.numel(), index.device).view(index.shape)
        source = Source(rows, index.reshape(-1), root, None, plain if has_pads else None, path, sequence)
        return lazy(View(source, root, root.dim(), (), rows.dtype))

    @staticmethod
    def logits(hidden: Tensor, head: Head) -> LazyRows:
        """``head(hidden)`` for hidden states ``(..., H)``, lazy themselves or not."""
        if isinstance(hidden, LazyRows) and hidden.is_live() and hidden.view_.is_hidden_rows():
            view = hidden.view_
            return lazy(replace(view, source=replace(view.source, head=head), dtype=head.dtype))
        hidden = hidden.values_now("head") if isinstance(hidden, LazyRows) else hidden
        root = arange(hidden.shape[:-1].numel(), hidden.device).view(hidden.shape[:-1])
        source = Source(hidden.reshape(-1, hidden.shape[-1]), None, root, head=head)
        return lazy(View(source, root, root.dim(), (), head.dtype))

    # -- state -----------------------------------------------------------------------------------------------------

    def resolved(self) -> Tensor:
        """An ordinary tensor if the values of this tensor, or of what it is a view of, were already needed as such."""
        if self.replay is not None and self.pinned_at is None and self._has_its_own_graph():
            found = [p.resolved() for p in self.parents]
            pinned = any(p.pinned_at is not None for p in self.parents)
            if pinned or (self.held is None and not all(isinstance(f, LazyRows) for f in found)):
                self._follow([p.values_now("an expression of them") for p in self.parents])
        return self if self.held is None else self.held

    def _follow(self, found: list[Tensor]) -> None:
        """Repeat on the parents' values what made this tensor."""
        assert self.replay is not None
        values = self.replay(*found)
        pins = [p.pinned_at for p in self.parents]
        written = any(pin is not None and version_of(f) != pin for pin, f in zip(pins, found, strict=True))
        if not written or any(isinstance(values, Tensor) and share_memory(values, f) for f in found):
            self.held = values
            self.pinned_at = pins[0]
        else:
            # A copy that was taken before somebody wrote into its parent does not see the write; a view does.
            self.parents, self.replay = (), None

    def consume(self, what: str) -> None:
        """Note that a reader takes its rows past this tensor, whose own gradient therefore never exists."""
        self.check_unchanged(what)
        if torch.is_grad_enabled() and self.node is not None:
            self.consumed_by = what
        for parent in self.parents:
            parent.consume(what)

    def check_unchanged(self, what: str) -> None:
        """Refuse to compute values from weights or rows that are others now than when the logits were made.

        Raises:
            RuntimeError: something wrote into them, such as an optimizer's step.
        """
        if any(version_of(t) != version for t, version in self.versions):
            raise RuntimeError(
                f"{what} reads logits whose weights, or a tensor they were combined with, changed in place since they "
                "were made; they are computed only now. Read them before the change (an optimizer's step), or set "
                "fused_head=False for this module."
            )

    def is_live(self) -> bool:
        """Whether gradients may be sent straight to the rows."""
        return self.held is None and self._has_its_own_graph()

    def _has_its_own_graph(self) -> bool:
        """Whether the graph is the one that was made with the tensor, and not that of a function that returned it."""
        return _native(self, _GRAD_FN) is self.node

    def readable(self, what: str) -> View:
        """The view for a reader that may look at every position, padded ones too."""
        pads = self.view_.padding()
        if pads is None or not bool(pads.any()):
            return self.view_
        return self.view_.with_padding(what, torch.is_grad_enabled() and self.node is not None)

    def values_now(self, what: str) -> Tensor:
        """The values for a reader that needs them all. Kept, so that a second reader finds them."""
        found = self.resolved()
        if not isinstance(found, LazyRows):
            return found
        if not torch.is_grad_enabled() and self.held_without_graph is not None:
            return self.held_without_graph
        self.check_unchanged(what)
        if self.view_.source.head is not None:
            head = self.view_.source.head
            head.report.materialised(what, self.view_.position.numel(), head)
        if not self.is_live():
            values: Tensor = _native(self, torch.clone)
        else:
            view = self.readable(what)
            values = view.dense()
            view.watch_backward(values)
            for parent in self.parents:
                parent.consume(what)
            view.watch_padding(values, what)
        if self.node is not None and not torch.is_grad_enabled():
            self.held_without_graph = values
        else:
            self.held = values
        return values

    def settle_for_good(self) -> None:
        """See :mod:`lightning_liger.head.pending`. Whoever differentiates it later is too late in a plain run as well."""
        if self.held is None:
            self.held = self.values_now("being kept past the optimizer's step")

    def pin(self, what: str) -> Tensor:
        """From here on this tensor, and every view of it, is the ordinary tensor that is returned.

        Called before somebody can write into it. Values that were computed for this tensor alone share no memory with
        those of the tensor that it is a view of, and are made anew from them.
        """
        with torch.set_grad_enabled(self.node is not None or torch.is_grad_enabled()):
            if self.pinned_at is None:
                for parent in self.parents if self._has_its_own_graph() else ():
                    parent.pin(what)
            pinned = self.resolved()
            if isinstance(pinned, LazyRows):
                pinned = self.values_now(what)
            if self.pinned_at is None:
                self.pinned_at = version_of(pinned)
            return pinned

    # -- dispatch ---------------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from lightning_liger.head.dispatch import run

        return run(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable and tree_any(lambda x: isinstance(x, LazyRows), (args, kwargs)):
            raise RuntimeError(
                f"{func} writes into logits that were never computed. Set fused_head=False for this module."
            )
        with torch.no_grad():
            plain = lambda x: x.readable(str(func)).dense() if x.held is None else x.held  # noqa: E731
            return func(*tree_map_only(LazyRows, plain, args), **tree_map_only(LazyRows, plain, kwargs))
