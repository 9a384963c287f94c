"""What was measured, and what follows from it."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from lightning_liger.bench.machines import as_dict
from lightning_liger.bench.messages import Done, Failure, Plan, Turn
from lightning_liger.bench.smoothness import Smoothness, smoothness
from lightning_liger.bench.variants import Variant

# Losses on the same batches may differ by so much, relatively: rounding of fp32; of bf16, which keeps 8 bits.
TOLERANCE = {"32": 1e-5, "bf16": 2.0**-7}


@dataclass
class Row:
    """One variant.

    Attributes:
        peak_flops: FLOP/s of the device in the precision that is computed in; None where it is not known.
        warm_ups: one per run; not measured, but their losses are compared.
        turns: measured ones.
        runs: turns of each run on end, the warm-up first.
        failure: why there is nothing more, or ``""``.
    """

    variant: Variant
    precision: str = ""
    peak_flops: float | None = None
    warm_ups: list[Turn] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    runs: list[list[Turn]] = field(default_factory=list)
    peak_memory: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    failure: str = ""
    out_of_memory: bool = False
    trace: str = ""
    largest: int = 0

    def __post_init__(self) -> None:
        self.failure = self.failure or self.variant.skipped

    @property
    def name(self) -> str:
        return self.variant.name

    def add_warm_up(self, turn: Turn) -> None:
        self.warm_ups.append(turn)
        self.runs.append([])
        self._add(turn)

    def add_turn(self, turn: Turn) -> None:
        self.turns.append(turn)
        self._add(turn)

    def _add(self, turn: Turn) -> None:
        self.runs[-1].append(turn)
        self.largest = max(self.largest, turn.largest)
        self.peak_memory = max(self.peak_memory, turn.peak_memory)

    def end(self, done: Done) -> None:
        self.peak_memory = max(self.peak_memory, done.peak_memory)
        self.settings, self.report, self.reasons = done.settings, done.report, done.reasons

    def fail(self, failure: Failure) -> None:
        self.failure, self.out_of_memory, self.trace = failure.what, failure.out_of_memory, failure.trace
        self.largest = max(self.largest, failure.largest)
        self.turns = []  # a run that ends like this is no measurement

    # -- what follows ----------------------------------------------------------------------------------------------

    @property
    def measured(self) -> bool:
        return bool(self.turns)

    @property
    def seconds(self) -> list[float]:
        """Of all measured steps."""
        return [second for turn in self.turns for second in turn.seconds]

    @property
    def step_seconds(self) -> float:
        """The median."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half of what lies between the quartiles of the seconds of a step, over their median."""
        if len(self.seconds) < 2:
            return 0.0
        low, middle, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / 2 / middle

    @property
    def tokens_per_second(self) -> float | None:
        """Real tokens over seconds, of the median step, so that one that allocated does not count; None if not counted."""
        return (
            None
            if any(turn.tokens is None for turn in self.turns)
            else statistics.median(rate for turn in self.turns for rate in turn.rates)
        )

    @property
    def tokens_per_step(self) -> float | None:
        """The mean."""
        tokens = [count for turn in self.turns for count in turn.tokens or ()]
        return statistics.fmean(tokens) if tokens else None

    @property
    def padding(self) -> float | None:
        """Share of the positions of the batches that is padding."""
        turns = [turn for run in self.runs for turn in run]
        positions = sum(sum(turn.positions) for turn in turns)
        if not positions or any(turn.tokens is None for turn in turns):
            return None
        return 1 - sum(sum(turn.tokens or ()) for turn in turns) / positions

    @property
    def flops_per_second(self) -> float | None:
        if not self.turns or any(turn.flops is None for turn in self.turns):
            return None
        return statistics.median(
            flops / seconds
            for turn in self.turns
            for flops, seconds in zip(turn.flops or (), turn.seconds, strict=True)
        )

    @property
    def lag(self) -> float | None:
        """Of the device behind the host at the end of a turn, in steps: the median; None where they are one."""
        lags = [turn.lag for turn in self.turns if turn.lag is not None]
        return statistics.median(lags) / self.step_seconds if lags else None

    @property
    def smoothness(self) -> Smoothness | None:
        return smoothness(self.losses(0)) if self.runs else None

    def losses(self, run: int) -> list[float]:
        """Of each step, from the first one on."""
        return [loss for turn in self.runs[run] for loss in turn.losses]

    def checksums(self, run: int) -> list[int]:
        return [checksum for turn in self.runs[run] for checksum in turn.checksums]


