"""One run's side of the conversation: it trains only while it is told to, and reports each turn."""

from __future__ import annotations

import gc
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from lightning_liger.bench.batches import Contents, contents, whole_numbers
from lightning_liger.bench.clock import Clock
from lightning_liger.bench.memory import PeakMemory, room
from lightning_liger.bench.messages import GO, Plan, Ready, Turn
from lightning_liger.bench.work import Work, peak_flops


class Turns:
    """Sends a :class:`Ready`, then a :class:`Turn` for each ``"go"``, until ``"stop"``.

    Nothing that it does while steps are timed makes the host wait for the device. Call :meth:`set_up` before the model
    is built, :meth:`start` before the first step, :meth:`saw` for each batch, :meth:`lost` for each loss, :meth:`step`
    when an optimizer has stepped.

    Attributes:
        stopped: no further step is asked for.
        largest: positions of the largest batch.
    """

    def __init__(self, pipe: Connection, plan: Plan) -> None:
        self.plan = plan
        self._pipe = pipe
        self._memory: PeakMemory | None = None
        self._turns = 0
        self._began = time.perf_counter()
        self.stopped = False
        self.largest = 0
        self._restart()

    def _restart(self) -> None:
        """Steps of a turn, and what its unfinished step has seen."""
        self._batches: list[list[Any]] = []
        self._losses: list[list[Tensor | None]] = []
        self._step_batches: list[Any] = []
        self._step_losses: list[Tensor | None] = []

    def set_up(self, device: torch.device) -> None:
        """Memory counts from here."""
        self.device = device
        self._clock = Clock(device)
        self._memory = PeakMemory(device)

    def peak_memory(self) -> int:
        return self._memory.read() if self._memory is not None else 0

    def built(self) -> None:
        """What was held while the model was built, a second copy of its weights perhaps, is no part of training."""
        gc.collect()
        if self._memory is not None:
            self._memory.forget()

    def start(self, work: Work, precision: str) -> None:
        """Everything is built; returns when the first turn begins.

        Args:
            work: of the model.
            precision: Lightning's name of it.
        """
        self._work = work
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else str(self.device)
        seconds = time.perf_counter() - self._began
        self._pipe.send(Ready(name, self.device.type, precision, peak_flops(self.device, precision), seconds))
        self._wait()

    def saw(self, batch: Any) -> None:
        """A batch of the step that begins, before anyone takes it apart; or a function that makes it, called later."""
        self._step_batches.append(batch if callable(batch) else whole_numbers(batch))

    def lost(self, loss: Any) -> None:
        """The loss of a batch."""
        self._step_losses.append(loss.detach() if isinstance(loss, Tensor) else None)

    def step(self) -> None:
        """An optimizer has stepped; at the end of a turn, returns when the next one begins."""
        if self.stopped:
            return
        self._clock.tick()
        self._batches.append(self._step_batches)
        self._losses.append(self._step_losses)
        self._step_batches, self._step_losses = [], []
        if len(self._batches) == (self.plan.steps if self._turns else self.plan.warmup):
            self._pipe.send(self._turn())
            self._turns += 1
            self._wait()

    def _wait(self) -> None:
        self._restart()
        if self._pipe.recv() != GO:
            self.stopped = True
        else:
            self._clock.begin()

    def _turn(self) -> Turn:
        seconds = self._clock.seconds()
        steps = [[_contents(batch) for batch in batches] for batches in self._batches]
        self.largest = max(self.largest, *(c.positions for step in steps for c in step))
        counted = all(c.tokens is not None for step in steps for c in step)
        flops = [self._work.of(step) for step in steps]
        needs, free = room(self.device)
        return Turn(
            seconds=seconds,
            tokens=tuple(sum(c.tokens or 0 for c in step) for step in steps) if counted else None,
            positions=tuple(sum(c.positions for c in step) for step in steps),
            largest=self.largest,
            losses=tuple(map(_mean, self._losses)),
            checksums=tuple(sum(c.checksum for c in step) for step in steps),
            flops=None if any(f is None for f in flops) else tuple(f or 0.0 for f in flops),
            peak_memory=self.peak_memory(),
            needs=needs,
            free=free,
            lag=self._clock.lag,
        )

    def failed(self) -> None:
        """The run ends in an error: look at the batch that it was in."""
        for batch in self._step_batches:
            self.largest = max(self.largest, _contents(batch).positions)


def _contents(batch: Any) -> Contents:
    return contents(whole_numbers(batch()) if callable(batch) else batch)


def _mean(losses: list[Tensor | None]) -> float:
    values = [float(loss) for loss in losses if loss is not None]
    return sum(values) / len(values) if values else float("nan")
