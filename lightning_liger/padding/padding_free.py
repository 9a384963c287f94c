"""A forward that may run without padding, and what was learnt about it on the way."""

from __future__ import annotations

import torch.nn as nn
from torch import Tensor

from lightning_liger.patching import Rebound, Switch
from lightning_liger.report import PaddingReport


class PaddingFree(Rebound):
    """``forward`` of a module whose padding is removed where that is right.

    Attributes:
        report: counters and reasons.
        off: why calls with gradients (True) or without (False) keep their padding.
    """

    feature = "padding"

    def __init__(self, module: nn.Module, switch: Switch, report: PaddingReport) -> None:
        super().__init__(module, switch)
        self.report = report
        self.off: dict[bool, str] = {}
        self._sharded: bool | None = None

    def is_sharded(self) -> bool:
        """Whether a forward is a collective, so that ranks must run the same number of them."""
        if self._sharded is None:
            self._sharded = any(held_in_pieces(p) for p in self.module.parameters())
        return self._sharded

    def leave_padded(self, reason: str, *, training: bool) -> None:
        """Run later calls of this kind (with gradients or without) as they are."""
        if training not in self.off:
            self.off[training] = self.why = reason
            self.report.switched_off(type(self.module).__name__, reason, training=training)


def held_in_pieces(parameter: Tensor) -> bool:
    """Whether FSDP2, FSDP1 or ZeRO-3 holds the parameter."""
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor) or hasattr(parameter, "_fsdp_flattened") or hasattr(parameter, "ds_id")
