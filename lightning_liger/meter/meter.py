"""Rates, utilisation and memory of a training, without asking the device for anything per batch."""

from __future__ import annotations

import time
from typing import Any

import torch

from lightning_liger.calls import BackboneCall
from lightning_liger.data.ranks import data_parallel
from lightning_liger.hooks import TrainingHooks
from lightning_liger.meter.flops import Flops
from lightning_liger.meter.memory import peak_memory_gb, reserved_memory_gb
from lightning_liger.meter.operations import Operations, tokens_of
from lightning_liger.meter.peaks import ceiling
from lightning_liger.meter.window import PREFIX, Sums, over_ranks, rates
from lightning_liger.report import Report

IN_PROGRESS_BAR = (f"{PREFIX}tokens_per_second", f"{PREFIX}mfu")
_WATCHED_BATCH = 1  # the first one after what is compared and chosen in the very first


class Meter(TrainingHooks):
    """Counts what the backbones saw between two readings.

    A reading is taken every ``log_every_n_steps`` steps, where Lightning hands metrics to loggers; nothing else is a
    collective. Ranks add their own tokens; the window is the slowest rank's, so that the sum is what the job really did.

    Args:
        report: whose counters are read, and which is told the metrics.
        head: path of the head, where the user has named one.
    """

    def __init__(self, report: Report, head: str | None = None) -> None:
        self._report = report
        self._head = head
        self._operations: Operations | None = None
        self._watching = False
        self._earlier: list[BackboneCall] = []
        self._dtype = torch.float32
        self._batches = 0
        self._logged = False
        self._flops = Flops()
        self._window, self._whole = Sums(), Sums()
        self._listen()
        self._restart()

    def _restart(self) -> None:
        """Begin a new window now."""
        self._started = time.perf_counter()
        self._paused: float | None = None
        self._window = Sums()

    # -- following the training --------------------------------------------------------------------------------------

    def begin_training(self, trainer: Any, module: Any) -> None:
        self._dtype = _computed_in(trainer, module)
        self._read_model(module)
        self._listen()
        self._restart()

    def _read_model(self, module: Any) -> None:
        self._operations = Operations(module, self._head)
        if not self._operations.structures:
            return  # no tokens either: nothing that a utilisation could be missed beside
        for reason in self._operations.unknown:
            self._report.note(f"Utilisation (MFU) is not shown: {reason}")

    def _listen(self) -> None:
        """Forget what was written down until now."""
        self._earlier = []
        self._report.padding.log.take()
        self._report.head.log.take()

    def begin_epoch(self, trainer: Any, module: Any) -> None:
        if self._operations is not None and self._operations.is_stale(module):
            self._read_model(module)
            self._batches = 0

    def begin_batch(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if self._operations is not None and self._batches == _WATCHED_BATCH:
            self._watching = True
            self._earlier = self._report.padding.log.take()
            self._operations.begin_observing()

    def end_batch(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self._batches += 1
        self._window.batches += 1
        self._window.steps += not trainer.fit_loop.epoch_loop._should_accumulate()
        # what the first batch costs is only known once another one was watched
        if self._watching or self._batches > _WATCHED_BATCH:
            self._count()
        if _loggers_listen(trainer):
            self._log(trainer, module, self.read(module.device, trainer.strategy))

    def _count(self) -> None:
        """Add what was written down since the last time."""
        calls, heads = self._report.padding.log.take(), self._report.head.log.take()
        if self._watching and self._operations is not None:
            self._watching = False
            self._operations.end_observing(calls)
        calls, self._earlier = [*self._earlier, *calls], []
        tokens, positions, samples = tokens_of(calls)
        flops = Flops() if self._operations is None else self._operations.of(calls, heads)
        window = self._window
        window.tokens += tokens
        window.positions += positions
        window.samples += samples
        window.model += flops.model
        window.hardware += flops.hardware
        self._flops += flops
        self._report.meter.update(
            model_flops=self._flops.model, attention_flops=self._flops.attention, hardware_flops=self._flops.hardware
        )

    def _log(self, trainer: Any, module: Any, metrics: dict[str, float]) -> None:
        self._logged = True
        if trainer.barebones:
            return  # it logs nothing, and says so at every call
        for name, value in metrics.items():
            # on the CPU: a number made on the device would wait for it
            bar = name in IN_PROGRESS_BAR
            module.log(name, torch.tensor(value), prog_bar=bar, on_step=True, on_epoch=False, batch_size=1)

    def end_training(self, trainer: Any, module: Any) -> None:
        metrics = self.overall(module.device, trainer.strategy)
        if not self._logged and not trainer.fast_dev_run:
            # a training shorter than log_every_n_steps would leave no trace of it
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)

    def begin_validation(self, trainer: Any, module: Any) -> None:
        """Evaluation: neither its time nor its tokens count."""
        if self._paused is None:
            self._count()
            self._paused = time.perf_counter()

    def end_validation(self, trainer: Any, module: Any) -> None:
        if self._paused is not None:
            self._listen()
            self._started += time.perf_counter() - self._paused
            self._paused = None

    def close(self) -> None:
        if self._operations is not None:
            self._operations.stop_observing()
        for log in (self._report.padding.log, self._report.head.log):
            log.take()
            log.wanted = False

    # -- readings ----------------------------------------------------------------------------------------------------

    def read(self, device: torch.device, strategy: Any) -> dict[str, float]:
        """The metrics of the window that ends now, over all ranks, and a new window. A collective."""
        self._count()
        self._window.seconds = time.perf_counter() - self._started
        metrics = self._metrics(self._window, device, strategy)
        if self._window.positions:
            self._whole += self._window
        self._restart()
        self._report.metrics.update(metrics)
        return metrics

    def overall(self, device: torch.device, strategy: Any) -> dict[str, float]:
        """The metrics of all windows together, the one that ends now included. A collective."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # once per training: steps that are only queued have not been done
        self._count()
        self._window.seconds = time.perf_counter() - self._started
        metrics = self._metrics(self._whole + self._window if self._window.positions else self._whole, device, strategy)
        self._report.metrics.update(metrics)
        return metrics

    def _metrics(self, sums: Sums, device: torch.device, strategy: Any) -> dict[str, float]:
        world = strategy.world_size
        others = {"ceiling": self._ceiling(device), "memory": peak_memory_gb(device)}
        reserved = reserved_memory_gb(device)
        if reserved is not None:
            others["reserved"] = reserved
        replicas = data_parallel(strategy)[0] if world > 1 else 1
        ranks = over_ranks(sums, others, world, max(world // max(replicas, 1), 1), device)
        metrics = rates(ranks, ranks.added["ceiling"])
        metrics[f"{PREFIX}peak_memory_gb"] = ranks.largest["memory"]
        if reserved is not None:
            metrics[f"{PREFIX}reserved_memory_gb"] = ranks.largest["reserved"]
        return metrics

    def _ceiling(self, device: torch.device) -> float:
        """FLOP/s that this rank's device could reach; 0 where operations are not known."""
        operations = self._operations
        if operations is None or operations.unknown or self._batches <= _WATCHED_BATCH:
            return 0.0
        found = ceiling(device, operations.dtype or self._dtype)
        self._report.meter["utilisation_of"] = found.text
        return found.tflops * 1e12


def _computed_in(trainer: Any, module: Any) -> torch.dtype:
    """The dtype of products, where none can be watched."""
    precision = str(getattr(trainer, "precision", ""))
    if "bf16" in precision:
        return torch.bfloat16
    if precision.startswith("16"):
        return torch.float16
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)


def _loggers_listen(trainer: Any) -> bool:
    """Whether Lightning hands this batch's metrics to the loggers: the last micro-batch of every n-th step.

    What is logged in any other batch is dropped. Batches that stepped are counted over epochs, so that an epoch
    shorter than ``log_every_n_steps`` is no reason for silence.
    """
    every = trainer.log_every_n_steps
    loop = trainer.fit_loop.epoch_loop
    return every > 0 and (loop._batches_that_stepped + 1) % every == 0 and not loop._should_accumulate()
