"""Tokens per second, padding and peak memory, without asking the device for anything per batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from lightning_liger.report import PaddingReport

PREFIX = "liger/"


class Meter:
    """Counts what the backbones saw between two readings.

    A reading is taken every ``log_every_n_steps`` batches. Ranks add their own tokens; the window is the slowest
    rank's, so that the sum is what the job really did.
    """

    def __init__(self, padding: PaddingReport) -> None:
        self._padding = padding
        self._started = time.perf_counter()
        self._tokens = 0
        self._positions = 0
        self._paused = 0.0
        self._pause_began: float | None = None
        self.restart()

    def restart(self) -> None:
        """Begin a new window now."""
        self._started = time.perf_counter()
        self._tokens = self._padding.tokens
        self._positions = self._padding.positions
        self._paused = 0.0
        self._pause_began = None

    def pause(self) -> None:
        """Evaluation begins: neither its time nor its tokens count."""
        if self._pause_began is None:
            self._pause_began = time.perf_counter()
            self._paused_tokens = self._padding.tokens
            self._paused_positions = self._padding.positions

    def resume(self) -> None:
        if self._pause_began is not None:
            self._paused += time.perf_counter() - self._pause_began
            self._tokens += self._padding.tokens - self._paused_tokens
            self._positions += self._padding.positions - self._paused_positions
            self._pause_began = None

    def read(self, device: torch.device, strategy: Any) -> dict[str, float]:
        """The metrics of the window that ends now, over all ranks, and a new window."""
        seconds = time.perf_counter() - self._started - self._paused
        tokens = float(self._padding.tokens - self._tokens)
        positions = float(self._padding.positions - self._positions)
        peak = peak_memory_gb(device)
        if strategy.world_size > 1:
            tokens, positions = _over_ranks(strategy, device, (tokens, positions), "sum")
            seconds, peak = _over_ranks(strategy, device, (seconds, peak), "max")
        self.restart()
        if not positions or seconds <= 0:
            return {}
        return {
            f"{PREFIX}tokens_per_second": tokens / seconds,
            f"{PREFIX}padding_fraction": 1 - tokens / positions,
            f"{PREFIX}peak_memory_gb": peak,
        }


def _over_ranks(strategy: Any, device: torch.device, values: Sequence[float], how: str) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64 if device.type != "mps" else torch.float32, device=device)
    operation = torch.distributed.ReduceOp.SUM if how == "sum" else torch.distributed.ReduceOp.MAX
    torch.distributed.all_reduce(tensor, op=operation)
    return [float(v) for v in tensor.tolist()]


def peak_memory_gb(device: torch.device) -> float:
    """Peak allocated device memory in GB (1e9 bytes); on a CPU the process's peak resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    try:
        import resource
    except ImportError:  # Windows has no getrusage
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    import sys

    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9
