"""What the two runs say when they are laid side by side: tables, a picture, and a verdict."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from side_by_side import Outcome, Settings

try:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
except ImportError:
    Console = Table = None  # type: ignore[assignment, misc]

TOLERANCE = 1e-5
SHOWN_LOSSES = 40


@dataclass(frozen=True)
class Comparison:
    settings: Settings
    plain: Outcome
    accelerated: Outcome

    @property
    def same_batches(self) -> bool:
        return self.plain.checksums == self.accelerated.checksums

    @property
    def differences(self) -> list[float]:
        pairs = zip(self.plain.losses, self.accelerated.losses, strict=True)
        return [abs(fast - plain) / abs(plain) if fast != plain else 0.0 for plain, fast in pairs]

    @property
    def largest_difference(self) -> float:
        # max() would let a NaN, which compares false with everything, pass for agreement
        return next((d for d in self.differences if d != d), max(self.differences))

    @property
    def speedup(self) -> float:
        return self.accelerated.tokens_per_second / self.plain.tokens_per_second

    @property
    def speedup_of_turns(self) -> tuple[float, float, float]:
        """Least, median and greatest: how much the machine's noise could have changed the ratio."""
        turns = zip(self.plain.measured, self.accelerated.measured, strict=True)
        ratios = [plain.seconds / fast.seconds for plain, fast in turns]
        return min(ratios), median(ratios), max(ratios)

    @property
    def exact_arithmetic(self) -> bool:
        return self.settings.precision in ("32", "32-true")

    def problems(self) -> list[str]:
        problems = []
        if not self.same_batches:
            problems.append("The two runs did not see the same batches, so nothing above compares like with like.")
        if self.exact_arithmetic and not self.largest_difference <= TOLERANCE:
            problems.append(f"The losses differ by {self.largest_difference:.1e}, more than {TOLERANCE:.0e} relative.")
        return problems

    def to_dict(self) -> dict[str, Any]:
        return {
            "settings": asdict(self.settings),
            "largest_relative_loss_difference": self.largest_difference,
            "same_batches": self.same_batches,
            "padding_fraction": self.plain.padding,
            "speedup": self.speedup,
            "speedup_of_turns": self.speedup_of_turns,
            **{
                name: {
                    "tokens_per_second": outcome.tokens_per_second,
                    "peak_memory_bytes": outcome.peak_memory,
                    "losses": outcome.losses,
                }
                for name, outcome in (("plain", self.plain), ("accelerated", self.accelerated))
            },
        }


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rich's table where rich is there, else the same in plain text."""
    rows = list(rows)
    if Table is not None:
        made = Table(box=SIMPLE_HEAD)
        for index, column in enumerate(columns):
            made.add_column(column, justify="right" if index else "left")
        for row in rows:
            made.add_row(*row)
        console = Console()
        with console.capture() as capture:
            console.print(made)
        return f"{title}\n{capture.get().strip(chr(10))}\n"
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        name, *numbers = zip(cells, widths, strict=True)
        return "  ".join([name[0].ljust(name[1]), *(cell.rjust(width) for cell, width in numbers)]).rstrip()

    return "\n".join([title, "", line(columns), "  ".join("-" * width for width in widths), *map(line, rows), ""])


def loss_table(comparison: Comparison) -> str:
    plain, fast = comparison.plain.losses, comparison.accelerated.losses
    every = -(-len(plain) // SHOWN_LOSSES)
    shown = [step for step in range(len(plain)) if step % every == 0 or step == len(plain) - 1]
    rows = [
        (str(step + 1), f"{plain[step]:.6f}", f"{fast[step]:.6f}", relative(comparison.differences[step]))
        for step in shown
    ]
    title = "Loss per step" if every == 1 else f"Loss at every {every}th step"
    return table(title, ("step", "plain", "accelerated", "relative difference"), rows)


def relative(difference: float) -> str:
    return f"{difference:.1e}" if difference else "0"


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


def summary_rows(comparison: Comparison) -> list[tuple[str, str, str, str]]:
    plain, fast = comparison.plain, comparison.accelerated
    speeds = [f"{outcome.tokens_per_second:,.0f}" for outcome in (plain, fast)]
    memories = [gigabytes(outcome.peak_memory) for outcome in (plain, fast)]
    memory = f"{fast.peak_memory / plain.peak_memory:.2f}×" if plain.peak_memory else ""
    apart = f"at most {relative(comparison.largest_difference)} apart"
    same = "the same batches" if comparison.same_batches else "DIFFERENT BATCHES"
    return [
        ("real tokens per second", *speeds, f"{comparison.speedup:.2f}×"),  # type: ignore[list-item]
        ("peak memory of training", *memories, memory),  # type: ignore[list-item]
        (f"loss at step {len(plain.losses)}", f"{plain.losses[-1]:.6f}", f"{fast.losses[-1]:.6f}", apart),
        ("padding in the batches", f"{plain.padding:.0%}", f"{fast.padding:.0%}", same),
    ]


def summary(comparison: Comparison) -> str:
    low, middle, high = comparison.speedup_of_turns
    memory = "allocated on the GPU" if comparison.plain.device.startswith("cuda") else "above the process before `fit`"
    note = textwrap.fill(
        f"Losses differ relatively, over all {len(comparison.plain.losses)} optimizer steps. The first "
        f"{comparison.settings.steps_per_turn} steps are warm-up and not timed. Turn by turn, the ratio of tokens per "
        f"second was {low:.2f}× to {high:.2f}×, median {middle:.2f}×. Real tokens are those that are not padding. "
        f"Memory is what was {memory}, at its peak.",
        width=100,
    )
    return table("Result", ("", "plain", "accelerated", "compared"), summary_rows(comparison)) + f"\n{note}\n"


def save_json(comparison: Comparison, path: Path) -> None:
    path.write_text(json.dumps(comparison.to_dict(), indent=2) + "\n", encoding="utf-8")
