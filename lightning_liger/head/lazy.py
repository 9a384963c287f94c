"""A tensor that knows which hidden rows it is made of, and is computed only if somebody needs its values.

:class:`LazyRows` looks like ``(B, S, V)`` logits (or ``(B, S, H)`` hidden states) and holds the hidden rows, a map
from each logical position to its row, and the head. Shape operators act on the map alone (``shapes.py``), losses read
just the rows they need (``losses.py``), and everything else computes the values and goes on with an ordinary tensor.

The tensor is the output of an autograd function, so that code which never asks ``__torch_function__`` (C++, custom
functions, checkpointing) still gets the right values and the right gradients, at plain cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_any, tree_map_only

from lightning_liger.head.linear_cross_entropy import TailOp, apply_tail, head_product
from lightning_liger.report import HeadReport


class PlainSource(Protocol):
    """Where the values at padded positions come from (``padding/boundary.py``)."""

    def value(self, path: tuple[Any, ...]) -> Tensor:
        """``(B, S, H)`` hidden states of the padded run."""

    def scored(self, what: str) -> None:
        """A loss counts padded positions: the call should have been padded."""

    def read(self, path: tuple[Any, ...], what: str, differentiable: bool) -> Tensor | None:
        """Padded hidden states for a reader of padded positions; None where they may, or must, read as zero."""

    def watch(self, what: str) -> Callable[[Tensor], None] | None:
        """A gradient hook on zeroed values that raises if the reader depends on padded positions; None if it is known."""


@dataclass(frozen=True)
class Head:
    """The output projection: ``weight`` ``(V, H)``, ``bias`` ``(V,)`` or None, ``dtype`` of its product."""

    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    backend: str
    report: HeadReport


@dataclass(frozen=True)
class Source:
    """What lazy tensors are views of.

    Attributes:
        rows: ``(N, H)`` hidden rows.
        row_of: ``(P,)`` int64 row of each padded position, -1 for padding; None when position and row are the same.
        root: the position map of the unsliced tensor, ``(B, S)``.
        head: the projection, or None for the hidden states themselves.
        plain: how to get padded positions; None when there are none.
        path: where the hidden states stood in the backbone's output.
    """

    rows: Tensor
    row_of: Tensor | None
    root: Tensor
    head: Head | None = None
    plain: PlainSource | None = None
    path: tuple[Any, ...] = ()

    @property
    def width(self) -> int:
        return self.rows.shape[-1] if self.head is None else self.head.weight.shape[0]

    def padded(self, value: Tensor) -> Source:
        """The same source over the hidden states of the padded run."""
        return replace(self, rows=value.reshape(-1, value.shape[-1]), row_of=None, plain=None)

    def detached(self) -> Source:
        head = self.head
        if head is not None:
            bias = None if head.bias is None else head.bias.detach()
            head = replace(head, weight=head.weight.detach(), bias=bias)
        return replace(self, rows=self.rows.detach(), head=head)


@dataclass(frozen=True)
class View:
    """A logical tensor over a source: ``position`` holds its shape without the last-dim-to-be, which sits at ``vdim``."""

    source: Source
    position: Tensor
    vdim: int
    tail: tuple[TailOp, ...]
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        lead = tuple(self.position.shape)
        return (*lead[: self.vdim], self.source.width, *lead[self.vdim :])

    def rows(self, position: Tensor) -> Tensor:
        """Hidden rows at ``position`` (any shape, no padding among them)."""
        row_of = self.source.row_of
        return self.source.rows[position if row_of is None else row_of[position]]

    def dense(self) -> Tensor:
        """The values, differentiable; padded positions read as a zero hidden row."""
        source = self.source
        whole = self.position is source.root
        if source.row_of is None:
            hidden = source.rows.view(*source.root.shape, -1) if whole else source.rows[self.position]
        else:
            row = source.row_of[self.position]
            hidden = source.rows[row.clamp_min(0)]
            hidden = hidden.masked_fill((row < 0).unsqueeze(-1), 0.0)
        if source.head is not None:
            hidden = head_product(hidden, source.head.weight, source.head.bias, source.head.dtype)
        return apply_tail(hidden, self.tail).movedim(-1, self.vdim).to(self.dtype)


class _Lazify(torch.autograd.Function):
    """Gives a lazy tensor a place in the graph. Its backward only runs for readers that went past ``LazyRows``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor | None, bias: Tensor | None, view: View) -> Tensor:
        ctx.view = view
        return LazyRows(view)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        source = ctx.view.source.detached()
        leaves = [source.rows] if source.head is None else [source.rows, source.head.weight, source.head.bias]
        wanted = [t for t, need in zip(leaves, ctx.needs_input_grad, strict=False) if t is not None and need]
        with torch.enable_grad():
            for leaf in wanted:
                leaf.requires_grad_()
            dense = replace(ctx.view, source=source).dense()
        found = iter(torch.autograd.grad(dense, wanted, grad, allow_unused=True))
        grads = [
            next(found) if t is not None and need else None
            for t, need in zip(leaves, ctx.needs_input_grad, strict=False)
        ]
        return (*grads, *([None] * (4 - len(grads))))


