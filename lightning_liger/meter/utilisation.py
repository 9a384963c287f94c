"""How busy the driver says a GPU is (NVML, through the package ``nvidia-ml-py``; amdsmi on ROCm)."""

from __future__ import annotations

import time

import torch

_EVERY = 1.0  # the driver itself averages over up to a second


class Utilisation:
    """Samples of ``nvmlDeviceGetUtilizationRates``: the share of time in which any kernel ran. At most one a second."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._off = device.type != "cuda"
        self._next = 0.0
        self._samples: list[float] = []

    def sample(self) -> None:
        if self._off or (now := time.perf_counter()) < self._next:
            return
        self._next = now + _EVERY
        try:
            self._samples.append(torch.cuda.utilization(self._device) / 100)
        except Exception:  # no package, no driver library, no permission: each has an error of its own
            self._off = True

    def take(self) -> float | None:
        """The mean since the last time; None without a sample."""
        mean = sum(self._samples) / len(self._samples) if self._samples else None
        self._samples.clear()
        return mean
