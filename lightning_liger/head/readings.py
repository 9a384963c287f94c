"""Who read which rows of one call, and who did in earlier calls: what :mod:`lightning_liger.head.sharing` goes by."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_liger.head.per_row import Program
from lightning_liger.head.plan import Products
from lightning_liger.head.view import Mix, View
from lightning_liger.mirrored import cpu_values

_MOST_FOLLOWERS = 6


@dataclass(frozen=True)
class Reading:
    """What one reader makes of the product of a chunk. Holds no tensor that gradients reach.

    Attributes:
        copies: tensors of the chunk's size on the way.
    """

    evaluate: Callable[[Products], Tensor]
    program: Program
    copies: int = 1

    def __call__(self, products: Products, *extras: Tensor) -> tuple[Tensor, ...]:
        return self.program(self.evaluate(products), *extras)


class Habits:
    """Which readers follow which on one head, call after call."""

    def __init__(self) -> None:
        self.followers: dict[Hashable, dict[Hashable, Reading]] = {}
        self.joined: set[Hashable] = set()
        self.observed: dict[Hashable, dict[Hashable, Reading]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Habits:
        return Habits()


@dataclass(frozen=True)
class Deposit:
    """A reader's own gradients, on their way to the node that all readers share."""

    task: int
    reading: Reading
    extras: tuple[Tensor, ...]
    grads: tuple[Tensor | None, ...]


@dataclass
class Readings:
    """All readers of the same rows of one call.

    Attributes:
        first: names the first of them; None if it cannot be known again.
        guessed: outputs that nobody has asked for yet.
        token: what makes the shared node wait for every reader.
        count: differentiable readers so far.
        loss_joined: whether a loss that could run by itself is among them.
    """

    rows: weakref.ref[Tensor]
    weight: weakref.ref[Tensor]
    position: Tensor
    first: Hashable
    habits: Habits
    guessed: dict[Hashable, tuple[Tensor, ...]] = field(default_factory=dict)
    token: Tensor | None = None
    deposits: list[Deposit] = field(default_factory=list)
    opened: bool = False
    count: int = 0
    loss_joined: bool = False

    def are_of(self, rows: Tensor, weight: Tensor, position: Tensor) -> bool:
        return self.rows() is rows and self.weight() is weight and _same(self.position, position)

    def followers(self) -> dict[Hashable, Reading]:
        return self.habits.followers.setdefault(self.first, {}) if self.first is not None else {}

    def remember(self, name: Hashable, reading: Reading) -> None:
        followers = self.followers()
        if name is not None and len(followers) < _MOST_FOLLOWERS:
            followers[name] = reading

    def __del__(self) -> None:
        if not vars(self):  # a tracer of compiled code makes objects without ever calling their __init__
            return
        for name in self.guessed:
            self.followers().pop(name, None)
        if self.loss_joined and self.count < 2:
            self.habits.joined.discard(self.first)


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride():
        return True
    x, y = cpu_values(a), cpu_values(b)
    return x is not None and y is not None and torch.equal(x, y)


# -- names -----------------------------------------------------------------------------------------------------------


def named(view: View) -> Hashable:
    """A name for the expression that is the same in every call; None for one that holds functions of this call."""
    if not all(op.step is None or _is_torch_function(op.step) for op in view.tail):
        return None
    if not isinstance(view.source, Mix):
        return (view.tail, view.dtype)
    op, left, right = view.source.op, named(view.source.left), named(view.source.right)
    return (
        (op, left, right, view.tail, view.dtype)
        if _is_torch_function(op) and left is not None and right is not None
        else None
    )


def _is_torch_function(function: Any) -> bool:
    return getattr(torch, getattr(function, "__name__", ""), None) is function


def leaf_of(view: View, position: Tensor) -> tuple[View, Tensor]:
    """The leftmost source, and where it is read."""
    while isinstance(view.source, Mix):
        left = view.source.left
        position = left.flat[position] if view.source.root is not position else left.flat
        view = left
    return view, position


@dataclass(frozen=True)
class Loss:
    """Names a loss over labels, or log-probabilities of ids, as the first reader."""

    expression: Hashable
    differentiable: bool = True


@dataclass(frozen=True)
class NotedLoss:
    """A loss over labels that was asked for before any other reader."""

    name: Loss
    position: Tensor
    row_of: Tensor | None
    joined: bool

    def is_at(self, position: Tensor) -> bool:
        flat = self.position.reshape(-1)
        if self.row_of is not None and flat.shape != position.shape:
            flat = flat[(self.row_of[flat] >= 0).nonzero()[:, 0]]
        return _same(flat, position)


def readings_of(view: View, position: Tensor, first: Hashable) -> Readings:
    leaf, at = leaf_of(view, position)
    head, rows = leaf.source.head, leaf.source.rows
    for known in head.readings:
        if isinstance(known, Readings) and known.are_of(rows, head.weight, at):
            return known
    made = Readings(weakref.ref(rows), weakref.ref(head.weight), at, first, head.habits or Habits())
    for loss in head.readings:
        if isinstance(loss, NotedLoss) and loss.is_at(at):
            made.first, made.loss_joined = loss.name, loss.joined
    head.readings.append(made)
    return made
