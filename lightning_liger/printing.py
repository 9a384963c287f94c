"""Tables of text for a terminal."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterable, Sequence

_WIDEST = 110


def printable(text: str) -> str:
    """``text`` as the standard output can show it: a table must not end a training run on an ASCII terminal."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        return text.encode(encoding).decode(encoding)
    except UnicodeEncodeError:
        return text.replace(" · ", ", ").encode(encoding, "replace").decode(encoding)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False, width: int = 0) -> str:
    """The table as text, without a line break at its end.

    Args:
        columns: their titles.
        rows: as many cells each.
        numbers: all columns but the first hold numbers: they are set on the right, and never wrapped.
        width: of the text; that of the terminal, up to 110 columns, if left out.
    """
    lines = [list(columns), *map(list, rows)]
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return _plain(lines, numbers)
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
    drawn = box.SIMPLE_HEAD if numbers else box.HEAVY_HEAD
    made = Table(box=drawn if "utf" in encoding else box.ASCII)
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if numbers and index else "left", no_wrap=numbers)
    for line in lines[1:]:
        made.add_row(*line)
    if not width:
        width = min(max(shutil.get_terminal_size((_WIDEST, 24)).columns, 60), _WIDEST)
    if numbers:
        width = max(width, made.__rich_measure__(Console(), Console(width=10_000).options).maximum)
    console = Console(width=width, record=True, file=io.StringIO(), markup=False)
    console.print(made)
    drawn_lines = [line.rstrip() for line in console.export_text().splitlines()]
    return "\n".join(line for line in drawn_lines if line)


def _plain(lines: list[list[str]], numbers: bool) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    padded = [
        "  ".join(
            text.rjust(width) if numbers and i else text.ljust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join(f"  {line}".rstrip() for line in (padded[0], rule, *padded[1:]))
