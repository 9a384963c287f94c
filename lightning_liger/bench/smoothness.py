"""How even a loss curve is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_SPIKE = 4.0


@dataclass(frozen=True)
class Smoothness:
    """
    Attributes:
        noise: standard deviation of a step's loss around the trend, in the loss's unit.
        spikes: steps whose loss stands out above it by more than four times what is usual.
    """

    noise: float
    spikes: int


def smoothness(losses: Sequence[float]) -> Smoothness | None:
    """Of the losses of consecutive steps; None for fewer than five, or if one is not finite.

    The trend is the middle between the steps before and after, around which independent noise of deviation 1 deviates by
    ``sqrt(1.5)``. What is usual is the median, which a spike does not raise.
    """
    if len(losses) < 5 or not all(map(math.isfinite, losses)):
        return None
    triples = zip(losses, losses[1:], losses[2:], strict=False)
    apart = [loss - (before + after) / 2 for before, loss, after in triples]
    usual = 1.4826 * statistics.median(map(abs, apart))
    return Smoothness(
        math.sqrt(statistics.fmean(a * a for a in apart) / 1.5), sum(a > _SPIKE * usual > 0 for a in apart)
    )
