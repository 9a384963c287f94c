"""What the process that measures and the one that asks tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

GO, STOP = "go", "stop"


@dataclass(frozen=True)
class Plan:
    """How a run goes, the same for all variants.

    Attributes:
        warmup: optimizer steps of the first turn, which pays for compilation, allocation and checks.
        steps: optimizer steps of each measured turn.
        turns: measured turns, at most.
        seed: of weights, data order and dropout.
        trainer: options of the Trainer that come before the job's own.
    """

    warmup: int = 4
    steps: int = 4
    turns: int = 3
    seed: int = 0
    trainer: dict[str, Any] = field(default_factory=dict)

    @property
    def most_steps(self) -> int:
        return self.warmup + self.steps * self.turns


@dataclass(frozen=True)
class Hello:
    """A process has imported what it needs.

    Attributes:
        usable: whether it can use CUDA devices; a fork of a process that did cannot.
    """

    usable: bool


@dataclass(frozen=True)
class Ready:
    """A run is set up and waits for its first turn.

    Attributes:
        device: its name, ``"NVIDIA H200"``.
        kind: ``"cuda"``, ``"cpu"``, ...
        precision: of the Trainer.
        peak_flops: FLOP/s of the device in that precision; None where it says nothing.
        seconds: that it took.
    """

    device: str
    kind: str
    precision: str
    peak_flops: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Turn:
    """Some optimizer steps on end.

    Attributes:
        seconds: of each step, from the end of the one before; waiting for data included.
        tokens: of each step, without padding; None where batches hold none that can be counted.
        positions: of each step, with padding.
        largest: positions of the largest batch.
        losses: of each step; NaN where the module returns none.
        checksums: of each step's batches.
        flops: floating point operations of each step's model, or None where they are not known.
        peak_memory: bytes since the beginning of the run.
        lag: seconds that the device was behind the host at the end; None where they are one.
        needs: bytes that another process like this one would need now.
        free: bytes that are free for it.
    """

    seconds: tuple[float, ...]
    tokens: tuple[int, ...] | None
    positions: tuple[int, ...]
    largest: int
    losses: tuple[float, ...]
    checksums: tuple[int, ...]
    flops: tuple[float, ...] | None
    peak_memory: int
    needs: int
    free: int
    lag: float | None = None

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each step; steps where tokens are not counted."""
        work = self.tokens if self.tokens is not None else (1,) * len(self.seconds)
        return [amount / seconds for amount, seconds in zip(work, self.seconds, strict=True)]


@dataclass(frozen=True)
class Done:
    """A run has ended.

    Attributes:
        peak_memory: bytes.
        settings: options of the callback; empty without one.
        report: of the callback, as a dict; empty without one.
        reasons: its lines for people.
    """

    peak_memory: int
    settings: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failure:
    """A run has ended before its time.

    Attributes:
        what: one line.
        out_of_memory: whether that was why.
        largest: positions of the largest batch that was seen.
        trace: the traceback, if that helps.
    """

    what: str
    out_of_memory: bool = False
    largest: int = 0
    trace: str = ""
