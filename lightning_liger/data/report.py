"""What became of the batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_FULL = 0.9


@dataclass
class BatchingReport:
    """Token-budget batches; all zero while they are not asked for.

    Attributes:
        budget: tokens per batch and rank.
        samples: in the dataset.
        overlong: samples of more tokens than the budget, and what became of them.
        steps_before: batches per epoch and rank that the user's loader would have made.
        steps: batches per epoch and rank now.
        fill: share of the budget that batches use, over an epoch.
        found: how the budget was found, if not by the user.
        streams: loaders over streams, whose steps nobody knows.
        off: loaders that keep their batches, and why.
    """

    budget: int = 0
    samples: int = 0
    overlong: int = 0
    overlong_are: str = ""
    steps_before: int = 0
    steps: int = 0
    fill: float = 0.0
    found: str = ""
    streams: int = 0
    off: list[str] = field(default_factory=list)

    def refuse(self, reason: str) -> None:
        if reason not in self.off:
            self.off.append(reason)

    @property
    def tokens_of_most_batches(self) -> int | None:
        """The budget, where batches come close to it."""
        return self.budget if self.streams or self.fill >= _FULL else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "budget": self.budget,
            "samples": self.samples,
            "overlong": self.overlong,
            "steps_before": self.steps_before,
            "steps": self.steps,
            "fill": self.fill,
            "found": self.found,
            "streams": self.streams,
            "off": list(self.off),
        }

    def rows(self) -> list[tuple[str, str, str]]:
        if self.streams and not self.steps:
            return [(TITLE, f"{self.streams} stream{'' if self.streams == 1 else 's'}", f"{self.budget:,} tokens")]
        if not self.steps:
            return []
        if self.steps == self.steps_before:
            did = f"{self.steps:,} steps per epoch, as before; batches {self.fill:.0%} full"
        else:
            did = f"{self.steps:,} steps per epoch instead of {self.steps_before:,}; batches {self.fill:.0%} full"
        return [(TITLE, f"{self.samples:,} samples", did)]

    def reasons(self) -> list[str]:
        lines = [f"{TITLE}: {reason}" for reason in self.off]
        if self.found:
            lines.append(f"{TITLE}: {self.found}, at most {self.budget:,} tokens each")
        if self.overlong:
            lines.append(f"{TITLE}: {self.overlong:,} samples over {self.budget:,} tokens {self.overlong_are}")
        if self.steps and self.steps < self.steps_before:
            lines.append(
                f"{TITLE}: a step now holds {self.steps_before / self.steps:.1f} times as many samples; schedules that "
                "count steps end sooner, and the learning rate may want to grow with it"
            )
        return lines


TITLE = "Token-budget batches"
