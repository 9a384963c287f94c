"""Seconds of each step, without waiting for the device in between."""

from __future__ import annotations

import time

import torch


class Clock:
    """Marks on a device's own timeline: CUDA events, which cost a step nothing; elsewhere the host's clock.

    Attributes:
        lag: seconds that the device was behind the host when :meth:`seconds` was asked; None where they are one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.lag: float | None = None
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def begin(self) -> None:
        """Everything that was asked of the device before is done and does not count."""
        self._events, self._times = [], []
        self._wait()
        self.tick()

    def tick(self) -> None:
        """A step ends."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
            return
        self._wait()
        self._times.append(time.perf_counter())

    def seconds(self) -> tuple[float, ...]:
        """Between ticks, the beginning being the first. Waits for the device."""
        asked = time.perf_counter()
        self._wait()
        if self._device.type == "cuda":
            self.lag = time.perf_counter() - asked
            pairs = zip(self._events, self._events[1:], strict=False)
            return tuple(first.elapsed_time(second) / 1000 for first, second in pairs)
        return tuple(second - first for first, second in zip(self._times, self._times[1:], strict=False))

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
