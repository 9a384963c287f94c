"""Rows of logits that are read are divided evenly among the ranks that share a batch, whoever has their hidden states.

Every rank runs the user's whole step, so that all of them ask for the same rows. Each computes its share, ``1 / k`` of
the rows that are asked for (of a loss: those with labels), for which hidden rows move between ranks. What comes out, a
few numbers for each row or a sum, goes to all ranks: to the user's code everything is as it is on one.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_liger.head.memory import detached
from lightning_liger.head.rows import take_rows
from lightning_liger.head.source import Source
from lightning_liger.head.view import Mix, View
from lightning_liger.mirrored import arange, cpu_values, ordinary, sent
from lightning_liger.parallel.exchanges import all_gather, all_sum, all_to_all
from lightning_liger.sequence import SequenceGroup


@dataclass(frozen=True)
class Share:
    """This rank's share of ``count`` rows; shares are equally long, the last rows of all being repeated.

    Attributes:
        view: of the share alone, ``(length, V)``.
        position: ``(length,)``, its rows in the view.
        count: rows of all shares. own: those of this share that are no repetition.
    """

    view: View
    position: Tensor
    count: int
    own: slice
    sequence: SequenceGroup

    @property
    def own_position(self) -> Tensor:
        return self.position[: self.own.stop - self.own.start]

    def part(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Of tensors with ``count`` rows, those of the share, repetitions included."""
        return tuple(_lengthened(t[self.own], t, self.position.numel()) for t in ordinary(tensors))

    def own_part(self, tensor: Tensor) -> Tensor:
        """Of a tensor with ``count`` rows, those of the share."""
        return tensor[self.own]

    def of_all(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """``count`` rows of each of the tensors that every rank has for its share."""
        return tuple(all_gather(p, self.sequence)[: self.count] for p in parts)

    def sum(self, part: Tensor) -> Tensor:
        """Of what each rank has for its own rows."""
        return all_sum(part, self.sequence)


def share_of(view: View, position: Tensor) -> Share | None:
    """This rank's share of the rows of ``view`` at ``position`` ``(N,)``; None where no rows are divided.

    All ranks that share the batch call this with the same positions.
    """
    sequence, count = view.sequence, position.numel()
    if sequence is None or not count:
        return None
    length = -(-count // sequence.size)
    own = slice(min(sequence.rank * length, count), min((sequence.rank + 1) * length, count))
    root = arange(length, position.device)
    return Share(_shared(view, position, own, root, sequence), root, count, own, sequence)


def _shared(view: View, position: Tensor, own: slice, root: Tensor, sequence: SequenceGroup) -> View:
    """``view`` as a view of the share alone."""
    source = view.source
    if isinstance(source, Mix):
        left = _shared(source.left, source.left.flat[position], own, root, sequence)
        right = _shared(source.right, source.right.flat[position], own, root, sequence)
        return replace(view, source=replace(source, left=left, right=right, root=root), position=root, vdim=1)
    if not isinstance(source, Source) or source.sequence is None:
        return replace(view, position=_lengthened(position[own], position, root.numel()), vdim=1)
    assert source.row_of is not None
    rows = _exchanged(source, source.row_of[position], own, root.numel())
    made = replace(source, rows=rows, row_of=None, root=root, plain=None, sequence=None)
    return replace(view, source=made, position=root, vdim=1)


def _lengthened(part: Tensor, whole: Tensor, length: int) -> Tensor:
    """``part`` with as many repetitions of the last row of ``whole`` as make it ``length`` rows."""
    missing = length - part.shape[0]
    return part if not missing else torch.cat([part, whole[-1:].expand(missing, *whole.shape[1:])])


# -- hidden rows ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exchanged:
    """Hidden rows of a share, for whoever reads the same rows of the same call again."""

    rows: weakref.ref[Tensor]
    row: Tensor
    made: Tensor

    def answers(self, rows: Tensor, row: Tensor) -> bool:
        mine = self.rows()
        if mine is None or (mine is not rows and (rows.requires_grad or detached(mine) is not rows)):
            return False
        return row.shape == self.row.shape and _equal(self.row, row)


def _equal(a: Tensor, b: Tensor) -> bool:
    x, y = cpu_values(a), cpu_values(b)
    return x is not None and y is not None and torch.equal(x, y)


def _exchanged(source: Source, row: Tensor, own: slice, length: int) -> Tensor:
    """``(length, H)`` hidden rows of this rank's share of the rows ``row`` ``(N,)``; padding (-1) reads as zero."""
    sequence, rows = source.sequence, source.rows
    assert sequence is not None
    known: list[Any] = [] if source.head is None else source.head.readings
    recorded = torch.is_grad_enabled() and rows.requires_grad
    for earlier in known:
        if not isinstance(earlier, Exchanged) or not earlier.answers(rows, row):
            continue
        if earlier.made.requires_grad or not recorded:
            return earlier.made if recorded else detached(earlier.made)
    taken = row.clamp_min(0)
    found = _moved(rows, taken, length, sequence)
    if source.plain is not None:
        padding = _lengthened(row[own], row, length) < 0
        found = found.masked_fill(ordinary(padding).unsqueeze(-1), 0.0)
    known.append(Exchanged(weakref.ref(rows), row, found))
    return found


def _moved(rows: Tensor, row: Tensor, length: int, sequence: SequenceGroup) -> Tensor:
    """Rows by number, of which each rank wants the next ``length``."""
    values = cpu_values(row)
    values = row.cpu() if values is None else values
    values = _lengthened(values, values, length * sequence.size)
    moves = Moves.of(values, rows.shape[0], sequence)
    if moves is None:
        return rows
    mine = take_rows(rows, ordinary(sent(moves.taken, rows.device)))
    received = all_to_all(mine, sequence, moves.received, moves.sent)
    return received if moves.order is None else received.index_select(0, ordinary(sent(moves.order, rows.device)))


@dataclass(frozen=True)
class Moves:
    """Which rows one rank sends, and where those that it is sent belong.

    Attributes:
        taken: of this rank's rows, those that are sent, by receiver.
        sent, received: how many to and from each rank.
        order: where each row of the share is among those that are received; None if it is where it belongs.
    """

    taken: Tensor
    sent: Sequence[int]
    received: Sequence[int]
    order: Tensor | None

    @staticmethod
    def of(row: Tensor, count: int, sequence: SequenceGroup) -> Moves | None:
        """For rows by number, CPU, an equal part of them for each rank; None if every rank has its part as it is.

        Args:
            count: rows that each rank has.
        """
        length = row.numel() // sequence.size
        if length == count and torch.equal(row, torch.arange(row.numel())):
            return None
        owner = row // count
        mine = (owner == sequence.rank).nonzero()[:, 0]
        wanted = owner[sequence.rank * length : (sequence.rank + 1) * length]
        sent = torch.bincount(mine // length, minlength=sequence.size).tolist()
        received = torch.bincount(wanted, minlength=sequence.size).tolist()
        order = None
        if bool((wanted[1:] < wanted[:-1]).any()):
            by_owner = wanted.argsort(stable=True)
            order = torch.empty_like(by_owner)
            order[by_owner] = torch.arange(length)
        return Moves(row[mine] - sequence.rank * count, sent, received, order)
