"""Tables of the documentation that a command writes between two marks of a page."""

from __future__ import annotations

import sys
from pathlib import Path

_BEGIN, _END = "<!-- table: begin -->", "<!-- table: end -->"


def show_or_write(table: str, page: Path | None) -> int:
    """Print ``table``, or put it between the marks of ``page``. The exit status of a command."""
    if page is None:
        print(table)
        return 0
    before, _, rest = page.read_text(encoding="utf-8").partition(_BEGIN)
    _, found, after = rest.partition(_END)
    if not found:
        print(f"{page} has no {_BEGIN} … {_END}", file=sys.stderr)
        return 1
    page.write_text(f"{before}{_BEGIN}\n{table}\n{_END}{after}", encoding="utf-8")
    return 0
