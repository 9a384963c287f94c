"""The table of backends in docs/attention.md: ``python -m lightning_liger.padding.backends.page``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_liger.padding.backends.features import OTHER_VALUES
from lightning_liger.padding.backends.registry import BACKENDS, Backend, short
from lightning_liger.pages import show_or_write

_COLUMNS = {
    "sliding windows": "window",
    "soft-capped scores": "soft-cap",
    "attention sinks": "sinks",
    "attention dropout": "dropout",
    "attention in both directions": "both directions",
    OTHER_VALUES: "other value size",
}


def markdown() -> str:
    """One row for each backend."""
    columns = ["`attention=`", "what it is", "device", "dtypes", "head sizes", *_COLUMNS.values(), "where it is from"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join([*lines, *map(_row, BACKENDS)])


def _row(backend: Backend) -> str:
    if backend.run is None:
        does = ["as the model's own"] * len(_COLUMNS)
        cells = [f"`{backend.name}`", backend.title, "any", "any", "any", *does, "the model"]
        return f"| {' | '.join(cells)} |"
    low, high = backend.capabilities[0], backend.capabilities[-1]
    device = f"CUDA, compute capability {low}.x" + ("" if low == high else f" to {high}.x")
    sizes = f"up to {backend.head_size}" + (
        f", multiples of {backend.head_multiple}" if backend.head_multiple > 1 else ""
    )
    cells = [f"`{backend.name}`", backend.title, device, ", ".join(map(short, backend.dtypes)), sizes]
    cells += ["yes" if what in backend.can else "–" for what in _COLUMNS]
    return f"| {' | '.join([*cells, backend.install.replace('|', '/')])} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or write it between the marks of a page."""
    parser = argparse.ArgumentParser(prog="python -m lightning_liger.padding.backends.page", description=__doc__)
    parser.add_argument("--write", type=Path, help="page to write the table into, between its marks")
    given = parser.parse_args(arguments)
    return show_or_write(markdown(), given.write)


if __name__ == "__main__":
    sys.exit(main())
