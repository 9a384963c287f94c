"""What the model of a job has to compute for a batch, the same for all variants, and what its device could."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn as nn

from lightning_liger.bench.batches import Contents
from lightning_liger.calls import BackboneCall, HeadCall
from lightning_liger.head.finding import find_heads
from lightning_liger.meter.operations import Operations
from lightning_liger.meter.peaks import ceiling


class Work:
    """Operations of batches, from their real tokens and labels; see :mod:`lightning_liger.meter.flops`.

    They are asked of the batch, not of what ran: a variant that computes padding as well has no more of them.
    """

    def __init__(self, module: nn.Module) -> None:
        operations = Operations(module)
        known = len(operations.structures) == 1 and not operations.unknown
        self._operations = operations if known else None
        self._heads = [head for head in find_heads(module, None)[0] if isinstance(head, nn.Linear)]

    def of(self, step: Sequence[Contents]) -> float | None:
        """Forward and backward of one optimizer step; None where they are not known."""
        found = [self._of(batch) for batch in step]
        return None if any(f is None for f in found) else sum(f or 0.0 for f in found)

    def _of(self, batch: Contents) -> float | None:
        if self._operations is None or not batch.lengths or batch.parts != 1:
            return None
        (model,) = self._operations.structures
        shape = (len(batch.lengths), batch.positions // len(batch.lengths))
        rows = batch.labels if batch.labels is not None else batch.tokens or 0
        heads = [HeadCall(h.in_features, h.out_features, rows, True, h.weight.requires_grad, True) for h in self._heads]
        return self._operations.of([BackboneCall(model, shape, True, batch.lengths)], heads).model


def peak_flops(device: torch.device, precision: str) -> float | None:
    """FLOP/s of the device in one of Lightning's precisions; None on a CPU, which shares its cores with the rest."""
    if device.type != "cuda":
        return None
    dtype = torch.bfloat16 if "bf16" in precision else torch.float16 if precision.startswith("16") else torch.float32
    return ceiling(device, dtype).tflops * 1e12
