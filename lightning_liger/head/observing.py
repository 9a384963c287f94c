"""Metrics of the logits that a loss has computed: read off each chunk before the loss overwrites it.

A loss over labels takes its gradients in one pass and keeps no logits. Which metrics follow it without gradients, such
as the best id for an accuracy, is known from the step before; they are computed with the loss, and forgotten again if
nobody asks. Rows that the loss skipped, because their labels do not count, are computed for the metric alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_liger.head.chunks import rows_of_copies
from lightning_liger.head.memory import detached
from lightning_liger.head.plan import Products
from lightning_liger.head.readings import Habits, Loss, Reading, leaf_of, named
from lightning_liger.head.sums import sum_dtype
from lightning_liger.head.view import View
from lightning_liger.mirrored import cpu_values, sent

_MOST_READINGS = 4


@dataclass
class Observation:
    """What readers found in the rows of one loss.

    Attributes:
        rows: the ``(N, H)`` hidden rows of the call; ``position``: ``(K,)`` int64, where the loss read them.
        name: names the loss among all on this head.
        found: outputs for the ``K`` rows that nobody has asked for yet, or that others may ask for again.
    """

    rows: weakref.ref[Tensor]
    weight: weakref.ref[Tensor]
    position: Tensor
    name: Hashable
    habits: Habits
    found: dict[Hashable, list[Tensor]] = field(default_factory=dict)
    asked_for: set[Hashable] = field(default_factory=set)

    def __call__(self, product: Tensor, part: slice) -> None:
        """Read rows ``part`` of the loss: ``product`` ``(n, V)``, which is overwritten afterwards."""
        copies = 1 + max((r.copies for r in self.readings.values()), default=0)
        step = rows_of_copies(product.shape[-1], product.device, copies)
        for start in range(0, product.shape[0], step):
            piece = product[start : start + step]
            z = Products([piece.to(sum_dtype(piece.dtype))])
            for name, reading in self.readings.items():
                made = reading(z)
                at = slice(part.start + start, part.start + start + piece.shape[0])
                if name not in self.found:
                    shapes = [(self.position.numel(), *m.shape[1:]) for m in made]
                    self.found[name] = [m.new_empty(s) for m, s in zip(made, shapes, strict=True)]
                for whole, values in zip(self.found[name], made, strict=True):
                    whole[at] = values

    @property
    def readings(self) -> dict[Hashable, Reading]:
        return self.habits.observed.setdefault(self.name, {})

    def is_of(self, rows: Tensor, weight: Tensor) -> bool:
        return _same(self.rows(), rows) and _same(self.weight(), weight)

    def __del__(self) -> None:
        # a tracer of compiled code makes objects without ever calling their __init__
        for name in vars(self).get("found", {}).keys() - vars(self).get("asked_for", set()):
            self.readings.pop(name, None)


def _same(mine: Tensor | None, other: Tensor) -> bool:
    return mine is not None and detached(other) is detached(mine)


def observation(view: View, position: Tensor) -> Observation | None:
    """Whoever reads along with a loss of ``view`` at ``position``; None where nobody can know it again."""
    expression, head = named(view), view.source.head
    if expression is None or head.habits is None:
        return None
    name = (Loss(expression), torch.is_grad_enabled())
    made = Observation(weakref.ref(view.source.rows), weakref.ref(head.weight), position, name, head.habits)
    head.readings.append(made)
    return made


def observed(
    view: View,
    position: Tensor,
    name: Hashable,
    reading: Reading,
    compute: Callable[[Tensor], tuple[Tensor, ...]],
) -> tuple[Tensor, ...] | None:
    """What ``reading`` makes of the rows at ``position``, if a loss before has read it along; None if none has.

    Args:
        compute: the reading at some of the ``N`` rows, given by their numbers.
    """
    leaf, at = leaf_of(view, position)
    known = [
        o
        for o in leaf.source.head.readings
        if isinstance(o, Observation) and o.is_of(leaf.source.rows, leaf.source.head.weight)
    ]
    for observation in known:
        if name in observation.found and (split := _split(observation.position, at)) is not None:
            observation.asked_for.add(name)
            return _together(observation.found[name], *split, compute)
    for observation in known:
        if len(observation.readings) < _MOST_READINGS and name is not None:
            observation.readings[name] = reading
    return None


def _split(known: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Which of ``wanted`` are ``known``, where they stand there, and which are not; None if the CPU does not know."""
    a, b = cpu_values(known), cpu_values(wanted)
    if a is None or b is None or not b.numel():
        return None
    places = torch.full((int(max(a.max() if a.numel() else 0, b.max())) + 1,), -1)
    places[a] = torch.arange(a.numel())
    place = places[b]
    inside = (place >= 0).nonzero()[:, 0]
    return (
        sent(inside, wanted.device),
        sent(place[inside], wanted.device),
        sent((place < 0).nonzero()[:, 0], wanted.device),
    )


def _together(
    found: list[Tensor],
    inside: Tensor,
    place: Tensor,
    outside: Tensor,
    compute: Callable[[Tensor], tuple[Tensor, ...]],
) -> tuple[Tensor, ...]:
    if not outside.numel():
        return tuple(f[place] for f in found)
    rest = compute(outside)
    made = []
    for f, r in zip(found, rest, strict=True):
        whole: Any = r.new_empty((inside.numel() + outside.numel(), *r.shape[1:]))
        whole[inside], whole[outside] = f[place], r
        made.append(whole)
    return tuple(made)
