"""A callback that trains only while it is told to, and reports each turn."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_liger.bench.batches import contents, whole_numbers
from lightning_liger.bench.clock import Clock
from lightning_liger.bench.memory import PeakMemory, room
from lightning_liger.bench.messages import GO, Plan, Ready, Turn
from lightning_liger.bench.work import Work, peak_flops
from lightning_liger.trees import callback_bases

if TYPE_CHECKING:
    from lightning.pytorch import Callback as _Base
else:
    _Base = type("_Base", callback_bases(), {})


class Baton(_Base):
    """Sends a :class:`Ready`, then a :class:`Turn` for each ``"go"``, until ``"stop"``.

    Nothing that it does while steps are timed makes the host wait for the device.
    """

    def __init__(self, pipe: Connection, plan: Plan) -> None:
        super().__init__()
        self._pipe = pipe
        self._plan = plan
        self._memory: PeakMemory | None = None
        self._turns = 0
        self.stopped = False
        self.largest = 0
        self._restart()

    def _restart(self) -> None:
        """Steps of a turn, and what its unfinished step has seen."""
        self._batches: list[list[Any]] = []
        self._losses: list[list[Tensor | None]] = []
        self._step_batches: list[Any] = []
        self._step_losses: list[Tensor | None] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._device: torch.device = trainer.strategy.root_device
        self._clock = Clock(self._device)
        self._memory = PeakMemory(self._device)

    def peak_memory(self) -> int:
        return self._memory.read() if self._memory is not None else 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._work = Work(pl_module)
        peak = peak_flops(self._device, trainer)
        self._pipe.send(Ready(_name(self._device), self._device.type, str(trainer.precision), peak))
        self._steps_before = trainer.global_step
        self._wait(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._step_batches.append(whole_numbers(batch))  # before the module takes it apart

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._step_losses.append(_loss(outputs))
        if self.stopped or trainer.global_step == self._steps_before:
            return
        self._clock.tick()
        self._steps_before = trainer.global_step
        self._batches.append(self._step_batches)
        self._losses.append(self._step_losses)
        self._step_batches, self._step_losses = [], []
        if len(self._batches) == (self._plan.steps if self._turns else self._plan.warmup):
            self._pipe.send(self._turn())
            self._turns += 1
            self._wait(trainer)

    def _wait(self, trainer: Any) -> None:
        self._restart()
        if self._pipe.recv() != GO:
            self.stopped = trainer.should_stop = True
        else:
            self._clock.begin()

    def _turn(self) -> Turn:
        seconds = self._clock.seconds()
        steps = [[contents(batch) for batch in batches] for batches in self._batches]
        self.largest = max(self.largest, *(c.positions for step in steps for c in step))
        counted = all(c.tokens is not None for step in steps for c in step)
        flops = [self._work.of(step) for step in steps]
        needs, free = room(self._device)
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
            self.largest = max(self.largest, contents(batch).positions)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _loss(outputs: Any) -> Tensor | None:
    found = outputs.get("loss") if isinstance(outputs, dict) else outputs
    return found.detach() if isinstance(found, Tensor) else None


def _mean(losses: list[Tensor | None]) -> float:
    values = [float(loss) for loss in losses if loss is not None]
    return sum(values) / len(values) if values else float("nan")
