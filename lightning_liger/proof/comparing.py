"""Loss and gradients of two runs, held against the rounding error of one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lightning_liger.proof.rounding import roundoff_of_sum


class Figures(Protocol):
    """How numbers of this rank become numbers of the run."""

    def norms(self, local: Sequence[float]) -> list[float]: ...
    def largest(self, value: float) -> float: ...
    def mean(self, value: float) -> float: ...
    def any(self, value: bool) -> bool: ...


class OneRank:
    """This rank's run is a run of its own."""

    def norms(self, local: Sequence[float]) -> list[float]:
        return list(local)

    def largest(self, value: float) -> float:
        return value

    def mean(self, value: float) -> float:
        return value

    def any(self, value: bool) -> bool:
        return value


@dataclass
class Run:
    """A loss and its gradients, in the order of the names they are compared under; None where there is none.

    Attributes:
        figures: of this rank, or of all that hold pieces of the gradients.
        kinds: dtypes and devices that gradients were computed in; those that they are kept in, if it is empty.
    """

    loss: Tensor
    gradients: list[Tensor | None]
    figures: Figures = field(default_factory=OneRank)
    kinds: set[tuple[torch.dtype, torch.device]] = field(default_factory=set)

    @property
    def is_finite(self) -> bool:
        return not self.figures.any(not bool(self.loss.isfinite()))

    @property
    def has_gradients(self) -> bool:
        return self.figures.any(any(g is not None for g in self.gradients))


@dataclass(frozen=True)
class Distance:
    """How far two runs are apart.

    Attributes:
        loss: absolute difference. gradients: norm of the difference, for each gradient.
    """

    loss: float
    gradients: tuple[float, ...]

    def widest(self, other: Distance) -> Distance:
        pairs = zip(self.gradients, other.gradients, strict=True)
        return Distance(max(self.loss, other.loss), tuple(max(a, b) for a, b in pairs))


@dataclass(frozen=True)
class Agreement:
    """Of an accelerated run with the plain one.

    Attributes:
        loss: ``(plain, accelerated)``; gradient_norm likewise.
        loss_difference, gradient_difference: relative; own_loss, own_gradient: the plain run's own rounding error.
        worst: the gradient that is furthest off, relative to what is tolerated; ``worst_ratio``: by how much.
        worst_difference: of that gradient, relative to its norm.
    """

    loss: tuple[float, float]
    gradient_norm: tuple[float, float]
    loss_difference: float
    gradient_difference: float
    own_loss: float
    own_gradient: float
    worst: str
    worst_ratio: float
    worst_difference: float
    loss_ratio: float

    @property
    def agrees(self) -> bool:
        return self.worst_ratio <= 1 and self.loss_ratio <= 1  # a NaN does not


def distance(a: Run, b: Run) -> Distance:
    loss = float((a.loss.double() - b.loss.double()).abs())
    apart = _norms([_minus(x, y) for x, y in zip(a.gradients, b.gradients, strict=True)])
    return Distance(a.figures.largest(loss), tuple(a.figures.norms(apart)))


def norms(run: Run) -> list[float]:
    return run.figures.norms(_norms(run.gradients))


def judge(plain: Run, ours: Run, own: Distance, names: Sequence[str], rows: int) -> Agreement:
    """Whether ``ours`` is as good an answer as ``plain``.

    Both runs round, each by about ``own``: so the difference may be twice that. A gradient that happened to move little
    is granted the relative error of all of them together, and one that is nothing but rounding (the bias of a key
    projection) one unit roundoff of the whole. Gradients of weights are sums over the batch's ``rows``.
    """
    apart, sizes, our_sizes = distance(ours, plain), norms(plain), norms(ours)
    whole, our_whole = _whole(sizes), _whole(our_sizes)
    relative = _whole(own.gradients) / whole if whole else 0.0
    kinds = plain.kinds or {(g.dtype, g.device) for g in plain.gradients if g is not None}
    unit = max((roundoff_of_sum(1, *kind) for kind in kinds), default=0.0)
    summed = max((roundoff_of_sum(rows, *kind) for kind in kinds), default=0.0)
    worst, worst_ratio, worst_difference = "", 0.0, 0.0
    for name, difference, its_own, size in zip(names, apart.gradients, own.gradients, sizes, strict=True):
        tolerated = 2 * (max(its_own, relative * size) + summed * size) + unit * whole
        ratio = difference / tolerated if tolerated else (0.0 if difference == 0 else float("inf"))
        if not ratio <= worst_ratio:
            worst, worst_ratio, worst_difference = name, ratio, difference / size if size else float("inf")
    loss, our_loss = (run.figures.mean(float(run.loss)) for run in (plain, ours))
    summed = roundoff_of_sum(rows, plain.loss.dtype, plain.loss.device)
    tolerated = 2 * (max(own.loss, relative * abs(loss)) + summed * abs(loss))
    return Agreement(
        loss=(loss, our_loss),
        gradient_norm=(whole, our_whole),
        loss_difference=apart.loss / abs(loss) if loss else apart.loss,
        gradient_difference=_whole(apart.gradients) / whole if whole else _whole(apart.gradients),
        own_loss=own.loss / abs(loss) if loss else own.loss,
        own_gradient=relative,
        worst=worst,
        worst_ratio=worst_ratio,
        worst_difference=worst_difference,
        loss_ratio=apart.loss / tolerated if tolerated else (0.0 if apart.loss == 0 else float("inf")),
    )


def _minus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return a if b is None else b
    return a.float() - b.float() if a.dtype in (torch.bfloat16, torch.float16) else a - b


def _norms(values: Sequence[Tensor | None]) -> list[float]:
    """One wait for the device, whatever the number of tensors."""
    there = [v for v in values if v is not None]
    if not there:
        return [0.0] * len(values)
    wide = torch.float64 if there[0].device.type == "cpu" else torch.float32
    found = [torch.linalg.vector_norm(v.coalesce().values() if v.is_sparse else v, dtype=wide) for v in there]
    numbers = iter(torch.stack([f.to(found[0].device) for f in found]).tolist())
    return [0.0 if v is None else next(numbers) for v in values]


def _whole(parts: Sequence[float]) -> float:
    return sum(p * p for p in parts) ** 0.5
