"""What was applied, what was not and why, and what it saved."""

from __future__ import annotations

import io
import sys
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_liger.padding.layout import Layout


@dataclass
class Feature:
    """One feature: on how many modules it is, and why it is not on others."""

    title: str
    applied: int = 0
    found: int = 0
    detail: str = ""
    off: list[str] = field(default_factory=list)

    def refuse(self, reason: str) -> None:
        if reason not in self.off:
            self.off.append(reason)

    def to_dict(self) -> dict[str, Any]:
        return {"applied": self.applied, "found": self.found, "detail": self.detail, "off": list(self.off)}


@dataclass
class PaddingReport(Feature):
    """Counters of padding removal; plain Python numbers, so that counting never waits for a device."""

    calls: int = 0
    packed_calls: int = 0
    padded_runs: int = 0
    positions: int = 0
    padding: int = 0
    tokens: int = 0
    _pending: int = 0

    def seen(self, shape: tuple[int, int]) -> None:
        """A training or evaluation call with ``(B, S)`` positions."""
        self.calls += 1
        self._pending = shape[0] * shape[1]
        self.positions += self._pending
        self.tokens += self._pending

    def packed(self, layout: Layout) -> None:
        self.packed_calls += 1
        self.real(layout)

    def real(self, layout: Layout) -> None:
        """The layout of the call counted last: its padding is no token."""
        missing = self._pending - layout.tokens
        self.padding += missing
        self.tokens -= missing

    def left_padded(self, reason: str) -> None:
        self.refuse(reason)

    def switched_off(self, name: str, reason: str, *, training: bool) -> None:
        self.refuse(f"{name}, {'training' if training else 'evaluation'}: {reason}")

    def ran_twice(self) -> None:
        self.padded_runs += 1

    @property
    def fraction(self) -> float:
        return self.padding / self.positions if self.positions else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            **super().to_dict(),
            "calls": self.calls,
            "packed_calls": self.packed_calls,
            "extra_padded_runs": self.padded_runs,
            "tokens": self.tokens,
            "positions": self.positions,
            "padding_fraction": self.fraction,
        }


@dataclass
class HeadReport(Feature):
    """Counters of the fused head."""

    fused_calls: int = 0
    rows: int = 0
    computed_rows: int = 0
    materialised_by: dict[str, str] = field(default_factory=dict)

    def scored(self, rows: int, computed: int) -> None:
        self.fused_calls += 1
        self.rows += rows
        self.computed_rows += computed

    def materialised(self, operator: str) -> None:
        """Logits were computed in full for ``operator``; the first call site of each is kept."""
        if operator not in self.materialised_by:
            self.materialised_by[operator] = _call_site()

    @property
    def skipped_fraction(self) -> float:
        return 1 - self.computed_rows / self.rows if self.rows else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            **super().to_dict(),
            "fused_calls": self.fused_calls,
            "rows": self.rows,
            "computed_rows": self.computed_rows,
            "skipped_fraction": self.skipped_fraction,
            "materialised_by": dict(self.materialised_by),
        }


def _call_site() -> str:
    """``file:line`` of the user's code: the innermost frame outside of torch and this package."""
    own = ("/lightning_liger/", "/torch/")
    for frame in reversed(traceback.extract_stack(sys._getframe(1))):
        path = frame.filename.replace("\\", "/")
        if not any(part in path for part in own):
            return f"{frame.filename}:{frame.lineno}"
    return "unknown"


@dataclass
class Report:
    """The whole of it; :meth:`to_dict` for machines, :meth:`rows` for people."""

    padding: PaddingReport = field(default_factory=lambda: PaddingReport("Padding removal"))
    head: HeadReport = field(default_factory=lambda: HeadReport("Fused LM head + loss"))
    notes: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Report:
        return self

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    @property
    def nothing_to_accelerate(self) -> bool:
        return self.padding.applied == 0 and self.head.applied == 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "nothing_to_accelerate": self.nothing_to_accelerate,
            "padding_free": self.padding.to_dict(),
            "fused_head": self.head.to_dict(),
            "notes": list(self.notes),
            "metrics": dict(self.metrics),
        }

    def rows(self) -> list[tuple[str, str, str]]:
        """``(feature, where, what it did)`` for the table."""
        padding, head = self.padding, self.head
        did = "no padding seen"
        if padding.positions:
            did = f"{padding.fraction:.0%} of positions are padding; {padding.packed_calls} of {padding.calls} calls packed"
        rows = [(padding.title, _where(padding), did)]
        did = "no loss computed from logits yet"
        if head.rows:
            did = f"{head.computed_rows:,} of {head.rows:,} head rows computed ({head.skipped_fraction:.0%} skipped)"
        rows.append((head.title, _where(head), did))
        return rows

    def reasons(self) -> list[str]:
        lines = [f"{f.title}: {reason}" for f in (self.padding, self.head) for reason in f.off]
        for operator, site in self.head.materialised_by.items():
            lines.append(f"{self.head.title}: logits computed in full for {operator} ({site})")
        if self.padding.padded_runs:
            lines.append(
                f"{self.padding.title}: {self.padding.padded_runs} call(s) also ran padded, because something read "
                "padded positions"
            )
        return lines + self.notes

    def render(self) -> str:
        """The table as text; drawn by rich where it is installed."""
        title = "lightning-liger: nothing to accelerate" if self.nothing_to_accelerate else "lightning-liger"
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            lines = [title, *("  " + " | ".join(row) for row in self.rows())]
            return "\n".join([*lines, *(f"  - {reason}" for reason in self.reasons())])
        table = Table(title=title, title_justify="left", title_style="bold")
        for column in ("feature", "applied", "first step"):
            table.add_column(column)
        for row in self.rows():
            table.add_row(*row)
        console = Console(width=110, record=True, file=io.StringIO())
        console.print(table)
        for reason in self.reasons():
            console.print(f"  - {reason}", markup=False, highlight=False)
        return console.export_text().rstrip("\n")


def _where(feature: Feature) -> str:
    if not feature.found:
        return "none found"
    text = f"{feature.applied}/{feature.found}"
    return f"{text} {feature.detail}".rstrip()
