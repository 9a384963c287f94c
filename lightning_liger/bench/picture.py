"""The comparison as a picture: the loss, and bars of tokens per second and of memory. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_liger.bench.results import Comparison, Row

INK, MUTED, GRID = "#1f2937", "#6b7280", "#e5e7eb"
PLAIN, FAST, _PEER, FAILED = "#94a3b8", "#2563eb", "#c4b5fd", "#dc2626"
STYLE: dict[Any, Any] = {
    "axes.edgecolor": GRID,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "font.size": 10,
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


def save_picture(comparisons: list[Comparison], path: Path) -> None:
    """One row of bars per comparison.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [(c, [row for row in c.rows if not row.variant.skipped]) for c in comparisons]
    heights = [0.9 + 0.42 * len(rows) for _, rows in shown]
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(
            len(shown), 3, figsize=(15, sum(heights) + 0.3), height_ratios=heights, squeeze=False
        )
        figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.12)
        for (speed, memory, loss), (comparison, rows) in zip(axes, shown, strict=True):
            name = f"{comparison.name}: " if comparison.name else ""
            _bars(speed, f"{name}real tokens per second", rows, [_speed(row) for row in rows], "{:,.0f}")
            _bars(memory, "Peak memory of training, GB", rows, [_memory(row) for row in rows], "{:.2f}")
            _curves(loss, comparison)
        figure.savefig(path, dpi=150, facecolor="white")
        pyplot.close(figure)


def _bars(axes: Any, title: str, rows: list[Row], values: list[float | None], form: str) -> None:
    from matplotlib import ticker

    colors = [PLAIN if index == 0 else _PEER if row.variant.peer else FAST for index, row in enumerate(rows)]
    bars = axes.barh([row.name for row in rows], [value or 0.0 for value in values], height=0.62, color=colors)
    for bar, row, value in zip(bars, rows, values, strict=True):
        failed = "out of memory" if row.out_of_memory else "failed" if row.failure else "not known"
        text = failed if value is None else form.format(value)
        axes.annotate(
            text,
            (bar.get_width(), bar.get_y() + bar.get_height() / 2),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=FAILED if value is None and row.failure else INK,
            fontweight="bold",
            fontsize=9,
        )
    axes.set_title(title)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(4))
    axes.grid(axis="x")


def _curves(axes: Any, comparison: Comparison) -> None:
    """Plain's losses, and on them those of the last variant that saw the same batches."""
    from matplotlib import ticker

    axes.set_title("Loss on the same batches")
    same = [r for r in comparison.rows[1:] if r.measured and r.variant.same_batches and not r.variant.peer]
    shown = ([comparison.plain] if comparison.plain.measured else []) + same[-1:]
    for row, wide in zip(shown, (True, False), strict=False):
        plain = row is comparison.plain
        steps = range(1, len(row.losses(0)) + 1)
        axes.plot(
            steps,
            row.losses(0),
            color=PLAIN if plain else FAST,
            linewidth=5 if wide else 1.6,
            solid_capstyle="round",
            label=row.name,
        )
    axes.set_xlabel("optimizer step", color=MUTED)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
    axes.grid()
    if shown:
        axes.legend(frameon=False, labelcolor=INK)


def _speed(row: Row) -> float | None:
    return row.tokens_per_second if row.measured else None


def _memory(row: Row) -> float | None:
    return row.peak_memory / 1e9 if row.measured else None
