"""A tensor that looks like the padded ``(B, S, ...)`` one and holds the rows of real tokens alone.

Code of any decoder runs on it unchanged: what it does token by token happens on the rows (``pointwise.py``,
``rowwise.py``), shape operators move the two ragged dimensions about (``views.py``), an ordinary tensor that it meets
is read at the columns of the real tokens, and attention stays inside each document (``attention.py``). There is no
operator that could look at a padded position: one that is not known raises :class:`Unpackable`, and the call is
repeated as it was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_liger.padding.backends.errors import PackingError
from lightning_liger.padding.layout import Layout
from lightning_liger.report import PaddingReport

# How many blocks of a decoder the running code is inside of.
_DEPTH: ContextVar[int] = ContextVar("lightning_liger_block_depth", default=0)

# What becomes of a function that is not known, outside of all blocks of the decoder that is running.
OUTSIDE: ContextVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None] = ContextVar(
    "lightning_liger_outside", default=None
)

# The dispatcher, which puts itself here: it imports this module.
RUN: list[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = []

# What the running code has done that depends on where a token stands; None while nobody asks.
PLACES: ContextVar[list[str] | None] = ContextVar("lightning_liger_places", default=None)


def note_place(what: str) -> None:
    """Note that a result depends on the rows or columns of tokens, not on the tokens alone."""
    if (found := PLACES.get()) is not None:
        found.append(what)


class Unpackable(PackingError):
    """The decoder does something that cannot be done on real tokens alone; the text says what."""


@dataclass(frozen=True)
class Packing:
    """What every ragged tensor of one decoder call shares.

    Attributes:
        layout: where the real tokens are.
        backend: the ``attention`` option.
        report: told which backends were used.
        masks: verdicts on attention masks seen in this call.
    """

    layout: Layout
    backend: str
    report: PaddingReport
    masks: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)


@contextmanager
def inside_block() -> Iterator[None]:
    token = _DEPTH.set(_DEPTH.get() + 1)
    try:
        yield
    finally:
        _DEPTH.reset(token)


def is_outside_blocks() -> bool:
    return _DEPTH.get() == 0


class RaggedTensor(Tensor):
    """See the module's docstring.

    Attributes:
        packing: layout and options of the call.
        data_: ``(T, *others)``, the dimensions other than the ragged ones in their order.
        size_: the logical shape.
        batch, seq: where ``B`` and ``S`` stand in the logical shape; equal where one dimension of ``B * S`` holds both.
        node: the autograd node that leads from this wrapper to the rows, where there is one.
        shared: another ragged tensor may hold the same memory.
        outside: made outside of all blocks.
    """

    packing: Packing
    data_: Tensor
    size_: torch.Size
    batch: int
    seq: int
    node: Any
    shared: bool
    outside: bool

    @staticmethod
    def __new__(cls, data: Tensor, packing: Packing, batch: int, seq: int) -> RaggedTensor:
        shape = list(data.shape[1:])
        rows, length = packing.layout.shape
        if batch == seq:
            shape.insert(batch, rows * length)
        else:
            for place, size in sorted(((batch, rows), (seq, length))):
                shape.insert(place, size)
        made: RaggedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            shape,
            dtype=data.dtype,
            device=data.device,
            # as code may ask, and so that what a foreign autograd function makes of it can be told
            requires_grad=data.requires_grad and torch.is_grad_enabled(),
        )
        made.size_ = torch.Size(shape)
        made.packing, made.data_, made.batch, made.seq = packing, data, batch, seq
        made.node, made.shared, made.outside = None, False, is_outside_blocks()
        return made

    # __new__ took everything; Tensor.__init__ takes no arguments
    def __init__(self, data: Tensor, packing: Packing, batch: int, seq: int) -> None:
        super().__init__()

    # What is asked most, without a detour through the dispatcher.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.size_

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.data_.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.data_.device

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self.size_)

    def dim(self) -> int:
        return len(self.size_)

    def size(self, dim: int | None = None) -> Any:
        return self.size_ if dim is None else self.size_[dim]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return RUN[0](func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise Unpackable(f"{func} is called past PyTorch's own functions")


# the getters of properties, which type stubs know as their values
_GRAD_FN: Any = vars(torch._C.TensorBase)["grad_fn"].__get__
_REQUIRES_GRAD: Any = vars(torch._C.TensorBase)["requires_grad"].__get__


def native(tensor: Tensor, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return function(tensor, *args, **kwargs)


def wrap(data: Tensor, packing: Packing, batch: int, seq: int) -> RaggedTensor:
    """A ragged tensor over ``data`` ``(T, *others)``.

    Outside of blocks it gets a place in the autograd graph, because there it may be handed to reentrant checkpointing,
    which sees nothing but the wrapper.
    """
    if is_outside_blocks() and data.requires_grad and torch.is_grad_enabled():
        return with_node(data, packing, batch, seq)
    return RaggedTensor(data, packing, batch, seq)


def with_node(data: Tensor, packing: Packing, batch: int, seq: int) -> RaggedTensor:
    made: RaggedTensor = _Padded.apply(data, packing, batch, seq)
    made.data_ = data
    made.node = native(made, _GRAD_FN)
    return made


def rows_of(tensor: RaggedTensor) -> Tensor:
    """``(T, *others)``, differentiable.

    Raises:
        Unpackable: a foreign autograd function made the tensor.
    """
    if not torch.is_grad_enabled():
        return tensor.data_
    with torch._C.DisableTorchFunctionSubclass():
        grad_fn = _GRAD_FN(tensor)
    if grad_fn is None:
        if tensor.data_.requires_grad or not native(tensor, _REQUIRES_GRAD):
            return tensor.data_
        # detached and made a leaf: the input of a block that reentrant checkpointing computes again
        rows: Tensor = _Rows.apply(tensor)
        return rows
    if grad_fn is not tensor.node:
        name = type(grad_fn).__name__
        # what was computed inside a block saw wrappers without a place in the graph
        if name != "CheckpointFunctionBackward" or not tensor.outside:
            raise Unpackable(f"an autograd function of its own ({name.removesuffix('Backward')})")
        tensor.data_ = _Rows.apply(tensor)
        tensor.node = grad_fn
    return tensor.data_


def gather(values: Tensor, packing: Packing, batch: int, seq: int) -> Tensor:
    """``(T, *others)`` of padded ``values``."""
    index = packing.layout.on(values.device).gather
    if batch == seq:
        return values.movedim(batch, 0)[index]
    return values.movedim((batch, seq), (0, 1)).flatten(0, 1)[index]


def scatter(data: Tensor, packing: Packing, batch: int, seq: int) -> Tensor:
    """The padded tensor with zeros at padding."""
    rows, length = packing.layout.shape
    index = packing.layout.on(data.device).gather
    flat = data.new_zeros(rows * length, *data.shape[1:]).index_copy(0, index, data)
    if batch == seq:
        return flat.movedim(0, batch)
    return flat.unflatten(0, (rows, length)).movedim((0, 1), (batch, seq))


class _Padded(torch.autograd.Function):
    """From rows to the wrapper."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, packing: Packing, batch: int, seq: int) -> RaggedTensor:
        ctx.place = packing, batch, seq
        return RaggedTensor(data.detach(), packing, batch, seq)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return gather(grad, *ctx.place), None, None, None


class _Rows(torch.autograd.Function):
    """From the wrapper to rows, where the wrapper is all that the graph knows."""

    @staticmethod
    def forward(ctx: Any, tensor: RaggedTensor) -> Tensor:
        ctx.place = tensor.packing, tensor.batch, tensor.seq
        return tensor.data_.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return scatter(grad, *ctx.place)
