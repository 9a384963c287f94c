"""The comparison as one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comparison import Comparison, relative

INK, MUTED, GRID = "#1f2937", "#6b7280", "#e5e7eb"
PLAIN, FAST = "#94a3b8", "#2563eb"


def _bars(axes: Any, title: str, unit: str, values: list[float], labels: list[str]) -> None:
    bars = axes.bar(["plain", "accelerated"], values, width=0.55, color=[PLAIN, FAST])
    axes.bar_label(bars, labels, padding=4, color=INK, fontsize=11, fontweight="bold")
    axes.set_title(title)
    axes.set_ylabel(unit)
    axes.margins(x=0.25, y=0.15)
    axes.grid(axis="y")


def save_picture(comparison: Comparison, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: dict[Any, Any] = {
        "axes.edgecolor": GRID,
        "axes.labelcolor": MUTED,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlecolor": INK,
        "axes.titlelocation": "left",
        "axes.titlepad": 12,
        "axes.titlesize": 12,
        "axes.titleweight": "bold",
        "font.size": 10,
        "grid.color": GRID,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
    }
    plain, fast = comparison.plain, comparison.accelerated
    steps = range(1, len(plain.losses) + 1)
    with pyplot.rc_context(style):
        figure, (loss, speed, memory) = pyplot.subplots(1, 3, figsize=(13, 4.4), width_ratios=(2, 1, 1))
        figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.12)
        loss.plot(steps, plain.losses, color=PLAIN, linewidth=5, solid_capstyle="round", label="plain")
        loss.plot(steps, fast.losses, color=FAST, linewidth=1.6, label="accelerated")
        loss.set_title(f"Same loss (largest relative difference {relative(comparison.largest_difference)})")
        loss.set_xlabel("optimizer step")
        loss.set_ylabel("training loss (nats per token)")
        loss.xaxis.get_major_locator().set_params(integer=True)
        loss.grid()
        loss.legend(frameon=False, labelcolor=INK)
        speeds = [plain.tokens_per_second, fast.tokens_per_second]
        _bars(
            speed,
            f"{comparison.speedup:.2f}× the throughput",
            "real (non-padding) tokens per second",
            speeds,
            [f"{value:,.0f}" for value in speeds],
        )
        sizes = [plain.peak_memory / 1e9, fast.peak_memory / 1e9]
        _bars(memory, "Peak memory of training", "GB", sizes, [f"{value:.2f}" for value in sizes])
        figure.savefig(path, dpi=150, facecolor="white")
        pyplot.close(figure)
