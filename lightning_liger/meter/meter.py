"""Rates, utilisation, memory and the time of a step, without asking the device for anything per batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_liger.data.ranks import ranks_per_batch
from lightning_liger.hooks import TrainingHooks
from lightning_liger.meter.advice import advice
from lightning_liger.meter.counting import Counting
from lightning_liger.meter.losses import Losses
from lightning_liger.meter.memory import peak_memory_gb, reserved_memory_gb
from lightning_liger.meter.phases import Stopwatch
from lightning_liger.meter.publishing import Publishing
from lightning_liger.meter.smoothness import Smoothness
from lightning_liger.meter.utilisation import Utilisation
from lightning_liger.meter.window import PREFIX, Ranks, Sums, gathered, over_ranks, rates
from lightning_liger.patching import inside_compiled
from lightning_liger.report import Report

IN_PROGRESS_BAR = (f"{PREFIX}tokens_per_second", f"{PREFIX}mfu")
_HARVEST = 64  # steps


class Meter(TrainingHooks):
    """Counts what the backbones saw between two readings.

    A reading is taken every ``log_every_n_steps`` steps, where Lightning hands metrics to loggers; nothing else is a
    collective. Ranks add their own tokens; the window is the slowest rank's, so that the sum is what the job really did.

    Args:
        report: whose logs are read, and which is told the metrics.
        head: path of the head, where the user has named one.
        could_compile: layers could be compiled, and the user has not let them.
        wrap: replaces an attribute of an object until the end of the training.
        say: tells the user something.
    """

    def __init__(
        self,
        report: Report,
        head: str | None = None,
        could_compile: bool = False,
        wrap: Callable[[Any, str, Any], None] = setattr,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._report = report
        self._could_compile = could_compile
        self._wrap = wrap
        self._say = say
        self._logged = self._advised = False
        self._counting = Counting(report, head)
        self._smoothness = Smoothness()
        self._stopwatch: Stopwatch | None = None
        self._losses: Losses | None = None
        self._publishing: Publishing | None = None
        self._utilisation: Utilisation | None = None
        self._whole = Sums()
        self._last_window: Sums = Sums()
        self._last_ranks: Ranks = Ranks(1, Sums(), Sums(), {}, {})
        self._restart()

    def _restart(self) -> None:
        """Begin a new window now."""
        self._started = time.perf_counter()
        self._paused: float | None = None
        self._window = Sums()

    # -- following the training --------------------------------------------------------------------------------------

    def begin_training(self, trainer: Any, module: Any) -> None:
        self._counting.begin(trainer, module)
        device = trainer.strategy.root_device
        self._stopwatch, self._losses, self._utilisation = Stopwatch(device), Losses(device), Utilisation(device)
        self._publishing = None if trainer.barebones else Publishing(trainer, self._wrap)
        self._utilisation.sample()  # the first one loads the driver's library
        self._utilisation.take()
        self._stopwatch.start()
        self._restart()

    def begin_epoch(self, trainer: Any, module: Any) -> None:
        if self._stopwatch is not None:
            self._stopwatch.start()

    def begin_batch(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if self._stopwatch is not None:
            self._stopwatch.begin()
            self._stopwatch.follow(trainer.fit_loop, self._wrap)
        if index == 0:  # callbacks that thaw layers have been called for this epoch
            self._counting.begin_epoch(module, self._window)
        self._counting.begin_batch()

    def before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        if self._stopwatch is not None:
            self._stopwatch.mark("forward")

    def after_backward(self, trainer: Any, module: Any) -> None:
        if self._stopwatch is not None:
            self._stopwatch.mark("backward")

    def before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if self._stopwatch is not None:
            self._stopwatch.look()

    def end_batch(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if self._stopwatch is not None:
            self._stopwatch.end(_loss_of(outputs))
        if self._utilisation is not None:
            self._utilisation.sample()
        self._counting.end_batch()
        loop = trainer.fit_loop.epoch_loop
        stepped = not loop._should_accumulate()
        self._window.batches += 1
        self._window.steps += stepped
        # What is logged in any other batch is dropped. Batches that stepped are counted over epochs, so that an epoch
        # shorter than log_every_n_steps is no reason for silence.
        every = trainer.log_every_n_steps
        if stepped and every > 0 and (loop._batches_that_stepped + 1) % every == 0:
            self._publish(self.read(module.device, trainer.strategy))
            self._advise(module)
        elif self._window.batches % _HARVEST == 0:
            self._harvest()

    def _harvest(self) -> None:
        """Add what was counted, and times and losses of the steps that the device has run by now."""
        self._counting.add_to(self._window)
        if self._stopwatch is None or self._losses is None:
            return
        steps = self._stopwatch.done()
        for step in steps:
            self._window.add(step)
        self._losses.send([step.loss for step in steps if step.loss is not None])
        before = self._smoothness.spikes
        self._smoothness.add(self._losses.arrived())
        self._window.spikes += self._smoothness.spikes - before

    def _publish(self, metrics: dict[str, float]) -> None:
        self._logged = True
        if self._publishing is not None:
            self._publishing.publish(metrics, IN_PROGRESS_BAR)

    def end_training(self, trainer: Any, module: Any) -> None:
        metrics = self.overall(module.device, trainer.strategy)
        if not self._logged and not trainer.fast_dev_run:
            # a training shorter than log_every_n_steps would leave no trace of it
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)
        self._advise(module)

    def begin_validation(self, trainer: Any, module: Any) -> None:
        """Evaluation: neither its time nor its tokens count."""
        if self._paused is None:
            self._counting.add_to(self._window)
            self._paused = time.perf_counter()

    def end_validation(self, trainer: Any, module: Any) -> None:
        if self._paused is not None:
            self._counting.forget()
            self._started += time.perf_counter() - self._paused
            self._paused = None
            if self._stopwatch is not None:
                self._stopwatch.start()

    def close(self) -> None:
        self._counting.close()

    # -- readings ----------------------------------------------------------------------------------------------------

    def read(self, device: torch.device, strategy: Any) -> dict[str, float]:
        """The metrics of the window that ends now, over all ranks, and a new window. A collective."""
        return self._metrics(self._end_window(), device, strategy)

    def overall(self, device: torch.device, strategy: Any) -> dict[str, float]:
        """The metrics of all windows together, the one that ends now included. A collective."""
        if device.type == "cuda":
            # once per training: steps that are only queued have not been done, and their losses not been copied
            torch.cuda.synchronize(device)
            self._harvest()
            torch.cuda.synchronize(device)
        self._end_window()
        metrics = self._metrics(self._whole, device, strategy)
        of_ranks = {
            "tokens_per_second": self._whole.tokens / self._whole.seconds if self._whole.seconds else 0.0,
            "peak_memory_gb": peak_memory_gb(device),
            "reserved_memory_gb": reserved_memory_gb(device) or 0.0,
            "data_wait_fraction": self._whole.data / self._whole.measured if self._whole.measured else 0.0,
        }
        self._report.meter["ranks"] = gathered(of_ranks, strategy.world_size, device)
        return metrics

    def _end_window(self) -> Sums:
        self._harvest()
        self._window.seconds = time.perf_counter() - self._started
        ended = self._window
        if ended.positions:
            self._whole += ended
        return ended

    def _metrics(self, sums: Sums, device: torch.device, strategy: Any) -> dict[str, float]:
        world = strategy.world_size
        reserved = reserved_memory_gb(device)
        busy = None if self._utilisation is None else self._utilisation.take()
        ceiling = self._counting.ceiling(device)
        others = {
            "ceiling": ceiling,
            "blind": float(not ceiling),
            "memory": peak_memory_gb(device),
            "reserved": reserved or 0.0,
            "deviation": self._smoothness.deviation,
            "losses": float(self._smoothness.count > 1),
            "busy": busy or 0.0,
            "asked": float(busy is not None),
        }
        ranks = over_ranks(sums, others, world, ranks_per_batch(strategy), device)
        metrics = rates(ranks, self._report.batching.budget)
        added = ranks.added
        metrics["peak_memory_gb"] = ranks.largest["memory"]
        if reserved is not None:
            metrics["reserved_memory_gb"] = ranks.largest["reserved"]
            metrics["launch_bound_fraction"] = ranks.total.launches / max(ranks.total.timed, 1.0)
        if added["asked"]:
            metrics["gpu_utilization"] = added["busy"] / added["asked"]
        if added["losses"]:
            metrics["loss_std"] = added["deviation"] / added["losses"]
            metrics["loss_spikes"] = ranks.total.spikes
        named = {f"{PREFIX}{name}": value for name, value in metrics.items()}
        self._report.metrics.update(named)
        self._last_window, self._last_ranks = sums, ranks
        self._restart()
        return named

    def _advise(self, module: Any) -> None:
        """Say once what would make the training faster."""
        if self._advised:
            return
        found = advice(
            self._last_window,
            imbalance=self._last_ranks.imbalance,
            budget=self._report.batching.budget,
            could_compile=lambda: self._could_compile and not inside_compiled(module),
            on_gpu=module.device.type == "cuda",
        )
        for text in found:
            self._advised = True
            self._report.note(f"To go faster: {text}")
            self._say(f"lightning-liger: {text}")


def _loss_of(outputs: Any) -> Tensor | None:
    """What ``training_step`` returned, if that is a scalar in memory of its own."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    return loss if type(loss) is Tensor and loss.numel() == 1 else None
