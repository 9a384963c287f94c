"""What a lazy tensor stands for: hidden rows, a map from logical positions to rows, a head, and steps after it.

A :class:`Source` is a set of rows under one head (or the hidden states themselves). :class:`Given` is an ordinary
tensor that takes part in an expression, :class:`Mix` an element-wise function of two views of equal shape (a
distillation loss of student and teacher, ``p * log p``). A :class:`View` is a logical tensor over any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_liger.head.linear_cross_entropy import head_product
from lightning_liger.head.source import Given, Head, PlainSource, Source, WeightGathering
from lightning_liger.head.tail import TailOp, apply_tail
from lightning_liger.sequence import SequenceGroup

__all__ = ["AnySource", "Given", "Head", "Mix", "PlainSource", "Source", "View"]


@dataclass(frozen=True)
class Mix:
    """``op(left, right)``, element by element, of two views with the same leading shape; the vocabulary is last."""

    op: Callable[[Tensor, Tensor], Tensor]
    left: View
    right: View
    root: Tensor

    @property
    def width(self) -> int:
        return max(self.left.source.width, self.right.source.width)

    @property
    def device(self) -> torch.device:
        return self.left.source.device

    @property
    def head(self) -> Head | None:
        return self.left.source.head or self.right.source.head


AnySource: TypeAlias = Source | Given | Mix


@dataclass(frozen=True)
class View:
    """A logical tensor over a source: ``position`` holds its shape without the last-dim-to-be, which sits at ``vdim``."""

    source: Any  # AnySource; most code knows which one it has
    position: Tensor
    vdim: int
    tail: tuple[TailOp, ...]
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        lead = tuple(self.position.shape)
        return (*lead[: self.vdim], self.source.width, *lead[self.vdim :])

    @property
    def flat(self) -> Tensor:
        return self.position.reshape(-1)

    def is_hidden_rows(self) -> bool:
        """Whether these are hidden states as a head takes them."""
        source = self.source
        return isinstance(source, Source) and source.head is None and self.vdim == self.position.dim() and not self.tail

    def rows(self, position: Tensor) -> Tensor:
        """Hidden rows at ``position`` (any shape, no padding among them), on every rank."""
        row_of = self.source.row_of
        found: Tensor = self.source.take(position if row_of is None else row_of[position])
        return found

    # -- the tensors behind it ---------------------------------------------------------------------------------------

    def leaves(self) -> Iterator[Source | Given]:
        if isinstance(self.source, Mix):
            yield from self.source.left.leaves()
            yield from self.source.right.leaves()
        else:
            yield self.source

    def tensors(self) -> list[Tensor]:
        """Every distinct tensor that gradients can reach."""
        found: dict[int, Tensor] = {}
        self.mapped(lambda t: found.setdefault(id(t), t))
        return list(found.values())

    @property
    def sequence(self) -> SequenceGroup | None:
        """Among whom some of the rows are divided."""
        return next((s.sequence for s in self.leaves() if isinstance(s, Source) and s.sequence is not None), None)

    @property
    def requires_grad(self) -> bool:
        return any(t.requires_grad for t in self.tensors())

    def mapped(self, function: Callable[[Tensor], Tensor]) -> View:
        """The same view over other rows, weights and given values."""
        source = self.source
        if isinstance(source, Mix):
            made: AnySource = replace(source, left=source.left.mapped(function), right=source.right.mapped(function))
        elif isinstance(source, Given):
            made = replace(source, values=function(source.values))
        else:
            head = source.head
            if head is not None:
                bias = None if head.bias is None else function(head.bias)
                head = replace(head, weight=function(head.weight), bias=bias)
            made = replace(source, rows=function(source.rows), head=head)
        return replace(self, source=made)

    # -- sharded weights ---------------------------------------------------------------------------------------------

    def gatherings(self) -> list[WeightGathering]:
        return [s.head.hold.gathering for s in self.leaves() if s.head is not None and s.head.hold is not None]

    def written_to(self) -> list[Tensor]:
        """Every tensor that gradients can reach, and what an optimizer writes into in its stead."""
        return [*self.tensors(), *(shard for gathering in self.gatherings() for shard in gathering.shards())]

    def gather(self) -> None:
        """Make the weights readable, wherever they are."""
        for gathering in self.gatherings():
            gathering.ensure()

    def watch_backward(self, *outputs: Tensor) -> None:
        """Tell whoever watches these logits when gradients of what was computed from them arrive."""
        gatherings = self.gatherings()
        hooks: list[Callable[[Tensor], Any]] = [g.give_back for g in gatherings]
        hooks += [hook for s in self.leaves() if s.head is not None for hook in s.head.hooks]
        hooks += [g.ensure for g in gatherings]
        for output in outputs:
            if output.requires_grad:
                for hook in hooks:
                    output.register_hook(hook)

    # -- padding -----------------------------------------------------------------------------------------------------

    def padding(self, position: Tensor | None = None) -> Tensor | None:
        """Where the view's positions are padding, bool in ``position``'s shape; None if there is no padding at all."""
        position = self.position if position is None else position
        source = self.source
        if isinstance(source, Mix):
            left = source.left.padding(source.left.flat[position])
            right = source.right.padding(source.right.flat[position])
            return left | right if left is not None and right is not None else right if left is None else left
        if isinstance(source, Given):
            return None if source.unknown is None else source.unknown[position]
        if source.plain is None or source.row_of is None:
            return None
        pads: Tensor = source.row_of[position] < 0
        return pads

    def with_padding(self, what: str, differentiable: bool) -> View:
        """The view over the padded run's hidden states, wherever they can be had."""
        source = self.source
        if isinstance(source, Mix):
            left = source.left.with_padding(what, differentiable)
            right = source.right.with_padding(what, differentiable)
            return replace(self, source=replace(source, left=left, right=right))
        if isinstance(source, Given):
            return self._with_settled(source)
        if source.plain is None or source.row_of is None:
            return self
        value = source.plain.read(source.path, what, differentiable)
        if value is None:
            if not differentiable:
                # nothing could tell later whether somebody relied on the zeros
                source.plain.scored(what)
            return self
        return replace(self, source=source.padded(value))

    def _with_settled(self, source: Given) -> View:
        if source.settled is None:
            return self
        return replace(self, source=Given(source.settled().reshape(source.values.shape), source.root))

    def scored(self, what: str) -> View:
        """The view over the padded run, because a loss is known to count padded positions."""
        source = self.source
        if isinstance(source, Mix):
            left, right = source.left.scored(what), source.right.scored(what)
            return replace(self, source=replace(source, left=left, right=right))
        if isinstance(source, Given):
            return self._with_settled(source)
        if source.plain is None or source.row_of is None:
            return self
        source.plain.scored(what)
        return replace(self, source=source.padded(source.plain.value(source.path)))

    def watch_padding(self, values: Tensor, what: str) -> None:
        """Where ``values`` hold zeros for padding that could not be computed: check that no gradient comes back there."""
        pads = self.padding()
        plains = [s.plain for s in self.leaves() if isinstance(s, Source) and s.plain is not None]
        if pads is None or not values.requires_grad or all(p.watch(what) is None for p in plains):
            return
        vdim = self.vdim if values.shape == self.shape else None

        def check(grad: Tensor) -> None:
            if bool((grad if vdim is None else grad.movedim(vdim, -1))[pads].any()):
                for plain in plains:
                    plain.scored(what)

        values.register_hook(check)

    # -- values ------------------------------------------------------------------------------------------------------

    def dense(self) -> Tensor:
        """The values, differentiable; padded positions read as a zero hidden row."""
        self.gather()
        with torch.autocast(self.source.device.type, enabled=False):
            return self._at(self.position).movedim(-1, self.vdim)

    def _at(self, position: Tensor) -> Tensor:
        source = self.source
        if isinstance(source, Mix):
            left, right = source.left, source.right
            if position is not source.root:
                left = replace(left, position=left.flat[position])
                right = replace(right, position=right.flat[position])
            values = source.op(left._at(left.position), right._at(right.position))
        elif isinstance(source, Given):
            values = source.values[position]
        else:
            values = source.hidden_at(position)
            if source.head is not None:
                values = head_product(values, source.head.weight, source.head.bias, source.head.dtype)
        if self.tail:
            # a float() before the steps lets them run in fp32; a bfloat16() after them comes last
            values = values.to(torch.promote_types(values.dtype, self.dtype))
        return apply_tail(values, self.tail).to(self.dtype)
