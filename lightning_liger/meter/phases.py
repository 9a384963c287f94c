"""Where the time of a step goes: CUDA events on a GPU, which nobody waits for, and clocks on a CPU."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

# Steps whose end the device has not told yet; beyond that the oldest are given up.
_MOST = 512


@dataclass
class Step:
    """One batch.

    Attributes:
        seconds: by phase, on the device's time line where it has one.
        host: the same by the host's clock.
        caught_up: the device had done all of backward before the host launched anything after it.
        loss: as training_step returned it.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)
    caught_up: bool = False
    loss: Tensor | None = None

    @property
    def waited_for_launches(self) -> bool:
        """The device was as quick as the host could tell it what to do.

        Catching up alone does not show it (a value that is read in between makes the host wait), and neither does a
        host that takes as long as the device (it waits for a full queue).
        """
        return self.caught_up and self.host.get("backward", 0.0) > 0.9 * self.seconds.get("backward", float("inf"))


class Stopwatch:
    """Marks the ends of phases, and gives steps once the device has run them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._events = device.type == "cuda"
        self._free: list[Any] = []
        self._step = Step()
        self._marks: list[tuple[str, Any, float]] = []
        self._running: deque[tuple[Step, list[tuple[str, Any, float]]]] = deque()
        self._last: tuple[Any, float] | None = None
        self._backward: Any = None
        self._inside = self._fetched = False
        self._fetch: Callable[[], None] | None = None

    def _now(self) -> Any:
        if not self._events:
            return None
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def start(self) -> None:
        """Whatever happened since the last step is nobody's: a validation, a checkpoint, a new epoch."""
        self._marks.clear()
        self._last = self._now(), time.perf_counter()

    def mark(self, phase: str) -> None:
        """``phase`` ends here."""
        if self._last is None:
            self.start()
            return
        event, host = self._now(), time.perf_counter()
        self._marks.append((phase, event, host))
        if phase == "backward":
            self._backward = event

    def follow(self, loop: Any, wrap: Callable[[Any, str, Any], None]) -> None:
        """Learn when the loop, or ``training_step`` itself, asks for a batch: it tells its profiler, anew each epoch."""
        fetcher = getattr(loop, "_data_fetcher", None)
        tell = getattr(fetcher, "_start_profiler", None)
        if tell is None or tell is self._fetch:
            return

        def fetch() -> None:
            self._fetched = True
            self.mark("forward" if self._inside else "other")
            tell()

        self._fetch = fetch
        wrap(fetcher, "_start_profiler", fetch)

    def begin(self) -> None:
        """A batch is on the device."""
        self.mark("data" if self._fetched else "other")
        self._inside, self._fetched = True, False

    def look(self) -> None:
        """Backward has been launched: has the device caught up with that?"""
        if self._backward is not None:
            self._step.caught_up = bool(self._backward.query())
            self._backward = None

    def end(self, loss: Tensor | None) -> None:
        """A batch ends, and its last phase with it."""
        self.look()
        self._inside = False
        self.mark("optimizer")
        if self._last is None or not self._marks:
            return
        self._step.loss = loss
        begun = ("", *self._last)
        self._running.append((self._step, [begun, *self._marks]))
        self._last = self._marks[-1][1:]
        self._step, self._marks = Step(), []
        if len(self._running) > _MOST:
            self._running.popleft()

    @property
    def waiting(self) -> int:
        """Steps that were launched and not given yet."""
        return len(self._running)

    def done(self) -> list[Step]:
        """Steps that the device has run by now. Waits for nothing."""
        found = []
        while self._running and (not self._events or self._running[0][1][-1][1].query()):
            step, marks = self._running.popleft()
            for (_, before, earlier), (phase, event, later) in pairwise(marks):
                host = later - earlier
                seconds = before.elapsed_time(event) / 1000 if self._events else host
                step.seconds[phase] = step.seconds.get(phase, 0.0) + seconds
                step.host[phase] = step.host.get(phase, 0.0) + host
            # the last one is the first of the next step
            self._free += [event for _, event, _ in marks[:-1] if event is not None]
            found.append(step)
        return found
