"""Draws the pictures of docs/how-it-works.md: ``python docs/tools/drawings.py [FOLDER]``.

Each is written twice, for light and for dark pages, as SVG without fonts or scripts of its own. Numbers are those of the
tables in docs/performance.md.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

# Tokens of question and answer of the first eight training rows of GSM8K.
ROWS = [(51, 45), (39, 42), (80, 69), (69, 108), (37, 58), (85, 133), (68, 66), (132, 127)]

# "Training steps, one H200" in docs/performance.md: (what, plain, accelerated); None is out of memory.
MEMORY: list[tuple[str, float | None, float]] = [
    ("0.5B, 32 rows", 47.5, 13.5),
    ("7B, 16 rows", 100.7, 74.9),
    ("7B, 32 rows", None, 100.0),
]
TIMES: list[tuple[str, float | None, float]] = [
    ("0.5B, 32 rows", 130.6, 120.3),
    ("7B, 16 rows", 470.0, 235.1),
    ("7B, 32 rows", None, 453.7),
]


@dataclass(frozen=True)
class Theme:
    name: str
    text: str
    faint: str
    prompt: str
    answer: str
    plain: str
    ours: str


THEMES = (
    Theme("light", "#24292f", "#d0d7de", "#9aa5b1", "#6f42c1", "#9aa5b1", "#6f42c1"),
    Theme("dark", "#e6edf3", "#3d444d", "#6e7781", "#b083f0", "#6e7781", "#b083f0"),
)


@dataclass
class Canvas:
    """Shapes of one picture, in units of a pixel."""

    theme: Theme
    width: int
    height: int
    shapes: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, fill: str, *, dashed: bool = False) -> None:
        look = f'fill="none" stroke="{fill}" stroke-dasharray="3 2"' if dashed else f'fill="{fill}"'
        size = f'width="{width:.1f}" height="{height:.1f}"'
        self.shapes.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size} rx="1.5" {look}/>')

    def text(self, x: float, y: float, text: str, *, size: int = 13, anchor: str = "start") -> None:
        at = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{self.theme.text}"'
        self.shapes.append(f"<text {at}>{escape(text)}</text>")

    def svg(self) -> str:
        body = "\n".join(self.shapes)
        view = f'viewBox="0 0 {self.width} {self.height}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {view} width="{self.width}" height="{self.height}" '
            f'font-family="system-ui, sans-serif">\n{body}\n</svg>\n'
        )


def padding(theme: Theme) -> str:
    """Eight rows as a batch has them, and the one row that the decoder stack sees."""
    longest = max(q + a for q, a in ROWS)
    total = sum(q + a for q, a in ROWS)
    width, left = 480, 4
    scale = (width - 2 * left) / longest
    canvas = Canvas(theme, width, 0)
    share = 1 - total / (longest * len(ROWS))
    canvas.text(left, 20, f"your batch: {len(ROWS)} × {longest} positions, {share:.0%} of them padding")
    y = 30.0
    for question, answer in ROWS:
        canvas.box(left, y, question * scale, 16, theme.prompt)
        canvas.box(left + question * scale, y, answer * scale, 16, theme.answer)
        if question + answer < longest:
            canvas.box(left + (question + answer) * scale + 1, y, (longest - question - answer) * scale - 1, 16, theme.faint, dashed=True)  # fmt: skip
        y += 20
    y += 22
    canvas.text(left, y, f"what the model sees: 1 × {total:,} tokens, each document attends to itself")
    scale = (width - 2 * left) / total
    x = float(left)
    y += 10
    for question, answer in ROWS:
        canvas.box(x, y, question * scale, 16, theme.prompt)
        canvas.box(x + question * scale, y, answer * scale - 1.5, 16, theme.answer)
        x += (question + answer) * scale
    x = float(left)
    for start in _cumulative():
        anchor = "start" if start == 0 else "end" if start == total else "middle"
        canvas.text(x, y + 31, f"{start:,}", size=10, anchor=anchor)
        x = left + (width - 2 * left) * _after(start) / total
    y += 56
    canvas.box(left, y - 10, 12, 12, theme.prompt)
    canvas.text(left + 18, y, "question: no loss, the head never sees it")
    canvas.box(left + 300, y - 10, 12, 12, theme.faint, dashed=True)
    canvas.text(left + 318, y, "padding")
    canvas.box(left, y + 10, 12, 12, theme.answer)
    canvas.text(left + 18, y + 20, "answer: rows whose label counts")
    canvas.height = int(y + 34)
    return canvas.svg()


def _cumulative() -> list[int]:
    """``cu_seqlens``."""
    found = [0]
    for question, answer in ROWS:
        found.append(found[-1] + question + answer)
    return found


def _after(start: int) -> int:
    later = [s for s in _cumulative() if s > start]
    return later[0] if later else start


def bars(theme: Theme, title: str, unit: str, numbers: list[tuple[str, float | None, float]], limit: float) -> str:
    """Two bars for each case."""
    width, left, height = 480, 105, 30
    canvas = Canvas(theme, width, 50 + len(numbers) * (height * 2 + 14))
    canvas.text(4, 20, title)
    scale = (width - left - 150) / limit
    y = 36.0
    for what, plain, ours in numbers:
        canvas.text(4, y + 34, what)
        for name, value, fill in (("plain", plain, theme.plain), ("accelerated", ours, theme.ours)):
            if value is None:
                canvas.box(left, y, limit * scale, height - 6, theme.faint, dashed=True)
                canvas.text(left + 8, y + 16, f"{name}: out of memory")
            else:
                canvas.box(left, y, value * scale, height - 6, fill)
                canvas.text(left + value * scale + 8, y + 16, f"{name} {value:g} {unit}")
            y += height
        y += 14
    return canvas.svg()


def draw(theme: Theme) -> dict[str, str]:
    """SVG by the name of the picture."""
    return {
        "padding": padding(theme),
        "memory": bars(theme, "peak memory of a training step, one H200 (GB)", "GB", MEMORY, 141),
        "timeline": bars(theme, "one training step, one H200 (ms)", "ms", TIMES, 500),
    }


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "images"
    folder.mkdir(parents=True, exist_ok=True)
    for theme in THEMES:
        for name, svg in draw(theme).items():
            (folder / f"{name}-{theme.name}.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