def lazy(view: View) -> LazyRows:
    """The lazy tensor of ``view``, with a place in the autograd graph."""
    head = view.source.head
    weight, bias = (None, None) if head is None else (head.weight, head.bias)
    inputs = (view.source.rows, weight, bias)
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in inputs):
        return LazyRows(view)
    made: LazyRows = _Lazify.apply(*inputs, view)
    made.node = _native(made, _GRAD_FN)
    return made


# the getter of a property, which type stubs know as its value
_GRAD_FN: Any = vars(torch._C.TensorBase)["grad_fn"].__get__


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
    parent: LazyRows | None
    replay: Callable[[Tensor], Any] | None

    @staticmethod
    def __new__(cls, view: View) -> LazyRows:
        made: LazyRows = torch.Tensor._make_wrapper_subclass(
            cls, view.shape, dtype=view.dtype, device=view.source.rows.device, requires_grad=False
        )
        made.view_ = view
        made.node = made.held = made.held_without_graph = made.parent = made.replay = None
        return made

    # __new__ took everything; Tensor.__init__ takes no arguments
    def __init__(self, view: View) -> None:
        super().__init__()

    @staticmethod
    def hidden(
        rows: Tensor, index: Tensor, *, has_pads: bool, plain: PlainSource | None = None, path: tuple[Any, ...] = ()
    ) -> LazyRows:
        """Hidden states of logical shape ``(B, S, H)``.

        Args:
            rows: ``(T, H)``; ``index``: ``(B, S)`` row of each position, -1 for padding.
            has_pads: whether ``index`` holds -1 at all (known on the CPU, so nobody has to ask the device).
        """
        root = torch.arange(index.numel(), device=index.device).view(index.shape)
        source = Source(rows, index.reshape(-1), root, plain=plain if has_pads else None, path=path)
        return lazy(View(source, root, root.dim(), (), rows.dtype))

    @staticmethod
    def logits(hidden: Tensor, head: Head) -> LazyRows:
        """``head(hidden)`` for hidden states ``(..., H)``, lazy themselves or not."""
        if isinstance(hidden, LazyRows) and hidden.is_live() and hidden.view_.vdim == hidden.dim() - 1:
            view = hidden.view_
            return lazy(replace(view, source=replace(view.source, head=head), dtype=head.dtype))
        hidden = hidden.values_now("head") if isinstance(hidden, LazyRows) else hidden
        root = torch.arange(hidden.shape[:-1].numel(), device=hidden.device).view(hidden.shape[:-1])
        source = Source(hidden.reshape(-1, hidden.shape[-1]), None, root, head=head)
        return lazy(View(source, root, root.dim(), (), head.dtype))

    # -- state -----------------------------------------------------------------------------------------------------

    def resolved(self) -> Tensor:
        """An ordinary tensor if the values of this tensor, or of what it is a view of, were already needed as such."""
        if self.held is None and self.parent is not None and self.replay is not None:
            parent = self.parent.resolved()
            if not isinstance(parent, LazyRows):
                self.held = self.replay(parent)
        return self if self.held is None else self.held

    def is_live(self) -> bool:
        """Whether gradients may be sent straight to the rows: the graph is the one that was made with the tensor."""
        return self.held is None and _native(self, _GRAD_FN) is self.node

    def readable(self, what: str) -> View:
        """The view for a reader that may look at every position, padded ones too."""
        view, source = self.view_, self.view_.source
        if source.plain is None or source.row_of is None or not bool((source.row_of[view.position] < 0).any()):
            return view
        padded = source.plain.read(source.path, what, torch.is_grad_enabled() and self.node is not None)
        return view if padded is None else replace(view, source=source.padded(padded))

    def values_now(self, what: str) -> Tensor:
        """The values for a reader that needs them all. Kept, so that a second reader finds them."""
        found = self.resolved()
        if not isinstance(found, LazyRows):
            return found
        if not torch.is_grad_enabled() and self.held_without_graph is not None:
            return self.held_without_graph
        if self.view_.source.head is not None:
            self.view_.source.head.report.materialised(what)
        if not self.is_live():
            values: Tensor = _native(self, torch.clone)
        else:
            view = self.readable(what)
            values = view.dense()
            plain = view.source.plain
            if plain is not None and values.requires_grad and view.position is view.source.root:
                hook = plain.watch(what)
                if hook is not None:
                    values.register_hook(hook)
        if self.node is not None and not torch.is_grad_enabled():
            self.held_without_graph = values
        else:
            self.held = values
        return values

    def pin(self, what: str) -> Tensor:
        """From here on this tensor, and every view of it, is the ordinary tensor that is returned."""
        with torch.set_grad_enabled(self.node is not None or torch.is_grad_enabled()):
            if self.parent is not None:
                self.parent.pin(what)
                return self.resolved()
            return self.values_now(what)

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
        plain = lambda x: x.view_.dense() if x.held is None else x.held  # noqa: E731
        with torch.no_grad():
            return func(*tree_map_only(LazyRows, plain, args), **tree_map_only(LazyRows, plain, kwargs))
