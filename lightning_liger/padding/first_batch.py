"""The first real batch whose padding is only inferred is run both ways, and compared.

That a causal model may lose a constant tail is known from a tiny model of its kind. Here the user's own weights and
tokens are asked as well, once: one padded and one packed run, without dropout and without gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch import Tensor

from lightning_liger.head.lazy import LazyRows
from lightning_liger.padding.layout import Layout
from lightning_liger.padding.plain import PlainRun

if TYPE_CHECKING:
    from lightning_liger.padding.boundary import PackedBackbone

# Relative to the norm of the hidden states: what kernels that round differently make of dozens of layers.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 2e-3}
_HALF_TOLERANCE = 5e-2


class FirstBatch:
    """Whether padded and packed runs agree on the first batch whose layout was inferred; asked once."""

    def __init__(self, backbone: PackedBackbone) -> None:
        self._backbone = backbone
        self._asked = False

    def disagrees(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: dict[str, Any], layout: Layout) -> str:
        """Why batches without a mask keep their padding, or ``""``."""
        if self._asked:
            return ""
        self._asked = True
        backbone = self._backbone
        if backbone.is_sharded():
            # ranks would have to run the same number of forwards, and another rank's batch may have no padding
            backbone.report.refuse(
                "padding that no mask marks is removed; the first batch was not run both ways, because the model is sharded"
            )
            return ""
        difference = self._difference(args, kwargs, call, layout)
        if difference <= 1.0:
            return ""
        return f"the first batch without a mask gives other hidden states without its padding ({difference:.1f} tolerances)"

    def _difference(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: dict[str, Any], layout: Layout) -> float:
        """Of the hidden states at real tokens, in tolerances."""
        backbone = self._backbone
        with _without_dropout(backbone.module), torch.no_grad():
            packed = _hidden(backbone.run(call, layout, PlainRun(backbone, args, kwargs, layout)))
            padded = _hidden(backbone.original(*args, **kwargs))
        real = layout.on(padded.device).index >= 0
        expected, found = padded[real].float(), packed[real].float()
        tolerance = _TOLERANCE.get(padded.dtype, _HALF_TOLERANCE)
        difference = float((found - expected).norm() / expected.norm().clamp_min(1e-12)) / tolerance
        return difference if difference == difference else float("inf")


def _hidden(output: Any) -> Tensor:
    """The first ``(B, S, H)`` of an output: zeros at padding where it was removed."""
    values = output.values() if hasattr(output, "values") else output
    found = next(v for v in values if isinstance(v, Tensor) and v.dim() == 3)
    return found.view_.dense() if isinstance(found, LazyRows) else found


@contextmanager
def _without_dropout(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; afterwards each module's own mode, and the random state of before."""
    modes = [(m, m.training) for m in module.modules()]
    devices = {p.device.index for p in module.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(d for d in devices if d is not None)):
        for m, _ in modes:
            m.training = False
        try:
            yield
        finally:
            for m, training in modes:
                m.training = training
