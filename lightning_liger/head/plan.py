"""What an expression of logits needs for a chunk of rows: which products, and how they combine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_liger.head.chunks import rows_of_copies
from lightning_liger.head.sums import sum_dtype
from lightning_liger.head.tail import NORMALISERS, TailOp, apply_tail
from lightning_liger.head.view import Given, Mix, Source, View


@dataclass(frozen=True)
class Leaf:
    """One input of the expression: ``(rows, weight, bias)`` with a product in ``dtype``, or ``(values,)`` at ``index``.

    Holds none of the tensors that gradients reach: autograd keeps those, so that checkpointing can drop them.
    """

    dtype: torch.dtype | None
    index: Tensor | None

    @property
    def inputs(self) -> int:
        return 1 if self.dtype is None else 3


class Plan:
    """The expression of one view at ``N`` positions: which products it needs and how they combine."""

    def __init__(self, view: View, position: Tensor) -> None:
        self.n = position.numel()
        self.width = view.source.width
        self.device = view.source.device
        self.leaves: list[Leaf] = []
        # tensors of a chunk's size that the expression is made of
        self.copies = 0
        self._counted: set[Any] = set()
        self.inputs: list[Tensor | None] = []
        self._slots: dict[Any, int] = {}
        self._indexed: dict[Any, Tensor] = {}
        # whoever an id in the two tables names must live as long as they do
        self._alive: list[Any] = []
        self.evaluate = self._expression(view, position)
        self.copies += len(self._counted)
        self._slots.clear()
        self._indexed.clear()
        self._alive.clear()

    def _expression(self, view: View, position: Tensor) -> Callable[[Products], Tensor]:
        source, tail, dtype = view.source, view.tail, view.dtype
        if isinstance(source, Mix):
            self.copies += 1 + len(tail)
            left = self._expression(source.left, self._at(source.left, position))
            right = self._expression(source.right, self._at(source.right, position))
            op = source.op
            return lambda z: _lifted(apply_tail(_lifted(op(left(z), right(z)), dtype), tail), dtype)
        slot = self._slot(source, position)
        self._counted |= {(slot, tail[:i]) for i in range(len(tail) + 1)}
        return lambda z: _lifted(_tailed(z, slot, tail, dtype == torch.float64), dtype)

    def _at(self, view: View, position: Tensor) -> Tensor:
        """``view.position`` at ``position``; views with the same map share the answer, and so their products."""
        p = view.position
        key = (p.data_ptr(), p.shape, p.stride(), id(position))
        if key not in self._indexed:
            self._indexed[key] = view.flat[position]
            self._alive += (p, position)
        return self._indexed[key]

    def _slot(self, source: Source | Given, position: Tensor) -> int:
        if isinstance(source, Given):
            key: Any = (id(source), id(position))
        else:
            head = source.head
            assert head is not None
            key = (id(source.rows), id(source.row_of), id(head.weight), id(head.bias), head.dtype, id(position))
        if key not in self._slots:
            self._alive += (source, position)
            self._slots[key] = len(self.leaves)
            if isinstance(source, Given):
                self.leaves.append(Leaf(None, position))
                self.inputs.append(source.values)
            else:
                assert source.head is not None
                self.leaves.append(Leaf(source.head.dtype, None))
                self.inputs += (source.hidden_at(position), source.head.weight, source.head.bias)
        return self._slots[key]

    @property
    def is_one_product(self) -> bool:
        """Whether the same rows of one head are all that the expression needs."""
        return len(self.leaves) == 1 and self.leaves[0].dtype is not None

    # -- one chunk ---------------------------------------------------------------------------------------------------

    def parts(self, *, backward: bool = False) -> list[slice]:
        """Chunks of rows, of which all copies that are made on the way fit into the budget."""
        # the program's own; backward holds what forward made, and gradients beside it
        copies = 2 * self.copies + 2 if backward else self.copies + 1
        step = rows_of_copies(self.width, self.device, copies)
        if self.device.type == "cpu":
            step = max(1, step // max(1, len(self.leaves)))
        return [slice(s, min(s + step, self.n)) for s in range(0, max(self.n, 1), step)]

    def products(self, tensors: Sequence[Sequence[Tensor | None]], part: slice) -> Products:
        """The rows of every leaf in the dtype of the computation, fp32 at least."""
        return Products(_product(leaf, given, part) for leaf, given in zip(self.leaves, tensors, strict=True))


class Products(list[Tensor]):
    """The products of one chunk, and what normalisers made of them: an entropy reads ``p`` and ``log p`` of one row."""

    def __init__(self, products: Iterable[Tensor]) -> None:
        super().__init__(products)
        self.normalised: dict[Any, Tensor] = {}


def _tailed(z: Products, slot: int, tail: tuple[TailOp, ...], double: bool) -> Tensor:
    """Product ``slot`` after ``tail``; log-probabilities are computed once."""
    if not tail:
        return z[slot].double() if double else z[slot]
    *before, last = tail
    if last.kind not in NORMALISERS:
        return apply_tail(_tailed(z, slot, tuple(before), double), (last,))
    key = (slot, tuple(before), double)
    if key not in z.normalised:
        z.normalised[key] = torch.log_softmax(_tailed(z, slot, tuple(before), double), -1)
    return z.normalised[key] if last.kind == "log_softmax" else z.normalised[key].exp()


def _lifted(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Truth values that were cast to numbers; numbers stay as precise as they are."""
    return values.to(dtype) if dtype.is_floating_point and not values.is_floating_point() else values


def _product(leaf: Leaf, tensors: Sequence[Tensor | None], part: slice) -> Tensor:
    rows, *projection = tensors
    assert rows is not None
    if leaf.dtype is None:
        assert leaf.index is not None
        values = rows[leaf.index[part]]
        return values.to(sum_dtype(values.dtype)) if values.is_floating_point() else values
    dtype = leaf.dtype
    weight, bias = projection
    assert weight is not None
    product = torch.nn.functional.linear(
        rows[part].to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    )
    return product.to(sum_dtype(dtype))
