"""What several processes agree on before they go on, or stop, together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")


def everywhere(value: _T, trainer: Any) -> list[_T]:
    """The value of every rank. A collective."""
    if trainer.world_size <= 1 or not (dist.is_available() and dist.is_initialized()):
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def any_rank(value: bool, trainer: Any) -> bool:
    """Whether it is true anywhere. A collective."""
    return any(everywhere(value, trainer))


class AllRanks:
    """Figures of gradients that are spread over ranks. Every method is a collective, and answers alike on all of them.

    Args:
        copies: for each gradient, on how many ranks each of its entries is.
    """

    def __init__(self, trainer: Any, copies: Sequence[int]) -> None:
        self._trainer = trainer
        self._copies = copies

    def norms(self, local: Sequence[float]) -> list[float]:
        """Of whole gradients, from those of this rank's pieces."""
        pieces = everywhere([n * n / c for n, c in zip(local, self._copies, strict=True)], self._trainer)
        return [float(sum(squares) ** 0.5) for squares in zip(*pieces, strict=True)]

    def largest(self, value: float) -> float:
        return max(everywhere(value, self._trainer), key=lambda v: float("inf") if v != v else v)

    def mean(self, value: float) -> float:
        values = everywhere(value, self._trainer)
        return sum(values) / len(values)

    def any(self, value: bool) -> bool:
        return any_rank(value, self._trainer)
