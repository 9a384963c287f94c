"""The longest documents for people: a table and its footer, and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_liger.bench.long.measuring import LongResult
from lightning_liger.bench.long.rungs import Rung
from lightning_liger.bench.long.search import Attempt, Longest
from lightning_liger.bench.picture import FAILED, FAST, INK, PLAIN, STYLE
from lightning_liger.printing import table

_BOUNDS = {
    "memory": "memory",
    "time": "time of a step",
    "limit": "nothing longer was tried",
    "failure": "an error",
}
_COLUMNS = ("longest, tokens", "bound by", "x plain", "peak GB", "s/step", "tokens/s", "MFU", "at {}: GB", "tokens/s")
_EXPLAINED = (
    "longest: tokens of one document that trains, to within 1/8. bound by: what the search met there. peak GB, s/step, "
    "tokens/s, MFU: of the second optimizer step at that length; MFU counts each operation of the model once, those of "
    "the documents' attention included, and no recomputation. The last two columns: every way at plain's longest."
)


def show(result: LongResult) -> str:
    """Table, meanings and notes as text."""
    device = result.device
    where = "no device" if device is None else f"{device.name}, {device.memory / 1e9:.0f} GB"
    title = f"long {result.size}: {where}, precision {result.precision}"
    common = _common(result)
    columns = ["variant", *(c.format(f"{common:,}") for c in _COLUMNS)]
    rows = [[rung.name, *_cells(result, found, common)] for rung, found in result.found]
    meanings = [f"  {rung.name}: {rung.meaning}" for rung, _ in result.found]
    problems = [f"  - {problem}" for problem in result.problems()]
    differences = [f"  - {line}" for line in loss_notes(result)]
    notes = ["", "Notes:", *problems, *differences] if problems or differences else []
    return "\n".join([title, table(columns, rows, numbers=True), "", *meanings, "", _EXPLAINED, *notes])


def loss_notes(result: LongResult) -> list[str]:
    """Losses at the common length against plain's."""
    common = _common(result)
    plain = _at(result.found[0][1], common) if result.found else None
    if plain is None:
        return []
    made = []
    for rung, found in result.found[1:]:
        other = _at(found, common)
        if other is not None:
            off = abs(other.loss - plain.loss) / max(abs(plain.loss), 1e-12)
            made.append(
                f"{rung.name}: loss {other.loss:.6f} at {common:,} tokens, plain {plain.loss:.6f} ({off:.1e} apart)"
            )
    return made


def _common(result: LongResult) -> int:
    best = result.found[0][1].best if result.found else None
    return 0 if best is None else best.tokens


def _at(found: Longest, tokens: int) -> Attempt | None:
    return next((a for a in found.attempts if a.fits and a.tokens == tokens), None)


def _cells(result: LongResult, found: Longest, common: int) -> list[str]:
    best, there = found.best, _at(found, common)
    if best is None:
        return ["none", _BOUNDS[found.bounded], *["–"] * 7]
    peak = None if result.device is None else result.device.flops
    mfu = f"{best.flops / best.seconds / peak:.1%}" if peak and best.flops else "–"
    return [
        f"{best.tokens:,}",
        _BOUNDS[found.bounded],
        f"{best.tokens / common:.1f}" if common else "–",
        f"{best.peak_memory / 1e9:.2f}",
        f"{best.seconds:.2f}",
        f"{best.tokens / best.seconds:,.0f}",
        mfu,
        f"{there.peak_memory / 1e9:.2f}" if there else "–",
        f"{there.tokens / there.seconds:,.0f}" if there else "–",
    ]


def save_picture(results: list[LongResult], path: Path) -> None:
    """The longest document of every way, and memory against length.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heights = [1.2 + 0.42 * len(result.found) for result in results]
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(
            len(results), 2, figsize=(13, sum(heights) + 0.6), height_ratios=heights, squeeze=False
        )
        figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.12)
        for (bars, curves), result in zip(axes, results, strict=True):
            _bars(bars, result)
            _curves(curves, result)
        figure.savefig(path, dpi=150, facecolor="white")
        pyplot.close(figure)


def _bars(axes: Any, result: LongResult) -> None:
    names = [rung.name for rung, _ in result.found]
    values = [0 if found.best is None else found.best.tokens for _, found in result.found]
    colors = [PLAIN if i == 0 else FAST for i in range(len(names))]
    drawn = axes.barh(names, values, height=0.62, color=colors)
    for bar, value, (_, found) in zip(drawn, values, result.found, strict=True):
        text = "none" if not value else f"{value:,}" + (" or more" if found.bounded in ("time", "limit") else "")
        place = (bar.get_width(), bar.get_y() + bar.get_height() / 2)
        axes.annotate(
            text, place, xytext=(5, 0), textcoords="offset points", va="center", fontsize=9, color=INK if value else FAILED
        )  # fmt: skip
    axes.set_title(f"{result.size}: longest document that trains, tokens")
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlim(left=0)
    axes.locator_params(axis="x", nbins=5)
    axes.grid(axis="x")


def _curves(axes: Any, result: LongResult) -> None:
    axes.set_title("Peak memory of training, GB, by tokens of the document")
    drawn: list[tuple[Rung, Longest]] = [(r, f) for r, f in result.found if f.best is not None]
    for i, (rung, found) in enumerate(drawn):
        points = sorted((a.tokens, a.peak_memory / 1e9) for a in found.attempts if a.fits)
        shade = 0.35 + 0.65 * i / max(len(drawn) - 1, 1)
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=rung.name, color=FAST, alpha=shade)
    if result.device is not None and result.device.kind == "cuda":
        axes.axhline(result.device.memory / 1e9, color=FAILED, linewidth=1, linestyle=":")
    axes.grid()
    if drawn:
        axes.legend(frameon=False, labelcolor=INK, fontsize=8)