@dataclass
class Comparison:
    """All variants of one training; the first row is what the others are compared with.

    Attributes:
        order: how they took turns, see :mod:`lightning_liger.bench.schedule`.
    """

    plan: Plan
    rows: list[Row]
    name: str = ""
    device: str = ""
    order: str = ""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def plain(self) -> Row:
        return self.rows[0]

    def speedup(self, row: Row) -> float | None:
        """How many times as fast as plain, the median of the rounds; None where that cannot be compared."""
        ratios = self._speedups(row)
        return statistics.median(ratios) if ratios else None

    def speedup_of_turns(self, row: Row) -> tuple[float, float] | None:
        """The least and the greatest of all rounds: how much the machine's noise could have changed the ratio."""
        ratios = self._speedups(row)
        return (min(ratios), max(ratios)) if ratios else None

    def _speedups(self, row: Row) -> list[float]:
        """Of each round: the median of its steps, each against plain's with the same batch.

        Steps hold different numbers of tokens, so that the median steps of two variants would be two batches. Where the
        batches differ it is tokens per second against tokens per second.
        """
        pairs = list(zip(self.plain.turns, row.turns, strict=False))
        if row.variant.same_batches:
            return [
                statistics.median(slow / fast for slow, fast in zip(plain.seconds, own.seconds, strict=False))
                for plain, own in pairs
            ]
        if any(turn.tokens is None for pair in pairs for turn in pair):
            return []
        return [statistics.median(own.rates) / statistics.median(plain.rates) for plain, own in pairs]

    def memory_ratio(self, row: Row) -> float | None:
        return row.peak_memory / self.plain.peak_memory if row.measured and self.plain.peak_memory else None

    def base(self, row: Row) -> Row | None:
        """Whose batches a variant sees: plain's, or those of the first one whose batches are others; None for these two."""
        if row.variant.own_batches:
            return None
        others = (r for r in self.rows if r.measured and not (r.variant.same_batches or r.variant.own_batches))
        found = self.plain if row.variant.same_batches else next(others, None)
        return None if found is row else found

    def same_batches(self, row: Row) -> bool:
        """Whether a variant that should have seen plain's batches did."""
        base = self.base(row)
        if base is None:
            return True
        pairs = [(base.checksums(r), row.checksums(r)) for r in self._common_runs(base, row)]
        return all(a == b for plain, own in pairs for a, b in zip(plain, own, strict=False))

    def deviation(self, row: Row) -> float | None:
        """The largest relative difference of a step's loss from :meth:`base`'s; None where there is none, or no loss."""
        base = self.base(row)
        if base is None or not row.measured or not base.runs:
            return None
        pairs = [
            pair for r in self._common_runs(base, row) for pair in zip(base.losses(r), row.losses(r), strict=False)
        ]
        if not pairs or all(math.isnan(plain) and math.isnan(own) for plain, own in pairs):
            return None
        found = [0.0 if own == plain else abs(own - plain) / max(abs(plain), 1e-12) for plain, own in pairs]
        # max() would let a NaN, which compares false with everything, pass for agreement
        return next((d for d in found if math.isnan(d)), max(found))

    def tolerance(self, row: Row) -> float:
        """How far apart losses of the same batches may be."""
        lower = row.variant.lower_precision or "bf16" in row.precision or "16" in self.plain.precision
        return TOLERANCE["bf16" if lower else "32"]

    def mfu(self, row: Row) -> float | None:
        rate = row.flops_per_second
        return None if rate is None or not row.peak_flops else rate / row.peak_flops

    def problems(self) -> list[str]:
        """What makes the comparison worthless, or a variant wrong."""
        found = []
        for row in self.rows:
            if row.failure and not row.variant.skipped and not row.variant.peer and not row.out_of_memory:
                found.append(f"{row.name} failed: {row.failure}")
            base = self.base(row)
            if not row.measured or base is None:
                continue
            if not self.same_batches(row):
                found.append(f"{row.name} did not see {base.name}'s batches, so it is not compared with like.")
            deviation = self.deviation(row)
            if deviation is not None and not deviation <= self.tolerance(row):
                found.append(
                    f"{row.name}: losses differ from {base.name}'s by {deviation:.1e}, more than {self.tolerance(row):.0e} relative."
                )
        return found

    @staticmethod
    def _common_runs(one: Row, other: Row) -> range:
        return range(min(len(one.runs), len(other.runs)))

    def to_dict(self) -> dict[str, Any]:
        """For machines; bytes, seconds, and floating point operations per second."""
        return as_dict(self)
