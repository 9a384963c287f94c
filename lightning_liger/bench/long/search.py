"""The largest number that fits, found by doubling and halving, where a trial that does not fit is an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Attempt:
    """One length, tried.

    Attributes:
        tokens: of the document. fits: it trained. what: why not, or ``""``. failed: for another reason than memory.
        seconds: of one optimizer step. peak_memory: bytes. loss: of the first step. flops: of the model for one step.
    """

    tokens: int
    fits: bool
    what: str = ""
    failed: bool = False
    seconds: float = 0.0
    peak_memory: int = 0
    loss: float = float("nan")
    flops: float | None = None
    trace: str = ""


@dataclass(frozen=True)
class Longest:
    """What a search found.

    Attributes:
        attempts: in order. best: the longest that fits, or None. bounded: what ended the search: ``"memory"``,
            ``"time"`` (a longer step would take too long), ``"limit"`` (nothing longer was asked for), ``"failure"``.
    """

    attempts: tuple[Attempt, ...]
    bounded: str

    @property
    def best(self) -> Attempt | None:
        return max((a for a in self.attempts if a.fits), key=lambda a: a.tokens, default=None)


def longest(
    attempt: Callable[[int], Attempt],
    start: int,
    *,
    hint: int = 0,
    least: int,
    most: int,
    resolution: float = 1 / 8,
    step_seconds: float = float("inf"),
) -> Longest:
    """Search upwards and downwards from ``start``.

    Args:
        attempt: tries one length.
        start: the first length. hint: one that is likely to fit, tried next where it is longer.
        least, most: bounds of the search; lengths are multiples of ``least``.
        resolution: the search ends where the shortest that does not fit is longer by no more than this share.
        step_seconds: lengths whose step is expected to take longer, by the square of the length, are not tried.
    """

    def rounded(tokens: float) -> int:
        return max(least, min(most, int(tokens) // least * least))

    made: list[Attempt] = []
    low, high = 0, 0  # fits, does not fit; 0 where nothing is known
    probe, time_is_up = rounded(start), False
    while probe and not (made and made[-1].failed):
        made.append(found := attempt(probe))
        if found.fits:
            low = probe
        else:
            high = probe
        if not low:
            probe = rounded(high / 2) if high > least else 0
            continue
        if not high:
            longer = rounded(hint) if rounded(hint) > low else rounded(2 * low)
            probe = longer if longer > low else 0
        else:
            probe = rounded((low * high) ** 0.5) if high > (1 + resolution) * low else 0
            probe = 0 if probe in (low, high) else probe
        latest = next(a for a in reversed(made) if a.fits)
        if probe and latest.seconds * (probe / latest.tokens) ** 2 > step_seconds:
            # as far as time goes, and no further
            allowed = rounded(latest.tokens * (step_seconds / max(latest.seconds, 1e-9)) ** 0.5)
            time_is_up = True
            probe = allowed if allowed > (1 + resolution) * low and (not high or allowed < high) else 0
    if made[-1].failed:
        return Longest(tuple(made), "failure")
    if time_is_up and not (high and high <= (1 + resolution) * max(low, 1)):
        return Longest(tuple(made), "time")
    return Longest(tuple(made), "memory" if high else "limit")
