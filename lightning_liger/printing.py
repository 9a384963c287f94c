"""Tables of text for a terminal."""

from __future__ import annotations

import io
import shutil
import sys


def printable(text: str) -> str:
    """``text`` as the standard output can show it: a table must not end a training run on an ASCII terminal."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        return text.encode(encoding).decode(encoding)
    except UnicodeEncodeError:
        return text.replace(" · ", ", ").encode(encoding, "replace").decode(encoding)


def table(lines: list[tuple[str, ...]]) -> str:
    """Lines of equally many columns, the first one a title; drawn by rich where it is installed."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        columns = range(len(lines[0]))
        widths = [max(len(line[i]) for line in lines) for i in columns]
        padded = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join(f"  {line}".rstrip() for line in (padded[0], "-" * sum(widths, 4), *padded[1:]))
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
    drawn = Table(box=box.HEAVY_HEAD if "utf" in encoding else box.ASCII)
    for column in lines[0]:
        drawn.add_column(column)
    for line in lines[1:]:
        drawn.add_row(*line)
    width = min(max(shutil.get_terminal_size((110, 24)).columns, 60), 110)
    console = Console(width=width, record=True, file=io.StringIO(), markup=False)
    console.print(drawn)
    return console.export_text().rstrip("\n")
