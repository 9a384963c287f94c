"""What lazy tensors are made of: hidden rows under a head, and ordinary tensors beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_liger.head.rows import take_rows
from lightning_liger.parallel.exchanges import all_gather, all_sum
from lightning_liger.report import HeadReport
from lightning_liger.sequence import SequenceGroup


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


class WeightGathering(Protocol):
    """A group of sharded weights (``gathering.py``, ``partitioned.py``)."""

    is_alone: bool

    def ensure(self, _: Any = None) -> None:
        """Make the weights readable; a hook on gradients too."""

    def give_back(self, _: Any = None) -> None:
        """Called before a backward, with a gradient."""

    def shards(self) -> list[Tensor]:
        """What an optimizer writes into when it changes the weights."""


class WeightHold(Protocol):
    """Keeps weights gathered for as long as it lives."""

    gathering: Any  # WeightGathering


@dataclass(frozen=True)
class Head:
    """The output projection: ``weight`` ``(V, H)``, ``bias`` ``(V,)`` or None, ``dtype`` of its product.

    Attributes:
        hold: keeps a sharded weight gathered, see :mod:`lightning_liger.head.gathering`.
        hooks: what wants to know that a gradient is about to reach the logits.
        readings: who read which rows of this call, and habits: who did in earlier calls, see
            :mod:`lightning_liger.head.sharing`.
    """

    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    backend: str
    report: HeadReport
    hold: WeightHold | None = None
    hooks: list[Callable[[Tensor], Any]] = field(default_factory=list)
    readings: list[Any] = field(default_factory=list)
    habits: Any = None


@dataclass(frozen=True)
class Source:
    """What lazy tensors are views of.

    Attributes:
        rows: ``(N, H)`` hidden rows; where they are divided among ranks, those of this rank.
        row_of: ``(P,)`` int64 row of each padded position, -1 for padding; None when position and row are the same.
            Rows that are divided are numbered through: rank 0 has the first ``N``.
        root: the position map of the unsliced tensor, ``(B, S)``.
        head: the projection, or None for the hidden states themselves.
        plain: how to get padded positions; None when there are none.
        path: where the hidden states stood in the backbone's output.
        sequence: among whom the rows are divided.
    """

    rows: Tensor
    row_of: Tensor | None
    root: Tensor
    head: Head | None = None
    plain: PlainSource | None = None
    path: tuple[Any, ...] = ()
    sequence: SequenceGroup | None = None

    @property
    def width(self) -> int:
        if self.head is None:
            return self.rows.shape[-1]
        weight = self.head.weight  # ZeRO stage 3 keeps the shape of a weight that is in pieces
        return int(getattr(weight, "ds_shape", weight.shape)[0])

    @property
    def device(self) -> torch.device:
        return self.rows.device

    def padded(self, value: Tensor) -> Source:
        """The same source over the hidden states of the padded run."""
        value = value if self.rows.requires_grad else value.detach()
        return replace(self, rows=value.reshape(-1, value.shape[-1]), row_of=None, plain=None, sequence=None)

    def whole(self) -> Source:
        """The same with all rows, of all ranks, on each of them."""
        if self.sequence is None:
            return self
        return replace(self, rows=all_gather(self.rows, self.sequence), sequence=None)

    def take(self, row: Tensor) -> Tensor:
        """``(*row.shape, H)`` hidden rows by number, on every rank."""
        if self.sequence is None or not row.numel():
            return take_rows(self.rows, row)
        count = self.rows.shape[0]
        if 2 * row.numel() > count * self.sequence.size:
            return take_rows(self.whole().rows, row)
        own = row - self.sequence.rank * count
        others = (own < 0) | (own >= count)
        found = take_rows(self.rows, own.clamp(0, count - 1)).masked_fill(others.unsqueeze(-1), 0.0)
        return all_sum(found, self.sequence)

    def hidden_at(self, position: Tensor) -> Tensor:
        """``(*position.shape, H)`` hidden rows, on every rank; padding reads as zero."""
        if self.row_of is None:
            whole = position is self.root
            return self.rows.view(*self.root.shape, -1) if whole else take_rows(self.rows, position)
        row = self.row_of[position]
        hidden = self.take(row.clamp_min(0))
        return hidden if self.plain is None else hidden.masked_fill((row < 0).unsqueeze(-1), 0.0)


@dataclass(frozen=True)
class Given:
    """An ordinary tensor in an expression: ``values`` ``(Q, V)`` or ``(Q, 1)``, one row for each position.

    Rows that are ``unknown`` ``(Q,)``, because they were read off padded positions, are what ``settled`` gives.
    """

    values: Tensor
    root: Tensor
    head: None = None
    unknown: Tensor | None = None
    settled: Callable[[], Tensor] | None = None

    @property
    def width(self) -> int:
        return self.values.shape[-1]

    @property
    def device(self) -> torch.device:
        return self.values.device
