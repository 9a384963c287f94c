"""How smooth a loss curve is, while it is drawn."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

# "2 OLMo 2 Furious" (arXiv:2501.00656), section 3.1: the spike score is the share of values at least seven standard
# deviations away from the mean of the last 1,000.
_DEVIATIONS = 7.0
_WINDOW = 1000
_ENOUGH = 20


class Smoothness:
    """Running standard deviation of a loss, and how often it jumped.

    Attributes:
        spikes: values seven standard deviations above the mean of up to 1,000 before them, or not finite.
        count: values seen.
    """

    def __init__(self) -> None:
        self.spikes = 0
        self.count = 0
        self._window: deque[float] = deque()
        # sums of what is in the window, counted from its first value so that squares do not cancel
        self._origin = self._sum = self._squares = 0.0

    def add(self, values: Iterable[float]) -> None:
        for value in values:
            self.count += 1
            if not math.isfinite(value):
                self.spikes += 1
                continue
            if len(self._window) >= _ENOUGH:
                mean = self._origin + self._sum / len(self._window)
                above = value - mean
                self.spikes += above > 0 and above > _DEVIATIONS * max(self.deviation, 1e-9 * abs(mean))
            self._keep(value)

    def _keep(self, value: float) -> None:
        if not self._window:
            self._origin = value
        if len(self._window) == _WINDOW:
            oldest = self._window.popleft() - self._origin
            self._sum -= oldest
            self._squares -= oldest * oldest
        self._window.append(value)
        self._sum += value - self._origin
        self._squares += (value - self._origin) ** 2

    @property
    def deviation(self) -> float:
        """Standard deviation of the last 1,000 finite values."""
        count = max(len(self._window), 1)
        return math.sqrt(max(self._squares / count - (self._sum / count) ** 2, 0.0))
