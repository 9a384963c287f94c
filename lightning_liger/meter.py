"""Tokens per second, padding and peak memory, without asking the device for anything per batch."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from lightning_liger.hooks import TrainingHooks
from lightning_liger.report import Report

PREFIX = "liger/"


class Meter(TrainingHooks):
    """Counts what the backbones saw between two readings.

    A reading is taken every ``log_every_n_steps`` steps. Ranks add their own tokens; the window is the slowest
    rank's, so that the sum is what the job really did.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._padding = report.padding
        self._logged = False
        self._sum_seconds = self._sum_tokens = self._sum_positions = 0.0
        self._restart()

    def _restart(self) -> None:
        """Begin a new window now."""
        self._started = time.perf_counter()
        self._tokens = self._padding.tokens
        self._positions = self._padding.positions
        self._paused: tuple[float, int, int] | None = None

    def begin_training(self, trainer: Any, module: Any) -> None:
        self._restart()

    def end_batch(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if not _loggers_listen(trainer):
            return
        metrics = self.read(module.device, trainer.strategy)
        self._report.metrics.update(metrics)
        self._logged = True
        if trainer.barebones:
            return  # it logs nothing, and says so at every call
        for name, value in metrics.items():
            bar = not name.endswith("peak_memory_gb")
            # on the CPU: a number made on the device would wait for it
            module.log(name, torch.tensor(value), prog_bar=bar, on_step=True, on_epoch=False, batch_size=1)

    def end_training(self, trainer: Any, module: Any) -> None:
        metrics = self.overall(module.device, trainer.strategy)
        self._report.metrics.update(metrics)
        if not self._logged and not trainer.fast_dev_run:
            # a training shorter than log_every_n_steps would leave no trace of it
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)

    def begin_validation(self, trainer: Any, module: Any) -> None:
        """Evaluation: neither its time nor its tokens count."""
        if self._paused is None:
            self._paused = time.perf_counter(), self._padding.tokens, self._padding.positions

    def end_validation(self, trainer: Any, module: Any) -> None:
        if self._paused is not None:
            began, tokens, positions = self._paused
            self._started += time.perf_counter() - began
            self._tokens += self._padding.tokens - tokens
            self._positions += self._padding.positions - positions
            self._paused = None

    def read(self, device: torch.device, strategy: Any) -> dict[str, float]:
        """The metrics of the window that ends now, over all ranks, and a new window. A collective."""
        seconds = time.perf_counter() - self._started
        tokens = float(self._padding.tokens - self._tokens)
        positions = float(self._padding.positions - self._positions)
        self._peak = peak_memory_gb(device)
        if strategy.world_size > 1:
            tokens, positions = _over_ranks(device, (tokens, positions), "sum")
            seconds, self._peak = _over_ranks(device, (seconds, self._peak), "max")
        self._restart()
        if positions:
            self._sum_seconds += seconds
            self._sum_tokens += tokens
            self._sum_positions += positions
        return _metrics(seconds, tokens, positions, self._peak)

    def overall(self, device: torch.device, strategy: Any) -> dict[str, float]:
        """The metrics of all windows together, the one that ends now included. A collective."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # once per training: steps that are only queued have not been done
        self.read(device, strategy)
        return _metrics(self._sum_seconds, self._sum_tokens, self._sum_positions, self._peak)


def _metrics(seconds: float, tokens: float, positions: float, peak: float) -> dict[str, float]:
    """Rates are left out where no backbone was seen: a module without one has no tokens that we know of."""
    metrics = {f"{PREFIX}peak_memory_gb": peak}
    if positions and seconds > 0:
        metrics[f"{PREFIX}tokens_per_second"] = tokens / seconds
        metrics[f"{PREFIX}padding_fraction"] = 1 - tokens / positions
    return metrics


def _over_ranks(device: torch.device, values: Sequence[float], how: str) -> list[float]:
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
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9


def _loggers_listen(trainer: Any) -> bool:
    """Whether Lightning hands this batch's metrics to the loggers: the last micro-batch of every n-th step.

    What is logged in any other batch is dropped. Batches that stepped are counted over epochs, so that an epoch
    shorter than ``log_every_n_steps`` is no reason for silence.
    """
    every = trainer.log_every_n_steps
    loop = trainer.fit_loop.epoch_loop
    return every > 0 and (loop._batches_that_stepped + 1) % every == 0 and not loop._should_accumulate()
