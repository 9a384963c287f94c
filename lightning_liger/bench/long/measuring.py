"""From a size to the longest document of every rung, in a process that may die of it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lightning_liger.bench.long.attempts import Device, Subject, serve
from lightning_liger.bench.long.rungs import KEYS, Rung, rungs
from lightning_liger.bench.long.search import Attempt, Longest, longest

# "tiny" is for tests: its documents are short
_FIRST = {"tiny": (256, 16384)}
_FIRST_TOKENS, _MOST_TOKENS = 8192, 2**21
_LEAST = {"tiny": 64}
_LEAST_TOKENS = 1024
_PATIENCE = 600.0  # seconds that one attempt may take before its process is given up


@dataclass
class LongResult:
    """What was found for one size.

    Attributes:
        size: of the model. device: where; None where no attempt came that far. precision: Lightning's.
        found: by rung, in order.
    """

    size: str
    precision: str
    device: Device | None = None
    found: list[tuple[Rung, Longest]] = field(default_factory=list)

    def problems(self) -> list[str]:
        """One line for each rung that failed for another reason than memory."""
        return [
            f"{self.size}, {rung.name}: {attempt.what} ({attempt.tokens:,} tokens)"
            for rung, result in self.found
            for attempt in result.attempts
            if attempt.failed
        ]


class _Process:
    """A process that makes attempts, made anew when one has killed it."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.device: Device | None = None
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, self._subject), daemon=False)
        self._process.start()
        theirs.close()
        self.device = self._pipe.recv() if self._pipe.poll(_PATIENCE) else None

    def attempt(self, rung: Rung, tokens: int) -> Attempt:
        try:
            self._pipe.send((rung, tokens))
            if self._pipe.poll(_PATIENCE):
                answer: Attempt = self._pipe.recv()
                return answer
            what, failed = f"no answer in {_PATIENCE:.0f} seconds", True
        except (EOFError, OSError):
            self._process.join(timeout=10)
            code = self._process.exitcode
            memory = code == -9  # the kernel's way to say so
            what, failed = ("out of memory" if memory else f"the process ended with exit code {code}"), not memory
        self.close()
        self._start()
        return Attempt(tokens, False, what, failed)

    def close(self) -> None:
        with suppress(OSError):
            self._pipe.send(None)
        self._pipe.close()
        self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(timeout=10)


def measure_long(
    subject: Subject,
    *,
    features: tuple[str, ...] = KEYS,
    step_seconds: float = 30.0,
    most: int | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> LongResult:
    """Find the longest document for plain and one feature more at a time.

    Every rung is first tried at the length that was the longest of plain, so that speed, memory and loss compare at one
    length, then from the longest of the rung before.

    Args:
        subject: what is trained.
        features: of :data:`~lightning_liger.bench.long.rungs.KEYS`.
        step_seconds: no step is tried that would take longer; attention grows with the square of the length.
        most: tokens, beyond which nobody looks.
        tell: told of every attempt.
    """
    result = LongResult(subject.size, subject.precision)
    start, limit = _FIRST.get(subject.size, (_FIRST_TOKENS, _MOST_TOKENS))
    least = _LEAST.get(subject.size, _LEAST_TOKENS)
    process = _Process(subject)
    result.device = process.device
    hint = 0
    try:
        if process.device is None:
            return result
        for rung in rungs(features, cuda=process.device.kind == "cuda"):

            def attempt(tokens: int, rung: Rung = rung) -> Attempt:
                found = process.attempt(rung, tokens)
                tell(f"{subject.size} {rung.name}: {tokens:,} tokens: {describe(found)}")
                return found

            found = longest(attempt, start, hint=hint, least=least, most=most or limit, step_seconds=step_seconds)
            result.found.append((rung, found))
            if found.best is not None:
                start = start if len(result.found) > 1 else found.best.tokens
                hint = max(hint, found.best.tokens)
    finally:
        process.close()
    return result


def describe(attempt: Attempt) -> str:
    """One attempt in words."""
    if not attempt.fits:
        return attempt.what
    return f"{attempt.seconds:.2f} s, peak {attempt.peak_memory / 1e9:.2f} GB"


def as_dict(result: LongResult) -> dict[str, Any]:
    """For machines."""
    device = result.device
    return {
        "suite": "long",
        "size": result.size,
        "precision": result.precision,
        "device": None if device is None else device.name,
        "device_memory": None if device is None else device.memory,
        "rungs": [
            {
                "name": rung.name,
                "meaning": rung.meaning,
                "options": None if rung.options is None else dict(rung.options),
                "strategy": None if rung.strategy is None else dict(rung.strategy),
                "longest": None if found.best is None else found.best.tokens,
                "bounded_by": found.bounded,
                "attempts": [{k: v for k, v in vars(a).items() if k != "trace"} for a in found.attempts],
            }
            for rung, found in result.found
        ],
    }
