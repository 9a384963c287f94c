"""How many shapes a training had: known at its end only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_liger.hooks import TrainingHooks
from lightning_liger.report import PaddingReport

_MANY = 16


class ShapesSeen(TrainingHooks):
    """Says at the end of a training how many shapes ``shape_buckets`` has left, and what they cost.

    Args:
        report: counts them.
        say: told one line, on every rank.
    """

    def __init__(self, report: PaddingReport, say: Callable[[str], None]) -> None:
        self._report = report
        self._say = say

    def end_training(self, trainer: Any, module: Any) -> None:
        shapes = self._report.shapes
        if not shapes:
            return
        number = f"{len(shapes)} shape{'' if len(shapes) == 1 else 's'}"
        text = (
            f"lightning-liger: batches had {number}, and {self._report.filler_fraction:.1%} of their tokens were filler"
        )
        if len(shapes) > _MANY:
            text += "; max_tokens_per_batch would make them alike, and shape_buckets=[...] names fewer sizes"
        self._say(text)
