"""How a measuring command ends: what it prints last, and its exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def conclude(results: Sequence[Any], traces: Iterable[str], described: Callable[[Any], Any] | None) -> int:
    """Print what went wrong to stderr; 1 if something did, else 0.

    Args:
        results: each with ``problems()``.
        traces: of what failed; each is printed once.
        described: what ``--json`` prints of a result, or None.
    """
    if described is not None:
        print(json.dumps([described(r) for r in results], indent=2))
    problems = [problem for r in results for problem in r.problems()]
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    for trace in dict.fromkeys(traces):
        print(f"\n{trace}", file=sys.stderr)
    return 1 if problems else 0
